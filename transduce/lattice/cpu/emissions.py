"""When each label of y is emitted, in strips of the lattice's rows.

The backward pass keeps β, and the probability of the best alignment from each node on, in the first
row of every strip; the forward pass computes them again, strip by strip, beside α. So no array has
T x U numbers, the result is exact, and each arrow but those of the first strip is asked for twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.options import compiled

# Nodes of a strip: larger strips ask for arrows in fewer calls, smaller ones take less memory.
STRIP = 1 << 18
# ln(1 + e^-d) of a larger difference d is below the rounding of a sum of log-probabilities.
NEGLIGIBLE = 40.0


class _Progress(NamedTuple):
    """The sums over the frames before a strip."""

    entering: np.ndarray  # [U+1], ln of α(t-1,u) ∅(t-1,u)
    emitted: np.ndarray  # [U], the probability that label u+1 was emitted
    place: np.ndarray  # [1], the labels that the best alignment has emitted
    frame: np.ndarray  # [U], at which it has emitted them
    start: np.ndarray  # [U], frames with `emitted` below the tail
    end: np.ndarray  # [U], frames with `emitted` below one minus the tail
    confidence: np.ndarray  # [U]


@compiled
def log_sum(a, b):
    """Return ln(e^a + e^b); neither is -inf."""
    larger = a if a > b else b
    lead = abs(a - b)
    return larger + math.log1p(math.exp(-lead)) if lead < NEGLIGIBLE else larger


@compiled
def _finite(arrow):
    """Return an arrow in float64, IMPOSSIBLE in place of -inf."""
    return np.float64(arrow) if arrow > -np.inf else IMPOSSIBLE


@compiled
def _backward(log_null, log_label, log_beta, log_best):
    """Fill β (Eq. 18) and the best alignment's probability, [R+1, U+1], from their last row on."""
    R, U = log_label.shape
    for t in range(R - 1, -1, -1):
        null = _finite(log_null[t, U])
        log_beta[t, U], log_best[t, U] = log_beta[t + 1, U] + null, log_best[t + 1, U] + null
        for u in range(U - 1, -1, -1):
            null, label = _finite(log_null[t, u]), _finite(log_label[t, u])
            log_beta[t, u] = log_sum(log_beta[t + 1, u] + null, log_beta[t, u + 1] + label)
            log_best[t, u] = max(log_best[t + 1, u] + null, log_best[t, u + 1] + label)


@compiled
def _forward(first, log_null, log_label, log_beta, log_best, evidence, tail, progress):
    """Add a strip's frames, from `first` on, to the sums."""
    entering, emitted, place, frame, start, end, confidence = progress
    R, U = log_label.shape
    for t in range(R):
        for u in range(place[0], U):
            up = log_best[t, u + 1] + _finite(log_label[t, u])
            if up <= log_best[t + 1, u] + _finite(log_null[t, u]):
                break
            frame[u] = first + t
            place[0] = u + 1
        log_alpha = entering[0]
        for u in range(U):
            null, label = _finite(log_null[t, u]), _finite(log_label[t, u])
            entering[u] = log_alpha + null
            log_up = log_alpha + label
            log_emitted = log_up + log_beta[t, u + 1] - evidence
            if log_emitted > -700.0:  # e^-700 is the smallest that a sum could notice
                by_label = math.exp(log_emitted)
                emitted[u] += by_label
                if_any = label - math.log(-math.expm1(null)) if null < 0 else np.inf
                confidence[u] += by_label * math.exp(min(0.0, if_any))
            start[u] += emitted[u] < tail
            end[u] += emitted[u] < 1 - tail
            log_alpha = log_sum(entering[u + 1], log_up)  # Eq. 16
        entering[U] = log_alpha + _finite(log_null[t, U])


def label_emissions(
    arrows: Callable[[int, int], tuple[Tensor, Tensor]],
    num_frames: int,
    num_labels: int,
    tail: float,
) -> tuple[list[int], list[int], list[int], list[float]] | None:
    """Return each label's frame, start, end and confidence; None if y cannot be emitted."""
    T, U = num_frames, num_labels
    size = max(math.isqrt(T), STRIP // (U + 1), 1)
    firsts = list(range(0, T, size))
    # β and the best alignment's probability in the first row of each strip, and after the last.
    log_beta, log_best = np.full((2, len(firsts) + 1, U + 1), IMPOSSIBLE)
    log_beta[-1, U] = log_best[-1, U] = 0.0  # β(T+1, U) = 1: the last null ends the alignment
    beta, best = np.empty((2, size + 1, U + 1))

    def strip(i: int) -> tuple[np.ndarray, ...]:
        last = min(T, firsts[i] + size)
        log_null, log_label = (x.contiguous().numpy() for x in arrows(firsts[i], last))
        R = last - firsts[i]
        beta[R], best[R] = log_beta[i + 1], log_best[i + 1]
        _backward(log_null, log_label, beta[: R + 1], best[: R + 1])
        return log_null, log_label, beta[: R + 1], best[: R + 1]

    for i in reversed(range(len(firsts))):
        rows = strip(i)
        log_beta[i], log_best[i] = rows[2][0], rows[3][0]
    evidence = log_beta[0, 0]
    if evidence <= NEVER:
        return None
    entering = np.full(U + 1, IMPOSSIBLE)
    entering[0] = 0.0  # α(1, 0) = 1
    frame, start, end = np.zeros((3, U), np.int64)
    emitted, confidence = np.zeros((2, U))
    place = np.zeros(1, np.int64)
    progress = _Progress(entering, emitted, place, frame, start, end, confidence)
    for i, first in enumerate(firsts):
        rows = strip(i) if i else rows  # the first strip was the last to be computed
        _forward(first, *rows, evidence, tail, progress)
    within = np.minimum(end, T - 1), np.minimum(confidence, 1.0)
    return frame.tolist(), start.tolist(), within[0].tolist(), within[1].tolist()
