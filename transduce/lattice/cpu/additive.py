"""The additive density: its transitions, its loss and its gradients (Eqs. 12-15, 21-22)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.functions import cast_like, exp, log
from transduce.kernels.simd.options import VECTOR_BYTES, compiled
from transduce.kernels.simd.products import multiply
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.diagonals import (
    flow,
    forward_backward,
    skewed_shape,
    skewed_steps,
)
from transduce.lattice.cpu.rows import count_bad, largest


class Batch(NamedTuple):
    f: np.ndarray  # [B, T, K+1]
    g: np.ndarray  # [B, U+1, K+1]
    labels: np.ndarray  # [B, U]
    num_frames: np.ndarray  # [B]
    num_labels: np.ndarray  # [B]


class _Results(NamedTuple):
    loss: np.ndarray  # [B]
    grad_f: np.ndarray  # [B, T, K+1], or of no items without gradients
    grad_g: np.ndarray  # [B, U+1, K+1], likewise


class Utterance(NamedTuple):
    """One utterance's part of the batch, and of the arrays that all utterances of a share use."""

    f: np.ndarray  # [T, K+1]
    g: np.ndarray  # [U+1, K+1]
    labels: np.ndarray  # [U]
    exp_f: np.ndarray  # [T, whole vectors of K+1], e^(f - top_f)
    exp_g: np.ndarray  # [U+1, whole vectors of K+1], e^(g - top_g)
    exp_g_transposed: np.ndarray  # [K+1, whole vectors of U+1]
    top_f: np.ndarray  # [T], the largest of each row
    top_g: np.ndarray  # [U+1]
    total: np.ndarray  # [T, whole vectors of U+1], Eq. 13's denominator over e^(top_f + top_g)
    log_total: np.ndarray  # likewise


class Arrays(NamedTuple):
    """Arrays for the largest utterance of a share, which all its utterances use in turn."""

    exp_f: np.ndarray  # those of `Utterance`, whose first rows these are
    exp_g: np.ndarray
    exp_g_transposed: np.ndarray
    top_f: np.ndarray
    top_g: np.ndarray
    total: np.ndarray
    log_total: np.ndarray
    log_null: np.ndarray  # of the skewed lattice, flat
    log_label: np.ndarray
    log_alpha: np.ndarray
    log_beta: np.ndarray  # empty without gradients


@compiled
def _exponentials(vectors, scaled, tops):
    """Write e^(x - the largest of its row) and those largest; count the x that are NaN or +inf.

    These are the paper's O(T+U) exponentials. A row of nothing but -inf becomes zeros.
    """
    num_bad = 0
    num_outputs = vectors.shape[1]
    for i in range(vectors.shape[0]):
        row, scaled_row = vectors[i], scaled[i]
        num_bad += count_bad(row)
        top = largest(row)
        if top == -np.inf:
            top = cast_like(0.0, vectors)
        tops[i] = top
        for k in range(num_outputs):
            scaled_row[k] = row[k] - top
        scaled_row[num_outputs:] = -np.inf
    numbers = scaled[: vectors.shape[0]].ravel()
    for i in range(numbers.size):  # one long loop; the padding becomes 0
        numbers[i] = exp(numbers[i])
    return num_bad


@compiled
def _log_total(f, g):
    """Return ln of the sum over k of h(k,t,u), term by term: exact where the product underflows."""
    top = -np.inf
    for k in range(f.size):
        top = max(top, np.float64(f[k]) + np.float64(g[k]))
    if top == -np.inf:
        return top
    total = 0.0
    for k in range(f.size):
        total += exp(cast_like(np.float64(f[k]) + np.float64(g[k]) - top, f))
    return top + np.log(total)


@compiled
def transitions(one, log_null, log_label, step_t, step_u):
    """Write ln ∅(t,u) and ln y(t,u) (Eqs. 12-15), and the sum of e^f e^g over k in `total`.

    Node (t, u) is at t step_t + u step_u of the flat arrays log_null and log_label. Where the sum
    is too small to be trusted, compute it term by term and set `total` to zero. A term of the
    product that is lost to underflow is below `tiny`, so the sum is wrong by less than its rounding
    wherever it is above (K+1) tiny / epsilon.
    """
    f, g, labels, total, top_f, top_g = one.f, one.g, one.labels, one.total, one.top_f, one.top_g
    log_total = one.log_total
    T, U = f.shape[0], labels.size
    info = np.finfo(f.dtype)
    threshold = cast_like(f.shape[1] * np.float64(info.tiny) / np.float64(info.eps), f)
    multiply(one.exp_f[:, : f.shape[1]], one.exp_g_transposed, total, False)  # Eq. 13's denominator
    null_g, label_g, label_f = np.empty(U + 1), np.empty(U), np.empty(U)
    nulls, emitted = np.empty(U + 1), np.empty(U)
    for u in range(U + 1):
        null_g[u] = np.float64(g[u, 0]) - top_g[u]
    for u in range(U):
        label_g[u] = np.float64(g[u, labels[u]]) - top_g[u]
    totals, all_logs = total.ravel(), log_total.ravel()
    for i in range(totals.size):
        all_logs[i] = log(totals[i] if totals[i] > threshold else threshold)
    for t in range(T):
        num_small = 0
        row, logs = total[t], log_total[t]
        for u in range(U + 1):
            num_small += row[u] < threshold
        if num_small > 0:
            for u in range(U + 1):
                if row[u] < threshold:
                    row[u] = 0
                    exact = _log_total(f[t], g[u])
                    impossible = exact == -np.inf  # +inf makes both arrows impossible
                    logs[u] = cast_like(np.inf if impossible else exact - top_f[t] - top_g[u], f)
        null_f = np.float64(f[t, 0]) - top_f[t]
        for u in range(U):
            label_f[u] = np.float64(f[t, labels[u]]) - top_f[t]
        for u in range(U + 1):
            value = null_f + null_g[u] - logs[u]  # Eq. 15
            nulls[u] = value if value > IMPOSSIBLE else IMPOSSIBLE
        for u in range(U):
            value = label_f[u] + label_g[u] - logs[u]  # Eq. 14
            emitted[u] = value if value > IMPOSSIBLE else IMPOSSIBLE
        for u in range(U):
            log_null[t * step_t + u * step_u] = nulls[u]
            log_label[t * step_t + u * step_u] = emitted[u]
        log_null[t * step_t + U * step_u] = nulls[U]


@compiled
def _gradients(one, occupancy, by_label, grad_f, grad_g):
    """Write the sums over u and over t of occupancy Pr(k|t,u), less the emissions (Eqs. 21-22).

    Each alignment emits one null per frame and each label once, so those sums are 1; the number of
    nulls emitted at u is the number of visits to u less the one that leaves it by its label.
    """
    f, g, labels, exp_f, exp_g, total = one.f, one.g, one.labels, one.exp_f, one.exp_g, one.total
    T, U = f.shape[0], labels.size
    num_outputs = f.shape[1]
    num_direct = 0
    zero, one = cast_like(0.0, f), cast_like(1.0, f)
    step_t, step_u = skewed_steps(T, U)
    flat_occupancy, flat_label = occupancy.ravel(), by_label.ravel()
    passed, visits = np.empty(U + 1, f.dtype), np.zeros(U + 1)
    # `total` becomes occupancy / total; it stays zero where direct_gradients adds the node.
    for t in range(T):
        at = t * step_t + 1
        row = total[t]
        for u in range(U + 1):
            passed[u] = cast_like(flat_occupancy[at + u * step_u], f)
        for u in range(U + 1):
            direct = row[u] == zero
            num_direct += direct
            row[u] = zero if direct else passed[u] / row[u]
            visits[u] += passed[u]
    weights = total[:, : U + 1]
    multiply(weights, exp_g[:, :num_outputs], grad_f, False)
    multiply(weights.T, exp_f[:, :num_outputs], grad_g, False)
    for t in range(T):
        at = t * step_t + 1
        row, exp_row = grad_f[t], exp_f[t]
        for k in range(num_outputs):
            row[k] *= exp_row[k]
        row[0] -= one
        for u in range(U):
            row[labels[u]] -= cast_like(flat_label[at + u * step_u], f)
    for u in range(U + 1):
        row, exp_row = grad_g[u], exp_g[u]
        for k in range(num_outputs):
            row[k] *= exp_row[k]
        if g[u, 0] > -np.inf:  # otherwise no null leaves u, and the difference is only rounding
            row[0] -= cast_like(visits[u] - (u < U), f)
        if u < U:
            row[labels[u]] -= one
    if num_direct > 0:
        direct_gradients(f, g, total, occupancy, grad_f, grad_g)


@compiled
def direct_gradients(f, g, total, occupancy, grad_f, grad_g):
    """Add occupancy Pr(k|t,u) of the nodes whose total was computed term by term."""
    flat_occupancy = occupancy.ravel()
    step_t, step_u = skewed_steps(f.shape[0], g.shape[0] - 1)
    for t in range(f.shape[0]):
        for u in range(g.shape[0]):
            passed = cast_like(flat_occupancy[t * step_t + u * step_u + 1], f)
            if total[t, u] == 0 and passed != 0:
                log_total = _log_total(f[t], g[u])
                for k in range(f.shape[1]):
                    log_prob = np.float64(f[t, k]) + np.float64(g[u, k]) - log_total
                    part = passed * exp(cast_like(log_prob, f))
                    grad_f[t, k] += part
                    grad_g[u, k] += part


@compiled
def allocate(items, batch, with_gradients):
    """Allocate the arrays for any of some items of a batch."""
    f = batch.f
    lanes = VECTOR_BYTES // 4
    num_outputs = f.shape[2]
    max_T, max_U = 0, 0
    size = 0
    for b in items:
        T, U = batch.num_frames[b], batch.num_labels[b]
        max_T, max_U = max(max_T, T), max(max_U, U)
        rows, columns = skewed_shape(T, U)
        size = max(size, rows * columns)
    padded = (max_U + lanes) // lanes * lanes  # whole vectors of u
    wide = (num_outputs + lanes - 1) // lanes * lanes  # whole vectors of k
    return Arrays(
        np.zeros((max_T, wide), f.dtype),
        np.zeros((max_U + 1, wide), f.dtype),
        np.zeros((num_outputs, padded), f.dtype),
        np.empty(max_T, f.dtype),
        np.empty(max_U + 1, f.dtype),
        np.empty((max_T, padded), f.dtype),
        np.empty((max_T, padded), f.dtype),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size if with_gradients else 0),
    )


@compiled
def begin(arrays, f, g, labels):
    """Compute the exponentials of an utterance; return it, and how many inputs are not valid."""
    T, U, num_outputs = f.shape[0], labels.size, f.shape[1]
    exp_g, transposed = arrays.exp_g, arrays.exp_g_transposed
    num_bad = _exponentials(f, arrays.exp_f, arrays.top_f)
    num_bad += _exponentials(g, exp_g, arrays.top_g)
    for u in range(U):
        num_bad += labels[u] < 1 or labels[u] >= num_outputs
    for k in range(num_outputs):
        for u in range(U + 1):
            transposed[k, u] = exp_g[u, k]
    one = Utterance(
        f, g, labels, arrays.exp_f[:T], exp_g[: U + 1], transposed, arrays.top_f, arrays.top_g,
        arrays.total[:T], arrays.log_total[:T],
    )  # fmt: skip
    return one, num_bad


@compiled
def _additive(share, starts, all_items, batch, with_gradients, results):
    """Compute a share of a batch's utterances, one after the other in one set of arrays."""
    items = all_items[starts[share] : starts[share + 1]]
    f, g, loss = batch.f, batch.g, results.loss
    arrays = allocate(items, batch, with_gradients)
    for b in items:
        T, U = batch.num_frames[b], batch.num_labels[b]
        one, num_bad = begin(arrays, f[b, :T], g[b, : U + 1], batch.labels[b, :U])
        if num_bad > 0:
            loss[b] = np.nan
            if with_gradients:
                results.grad_f[b] = np.nan
                results.grad_g[b] = np.nan
            continue
        shape = skewed_shape(T, U)
        size = shape[0] * shape[1]
        log_null = arrays.log_null[:size].reshape(shape)
        log_label = arrays.log_label[:size].reshape(shape)
        log_alpha = arrays.log_alpha[:size].reshape(shape)
        log_beta = arrays.log_beta[:size].reshape(shape) if with_gradients else log_alpha
        log_null[:] = IMPOSSIBLE
        log_label[:] = IMPOSSIBLE
        # Node (0, 0) is in column 1.
        transitions(one, log_null.ravel()[1:], log_label.ravel()[1:], *skewed_steps(T, U))
        evidence = forward_backward(
            T, U, log_null, log_label, log_alpha, log_beta, with_gradients, f
        )
        loss[b] = -evidence if evidence > NEVER else np.inf
        if not with_gradients:
            continue
        grad_f, grad_g = results.grad_f[b], results.grad_g[b]
        if evidence <= NEVER:
            grad_f[:] = 0
            grad_g[:] = 0
            continue
        grad_f[T:] = 0
        grad_g[U + 1 :] = 0
        flow(T, U, log_alpha, log_beta, log_label, evidence, f)
        _gradients(one, log_alpha, log_label, grad_f[:T], grad_g[: U + 1])


_share_additive = sharing(_additive)


@compiled
def _additive_shares(team, arguments):
    _share_additive(team, arguments)


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of the additive density, and its gradients with respect to f and g.

    The gradients come from the same pass, while the arrays that they need are in the cache.
    """
    f, g = f.contiguous(), g.contiguous()
    loss = f.new_empty(len(f))
    grad_f, grad_g = additive_saved(f, g, with_gradients)
    T, U = num_frames.numpy(), num_labels.numpy()
    batch = Batch(f.numpy(), g.numpy(), labels.numpy(), T, U)
    results = _Results(loss.numpy(), grad_f.numpy(), grad_g.numpy())
    items, starts = shares_of(T * (U + 1), num_threads())
    _additive_shares(team(len(starts) - 1), (starts, items, batch, with_gradients, results))
    return loss, grad_f, grad_g


def additive_saved(f: Tensor, g: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate the gradients with respect to f and g; of no items if they are not asked for."""
    B = f.shape[0] if with_gradients else 0
    return f.new_empty((B, *f.shape[1:])), g.new_empty((B, *g.shape[1:]))


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    grad_f: Tensor,
    grad_g: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to f and g, times upstream [B]."""
    return grad_f * upstream[:, None, None], grad_g * upstream[:, None, None]


@compiled
def _one_lattice(f, g, labels, log_null, log_label):
    """Write ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] of one utterance; -inf where impossible."""
    T, U, num_outputs = f.shape[0], labels.size, f.shape[1]
    lanes = VECTOR_BYTES // 4
    wide = (num_outputs + lanes - 1) // lanes * lanes
    padded = (U + lanes) // lanes * lanes
    exp_f, exp_g = np.empty((T, wide), f.dtype), np.empty((U + 1, wide), f.dtype)
    top_f, top_g = np.empty(T, f.dtype), np.empty(U + 1, f.dtype)
    _exponentials(f, exp_f, top_f)
    _exponentials(g, exp_g, top_g)
    transposed = np.zeros((num_outputs, padded), f.dtype)
    transposed[:, : U + 1] = exp_g[:, :num_outputs].T
    total, log_total = np.empty((T, padded), f.dtype), np.empty((T, padded), f.dtype)
    null, label = np.empty((T, U + 1)), np.empty((T, U + 1))
    one = Utterance(f, g, labels, exp_f, exp_g, transposed, top_f, top_g, total, log_total)
    transitions(one, null.ravel(), label.ravel(), U + 1, 1)
    for t in range(T):
        for u in range(U + 1):
            log_null[t, u] = null[t, u] if null[t, u] > NEVER else -np.inf
        for u in range(U):
            log_label[t, u] = label[t, u] if label[t, u] > NEVER else -np.inf


def lattice_transitions(
    transcription: Tensor, prediction: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the arrows ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] (Eqs. 12-15)."""
    f, g = transcription.contiguous(), prediction.contiguous()
    T, U = len(f), len(labels)
    log_null, log_label = f.new_empty(T, U + 1), f.new_empty(T, U)
    arrays = (x.numpy() for x in (f, g, labels.contiguous(), log_null, log_label))
    _one_lattice(*arrays)
    return log_null, log_label
