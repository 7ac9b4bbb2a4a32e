"""The distillation loss of the additive density, and its gradients, in one pass.

docs/derivations.md, section 9, has the formulas. X_u(k) stands for the sum over t of V(t,u) e^f,
where V is α over the total of a node, scaled by its largest number in a column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.functions import cast_like, exp, log
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.products import multiply
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.additive import (
    Batch,
    additive_saved,
    allocate,
    begin,
    direct_gradients,
    transitions,
)
from transduce.lattice.cpu.diagonals import (
    backward_flow,
    forward_backward,
    skewed_shape,
    skewed_steps,
)

LEAST_LOG_PROB = -1e5  # of what does not follow in y, and is impossible; it has no gradient


class _Results(NamedTuple):
    loss: np.ndarray  # [B]
    log_loss: np.ndarray  # [B], -ln Pr(y|x)
    grad_f: np.ndarray  # [B, T, K+1], or of no items without gradients
    grad_g: np.ndarray  # [B, U+1, K+1], likewise


class _Prefixes(NamedTuple):
    """Arrays for the prefixes of y in the largest utterance of a share."""

    weights: np.ndarray  # [T, whole vectors of U+1], V
    product: np.ndarray  # likewise, the sum over k of e^f times `ratios`
    tops: np.ndarray  # [U+1], ln of the number that scales V
    sums: np.ndarray  # [U+1, K+1], X; 0 where it is too small, and computed term by term
    log_sums: np.ndarray  # likewise
    log_joint: np.ndarray  # [U+1, K+1], ln A, and ln of the probability of the end for null
    residual: np.ndarray  # [U+1, K+1], the loss's derivative by ln A, times -1
    ratios: np.ndarray  # [U+1, K+1], -residual / X


@compiled
def _scaled_weights(one, log_alpha, weights, tops):
    """Write V, α(t,u) over the total of Eq. 13, scaled by its largest in each column u."""
    T, U = one.f.shape[0], one.labels.size
    step_t, step_u = skewed_steps(T, U)
    alpha, log_total = log_alpha.ravel(), one.log_total
    tops[: U + 1] = -np.inf
    for t in range(T):
        at = t * step_t + 1
        logs = log_total[t]
        for u in range(U + 1):
            value = alpha[at + u * step_u] - logs[u]
            tops[u] = value if value > tops[u] else tops[u]
    for t in range(T):
        at = t * step_t + 1
        logs, row = log_total[t], weights[t]
        for u in range(U + 1):
            row[u] = cast_like(alpha[at + u * step_u] - logs[u] - tops[u], one.f)
        for u in range(U + 1):
            row[u] = exp(row[u])


@compiled
def _log_emission(one, alpha, u, k, t, step_t, step_u):
    """Return ln α(t,u) Pr(k|t,u)."""
    log_f = np.float64(one.f[t, k]) - one.top_f[t]
    log_g = np.float64(one.g[u, k]) - one.top_g[u]
    return alpha[t * step_t + u * step_u + 1] + log_f + log_g - one.log_total[t, u]


@compiled
def _log_joint(one, alpha, u, k):
    """Return ln A_u(k), term by term: exact where the product underflows."""
    T = one.f.shape[0]
    step_t, step_u = skewed_steps(T, one.labels.size)
    top = -np.inf
    for t in range(T):
        top = max(top, _log_emission(one, alpha, u, k, t, step_t, step_u))
    if top <= NEVER:
        return -np.inf
    total = 0.0
    for t in range(T):
        total += np.exp(_log_emission(one, alpha, u, k, t, step_t, step_u) - top)
    return top + np.log(total)


@compiled
def _cross_entropy(one, log_alpha, targets, prefixes):
    """Return the loss and how many labels were computed term by term; fill in the residuals.

    A sum X that is too small to be trusted is computed term by term, and set to zero: terms that
    are lost to underflow are below 2 `tiny`, so that X is wrong by less than its rounding wherever
    it is above 2 T tiny / epsilon.
    """
    f, g, labels, top_g = one.f, one.g, one.labels, one.top_g
    T, U, num_outputs = f.shape[0], labels.size, f.shape[1]
    sums, log_sums, log_joint = prefixes.sums, prefixes.log_sums, prefixes.log_joint
    residual = prefixes.residual
    alpha = log_alpha.ravel()
    step_t, step_u = skewed_steps(T, U)
    info = np.finfo(f.dtype)
    threshold = cast_like(2 * T * np.float64(info.tiny) / np.float64(info.eps), f)
    multiply(prefixes.weights[:T, : U + 1].T, one.exp_f[:, :num_outputs], sums[: U + 1], False)
    numbers, logs = sums[: U + 1].ravel(), log_sums[: U + 1].ravel()
    for i in range(numbers.size):
        logs[i] = log(numbers[i] if numbers[i] > threshold else threshold)
    loss, log_entered = 0.0, 0.0  # ln Pr(y_1 ... y_u ...|x)
    num_direct = 0
    for u in range(U + 1):
        following = labels[u] if u < U else 0
        weight = 0.0
        end = alpha[T * step_t + u * step_u + 1]  # α(T,u) ∅(T,u)
        for k in range(num_outputs):
            target = np.float64(targets[u, k])
            if k == 0:
                value = end if end > NEVER else -np.inf
            elif sums[u, k] >= threshold:
                value = prefixes.tops[u] + log_sums[u, k] + (np.float64(g[u, k]) - top_g[u])
            else:
                sums[u, k] = 0
                wanted = target != 0 or k == following
                num_direct += wanted
                value = _log_joint(one, alpha, u, k) if wanted else -np.inf
            log_joint[u, k] = value
            log_prob = value - log_entered
            if log_prob < LEAST_LOG_PROB and k != following:
                loss -= target * LEAST_LOG_PROB
                residual[u, k] = 0
            else:
                loss -= target * log_prob
                residual[u, k] = targets[u, k]
                weight += target
        if u > 0:  # the normaliser of this prefix is the joint probability of its last label
            residual[u - 1, labels[u - 1]] -= cast_like(weight, f)
        log_entered = log_joint[u, following]
    return loss, num_direct


@compiled
def _sources(one, num_direct, log_alpha, prefixes, transposed, sigma):
    """Write how much the loss depends on each node by what is emitted there, skewed.

    `transposed` [K+1, whole vectors of U+1] is scratch.
    """
    f = one.f
    T, U, num_outputs = f.shape[0], one.labels.size, f.shape[1]
    sums, residual, ratios = prefixes.sums, prefixes.residual, prefixes.ratios
    weights, product = prefixes.weights, prefixes.product
    zero = cast_like(0.0, f)
    for u in range(U + 1):
        ratios[u, 0] = zero
        for k in range(1, num_outputs):
            ratios[u, k] = zero if sums[u, k] == zero else -residual[u, k] / sums[u, k]
        for k in range(num_outputs):
            transposed[k, u] = ratios[u, k]
    multiply(one.exp_f[:, :num_outputs], transposed, product[:T], False)
    sigma[:] = 0
    flat = sigma.ravel()
    step_t, step_u = skewed_steps(T, U)
    for t in range(T):
        at = t * step_t + 1
        for u in range(U + 1):
            flat[at + u * step_u] = -weights[t, u] * product[t, u]
    at = T * step_t + 1
    for u in range(U + 1):
        flat[at + u * step_u] = residual[u, 0]
    if num_direct > 0:
        _direct_labels(one, log_alpha, prefixes, flat, one.f, False)


@compiled
def _direct_labels(one, log_alpha, prefixes, flat_sigma, grad_f, with_gradients):
    """Add the emissions of labels computed term by term to the sources, or to the gradient."""
    T, U, num_outputs = one.f.shape[0], one.labels.size, one.f.shape[1]
    alpha, residual = log_alpha.ravel(), prefixes.residual
    step_t, step_u = skewed_steps(T, U)
    for u in range(U + 1):
        for k in range(1, num_outputs):
            if prefixes.sums[u, k] == 0 and residual[u, k] != 0:
                for t in range(T):
                    log_joint = prefixes.log_joint[u, k]
                    log_share = _log_emission(one, alpha, u, k, t, step_t, step_u) - log_joint
                    part = residual[u, k] * np.exp(log_share)
                    if with_gradients:
                        grad_f[t, k] -= cast_like(part, one.f)
                    else:
                        flat_sigma[t * step_t + u * step_u + 1] += part


@compiled
def _gradients(one, num_direct, log_alpha, prefixes, sigma, by_null, by_label, grad_f, grad_g):
    """Write the gradients with respect to f and g.

    sigma, by_null and by_label are skewed: the dependence of the loss on each node, and the parts
    of it that leave the node by null and by its label.
    """
    f, g, labels, exp_f, exp_g, total = one.f, one.g, one.labels, one.exp_f, one.exp_g, one.total
    T, U, num_outputs = f.shape[0], labels.size, f.shape[1]
    num_small = 0
    zero = cast_like(0.0, f)
    step_t, step_u = skewed_steps(T, U)
    flat_sigma, flat_null, flat_label = sigma.ravel(), by_null.ravel(), by_label.ravel()
    nulls, emitted = np.zeros(U + 1), np.zeros(U + 1)
    for t in range(T):  # `total` becomes sigma / total, or zero where direct_gradients adds it
        at = t * step_t + 1
        row = total[t]
        for u in range(U + 1):
            direct = row[u] == zero
            num_small += direct
            passed = cast_like(flat_sigma[at + u * step_u], f)
            row[u] = zero if direct else passed / row[u]
    multiply(total[:, : U + 1], exp_g[:, :num_outputs], grad_f, False)
    multiply(prefixes.weights[:T, : U + 1], prefixes.ratios[: U + 1], grad_f, True)
    multiply(total[:, : U + 1].T, exp_f[:, :num_outputs], grad_g, False)
    for t in range(T):
        at = t * step_t + 1
        row, exp_row = grad_f[t], exp_f[t]
        for k in range(num_outputs):
            row[k] *= exp_row[k]
        left = 0.0
        for u in range(U + 1):
            left += flat_null[at + u * step_u]
            nulls[u] += flat_null[at + u * step_u]
        row[0] -= cast_like(left, f)
        for u in range(U):
            emitted[u] += flat_label[at + u * step_u]
            row[labels[u]] -= cast_like(flat_label[at + u * step_u], f)
    for u in range(U + 1):
        row, exp_row, residual = grad_g[u], exp_g[u], prefixes.residual[u]
        for k in range(num_outputs):
            row[k] *= exp_row[k]
        for k in range(1, num_outputs):
            row[k] -= residual[k]
        row[0] -= cast_like(nulls[u], f)
        if u < U:
            row[labels[u]] -= cast_like(emitted[u], f)
    if num_small > 0:
        direct_gradients(f, g, total, sigma, grad_f, grad_g)
    if num_direct > 0:
        _direct_labels(one, log_alpha, prefixes, flat_sigma, grad_f, True)


@compiled
def _distillation(share, starts, all_items, batch, targets, with_gradients, results):
    """Compute a share of a batch's utterances, one after the other in one set of arrays."""
    items = all_items[starts[share] : starts[share + 1]]
    f, g = batch.f, batch.g
    arrays = allocate(items, batch, True)
    T, padded = arrays.total.shape
    labelled = (arrays.exp_g.shape[0], f.shape[2])
    prefixes = _Prefixes(
        np.empty((T, padded), f.dtype),
        np.empty((T, padded), f.dtype),
        np.empty(labelled[0]),
        np.empty(labelled, f.dtype),
        np.empty(labelled, f.dtype),
        np.empty(labelled),
        np.empty(labelled, f.dtype),
        np.empty(labelled, f.dtype),
    )
    for b in items:
        T, U = batch.num_frames[b], batch.num_labels[b]
        one, num_bad = begin(arrays, f[b, :T], g[b, : U + 1], batch.labels[b, :U])
        if num_bad > 0:
            results.loss[b] = results.log_loss[b] = np.nan
            if with_gradients:
                results.grad_f[b] = np.nan
                results.grad_g[b] = np.nan
            continue
        shape = skewed_shape(T, U)
        size = shape[0] * shape[1]
        log_null = arrays.log_null[:size].reshape(shape)
        log_label = arrays.log_label[:size].reshape(shape)
        log_alpha = arrays.log_alpha[:size].reshape(shape)
        sigma = arrays.log_beta[:size].reshape(shape)
        log_null[:] = IMPOSSIBLE
        log_label[:] = IMPOSSIBLE
        transitions(one, log_null.ravel()[1:], log_label.ravel()[1:], *skewed_steps(T, U))
        evidence = forward_backward(T, U, log_null, log_label, log_alpha, log_alpha, False, f)
        if evidence <= NEVER:
            results.loss[b] = results.log_loss[b] = np.inf
            if with_gradients:
                results.grad_f[b] = 0
                results.grad_g[b] = 0
            continue
        results.log_loss[b] = -evidence
        _scaled_weights(one, log_alpha, prefixes.weights, prefixes.tops)
        results.loss[b], num_direct = _cross_entropy(one, log_alpha, targets[b], prefixes)
        if not with_gradients:
            continue
        transposed = arrays.exp_g_transposed  # which only the transitions need
        _sources(one, num_direct, log_alpha, prefixes, transposed, sigma)
        backward_flow(T, U, log_null, log_label, log_alpha, sigma, f)
        grad_f, grad_g = results.grad_f[b], results.grad_g[b]
        grad_f[T:] = 0
        grad_g[U + 1 :] = 0
        _gradients(
            one, num_direct, log_alpha, prefixes, sigma, log_null, log_label,
            grad_f[:T], grad_g[: U + 1],
        )  # fmt: skip


_share_distillation = sharing(_distillation)


@compiled
def _distillation_shares(team, arguments):
    _share_distillation(team, arguments)


def distillation_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    targets: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the distillation loss and -ln Pr(y|x), both [B], and the gradients of the first."""
    f, g = f.contiguous(), g.contiguous()
    loss, log_loss = f.new_empty(len(f)), f.new_empty(len(f))
    grad_f, grad_g = additive_saved(f, g, with_gradients)
    T, U = num_frames.numpy(), num_labels.numpy()
    batch = Batch(f.numpy(), g.numpy(), labels.numpy(), T, U)
    results = _Results(loss.numpy(), log_loss.numpy(), grad_f.numpy(), grad_g.numpy())
    items, starts = shares_of(T * (U + 1), num_threads())
    q = targets.to(f.dtype).contiguous().numpy()
    _distillation_shares(team(len(starts) - 1), (starts, items, batch, q, with_gradients, results))
    return loss, log_loss, grad_f, grad_g
