"""Forward and backward variables, occupancies and the best alignment of one utterance."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from transduce.kernels.sentinels import NEVER
from transduce.kernels.simd.options import compiled
from transduce.lattice.cpu.diagonals import from_double, skewed_variables, unskew


@compiled
def _forward_and_backward_variables(log_null, log_label):
    T, U = log_label.shape
    lattice = skewed_variables(log_null, log_label, True, log_null)
    return unskew(T, U, lattice.log_alpha, U + 1), unskew(T, U, lattice.log_beta, U + 1)


@compiled
def _best_alignment(log_null, log_label):
    """Return the frame of each label on the most probable path, and its log-probability."""
    T, U = log_label.shape
    best = np.full((T, U + 1), -np.inf)
    emitted = np.zeros((T, U + 1), np.bool_)  # whether the best way in is up, by a label
    for t in range(T):
        for u in range(U + 1):
            right = best[t - 1, u] + log_null[t - 1, u] if t > 0 else -np.inf
            up = best[t, u - 1] + log_label[t, u - 1] if u > 0 else -np.inf
            emitted[t, u] = t == 0 or (u > 0 and up >= right)
            best[t, u] = 0.0 if t + u == 0 else max(right, up)
    frames = np.empty(U, np.int64)
    t, u = T - 1, U
    while t + u > 0:
        if emitted[t, u]:
            u -= 1
            frames[u] = t
        else:
            t -= 1
    return frames, best[T - 1, U] + log_null[T - 1, U]


def _doubles(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.double().contiguous().numpy() for tensor in tensors]


def forward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return the forward variable α(t,u) of one utterance, in log space (Eq. 16), [T, U+1]."""
    log_alpha, _ = _forward_and_backward_variables(*_doubles(log_null, log_label))
    return from_double(log_alpha, log_null)


def backward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return the backward variable β(t,u) of one utterance, in log space (Eq. 18), [T, U+1]."""
    _, log_beta = _forward_and_backward_variables(*_doubles(log_null, log_label))
    return from_double(log_beta, log_null)


def log_occupancy(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return ln α(t,u) β(t,u) / Pr(y|x): the posterior that the alignment passes each node."""
    log_alpha, log_beta = _forward_and_backward_variables(*_doubles(log_null, log_label))
    evidence = log_beta[0, 0] if log_beta[0, 0] > NEVER else np.inf
    return from_double(log_alpha + log_beta - evidence, log_null)


def best_alignment(log_null: Tensor, log_label: Tensor) -> tuple[list[int], float]:
    """Return the frame at which the most probable alignment emits each label, and ln Pr(a|x)."""
    frames, log_prob = _best_alignment(*_doubles(log_null, log_label))
    return frames.tolist(), float(log_prob)
