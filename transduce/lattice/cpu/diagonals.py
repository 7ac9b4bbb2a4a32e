"""Forward and backward variables along the lattice's diagonals, and occupancies (Eqs. 16-20).

The nodes of a diagonal t + u = n depend only on those of the one before, so a diagonal is a vector.
Its arrays are stored skewed, node (t, u) at row t + u and column u + 1, which makes that vector
contiguous; column 0, and all nodes outside the lattice, are impossible. A lattice with more labels
than frames has its columns along t instead, node (t, u) at column t + 1, so that memory grows with
(T+U) min(T,U). Values along the lattice are float64 whatever the inputs are, because they are sums
of thousands of logarithms. The logarithm of a sum is the larger term plus ln(1 + e^-d); that small
part is computed in the inputs' type.

-inf means an impossible event. The kernels replace it by a large negative number, so that no
difference of two of them is NaN. A loss of NaN means that the utterance's numbers or labels are not
valid.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.functions import cast_like, exp, log1p
from transduce.kernels.simd.options import VECTOR_BYTES, compiled

# Nodes whose occupancies are computed at a time: larger blocks amortise the loops' starts, smaller
# ones stay in the first-level cache.
BLOCK = 512


class Skewed(NamedTuple):
    """The skewed arrays of one utterance's lattice."""

    log_null: np.ndarray
    log_label: np.ndarray
    log_alpha: np.ndarray
    log_beta: np.ndarray  # log_alpha again where β was not asked for
    evidence: float  # ln Pr(y|x)


@compiled
def skewed_shape(T, U):
    """Return one row for each diagonal 0 ... T+U, and whole vectors of columns plus one column
    before and one after."""
    lanes = VECTOR_BYTES // 4
    return T + U + 1, (min(T, U) + 1 + lanes - 1) // lanes * lanes + 2


@compiled
def skewed_steps(T, U):
    """Return the steps of t and u in a skewed array: node (t, u) is at t step_t + u step_u + 1."""
    columns = skewed_shape(T, U)[1]
    return (columns + 1, columns) if T < U else (columns, columns + 1)


@compiled
def _band(n, T, U):
    """Return the first u of diagonal n and the last plus one, widened to whole vectors."""
    lanes = VECTOR_BYTES // 4
    first = max(0, n - T) // lanes * lanes
    last = (min(n, U) + lanes) // lanes * lanes
    return first, last


@compiled
def forward_backward(T, U, log_null, log_label, log_alpha, log_beta, with_beta, like):
    """Fill α(t,u) and, if asked for, β(t,u), all skewed; return ln Pr(y|x) (Eqs. 16-18).

    One loop advances α's diagonals upwards and β's downwards. ln(e^a + e^b) takes three inner
    loops, so that its exponential and its logarithm fill whole vectors of the inputs' type.
    """
    if T < U:  # columns along t: null leads to the next column, a label stays in its column
        T, U, log_null, log_label = U, T, log_label, log_null
    leads = np.empty(2 * log_alpha.shape[1], like.dtype)
    log_alpha[:] = IMPOSSIBLE
    log_alpha[0, 1] = 0.0  # α(1, 0) = 1
    if with_beta:
        log_beta[:] = IMPOSSIBLE
        log_beta[T + U, U + 1] = 0.0  # β(T+1, U) = 1: the last null ends the alignment
    for n in range(1, T + U + 1):
        first, last = _band(n, T, U)
        alpha = log_alpha[n, first + 1 : last + 1]
        before, null = log_alpha[n - 1, first : last + 1], log_null[n - 1, first : last + 1]
        label = log_label[n - 1, first : last + 1]
        for i in range(alpha.size):
            right, up = before[i + 1] + null[i + 1], before[i] + label[i]
            ahead = right - up
            alpha[i] = right if ahead > 0 else up
            leads[i] = cast_like(-abs(ahead), like)
        num_leads = alpha.size
        beta = alpha
        if with_beta:
            m = T + U - n
            first, last = _band(m, T, U)
            beta = log_beta[m, first + 1 : last + 1]
            after, null = log_beta[m + 1, first + 1 : last + 2], log_null[m, first + 1 : last + 1]
            label = log_label[m, first + 1 : last + 1]
            lead = leads[num_leads : num_leads + beta.size]
            for i in range(beta.size):
                right, up = after[i] + null[i], after[i + 1] + label[i]
                ahead = right - up
                beta[i] = right if ahead > 0 else up
                lead[i] = cast_like(-abs(ahead), like)
            num_leads += beta.size
        terms = leads[:num_leads]
        for i in range(num_leads):
            terms[i] = log1p(exp(terms[i]))
        for i in range(alpha.size):
            alpha[i] += terms[i]  # Eq. 16
        if with_beta:
            terms = terms[alpha.size :]
            for i in range(beta.size):
                beta[i] += terms[i]  # Eq. 18
    return log_alpha[T + U, U + 1]  # Eq. 17: α(T, U) ∅(T, U)


@compiled
def flow(T, U, log_alpha, log_beta, log_label, evidence, like):
    """Compute the occupancies of a lattice, skewed (Eq. 20).

    Overwrite log_alpha with the posterior that the alignment passes each node, and log_label with
    the posterior that it leaves the node by its label. It leaves by null otherwise.
    """
    passed, emitted = np.empty(BLOCK, like.dtype), np.empty(BLOCK, like.dtype)
    alpha, beta, label = log_alpha.ravel(), log_beta.ravel(), log_label.ravel()
    step = skewed_steps(T, U)[1]  # from a node to the one above it
    for first in range(0, alpha.size - step, BLOCK):
        size = min(BLOCK, alpha.size - step - first)
        alpha_here, beta_here = alpha[first : first + size], beta[first : first + size]
        label_here, beta_above = label[first : first + size], beta[first + step :][:size]
        for i in range(size):
            passed[i] = cast_like(alpha_here[i] + beta_here[i] - evidence, like)
            emitted[i] = cast_like(alpha_here[i] + label_here[i] + beta_above[i] - evidence, like)
        for i in range(size):
            passed[i] = exp(passed[i])
            emitted[i] = exp(emitted[i])
        for i in range(size):
            alpha_here[i] = passed[i]
            label_here[i] = emitted[i]


@compiled
def backward_flow(T, U, log_null, log_label, log_alpha, sigma, like):
    """Pass what is in each node of `sigma` on to the nodes before it, skewed.

    A node passes its sum to the two before it, in the ratio of the probabilities that the alignment
    came from each. Add to sigma what arrives; overwrite the arrows with what they carry.
    """
    if T < U:  # columns along t, as in forward_backward
        T, U, log_null, log_label = U, T, log_label, log_null
    shares = np.empty(log_alpha.shape[1], like.dtype)
    for n in range(T + U - 1, -1, -1):
        first, last = _band(n, T, U)
        alpha, sums = log_alpha[n, first + 1 : last + 1], sigma[n, first + 1 : last + 1]
        null, label = log_null[n, first + 1 : last + 1], log_label[n, first + 1 : last + 1]
        after, passed = log_alpha[n + 1, first + 1 : last + 2], sigma[n + 1, first + 1 : last + 2]
        # The shares of the next nodes that came from the right; the others came from below.
        for i in range(alpha.size):
            right = alpha[i] + null[i]
            shares[i] = cast_like(right - after[i] if right > NEVER else IMPOSSIBLE, like)
        shares[alpha.size] = cast_like(IMPOSSIBLE, like)
        for i in range(alpha.size + 1):
            shares[i] = exp(shares[i])
        for i in range(alpha.size):
            null[i] = shares[i] * passed[i]
            label[i] = (1 - shares[i + 1]) * passed[i + 1]
            sums[i] += null[i] + label[i]


@compiled
def _skew(T, U, matrix, skewed):
    """Copy a matrix [T, columns] into a skewed array; replace -inf by IMPOSSIBLE."""
    skewed[:] = IMPOSSIBLE
    flat = skewed.ravel()
    step_t, step_u = skewed_steps(T, U)
    for t in range(T):
        for u in range(matrix.shape[1]):
            value = matrix[t, u]
            flat[t * step_t + u * step_u + 1] = value if value > IMPOSSIBLE else IMPOSSIBLE


@compiled
def unskew(T, U, skewed, columns):
    """Return the nodes of a skewed array as a matrix [T, columns]."""
    matrix = np.empty((T, columns))
    flat = skewed.ravel()
    step_t, step_u = skewed_steps(T, U)
    for t in range(T):
        for u in range(columns):
            matrix[t, u] = flat[t * step_t + u * step_u + 1]
    return matrix


@compiled
def skewed_variables(log_null, log_label, with_beta, like):
    """Return the skewed arrays of ln ∅ [T, U+1] and ln y [T, U]; fill β only if asked for."""
    T, U = log_label.shape
    shape = skewed_shape(T, U)
    null, label, alpha = np.empty(shape), np.empty(shape), np.empty(shape)
    beta = np.empty(shape) if with_beta else alpha
    _skew(T, U, log_null, null)
    _skew(T, U, log_label, label)
    evidence = forward_backward(T, U, null, label, alpha, beta, with_beta, like)
    return Skewed(null, label, alpha, beta, evidence)


def from_double(array: np.ndarray, like: Tensor) -> Tensor:
    """Return a kernel's float64 results in the type of `like`, impossible ones as -inf."""
    tensor = torch.from_numpy(array)
    return torch.where(tensor < NEVER, -torch.inf, tensor).to(like.dtype)
