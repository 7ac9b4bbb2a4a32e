"""Where states of a hidden Markov model follow each other, each state in a band of frames.

The same sums as those of `boundary_posterior` over all ways to divide the frames among the states,
but for ways that leave the bands. Nearly all other frames are hopeless: a band is where a
recogniser has put the phone, and some time on either side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from transduce.kernels.sentinels import IMPOSSIBLE, IMPOSSIBLE_FLOAT32, NEVER
from transduce.kernels.simd.functions import exp, log
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.products import multiply
from transduce.lattice.cpu.emissions import log_sum

MARGIN = 40  # frames on either side of where a phone was heard: 0.2 s
# If a boundary has more than this probability within RIM frames of the edge of a band, all bands
# become twice as wide: time against what is left out.
RIM, LEAST = 4, 1e-4


class Densities(NamedTuple):
    """Mixtures of S states in float32: ln of density m of x is weights[m] [x, x^2] + constant."""

    weights: np.ndarray  # [S, M, 2 D]
    constants: np.ndarray  # [S, M]


def boundary_statistics(
    frames: np.ndarray,  # [T, D], float32
    densities: Densities,
    states: np.ndarray,  # [U+1]
    spans: np.ndarray,  # [U+1, 2], the frames between which each state was heard, ascending
    scale: float,  # of log-likelihoods
    tail: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of the first frame of each state but the first, and its two quantiles, [U].

    There are at least as many frames as states. The mean is within the quantiles.
    """
    T, margin = len(frames), MARGIN
    columns = np.ascontiguousarray(np.concatenate([frames, frames * frames], 1).T)
    while True:
        lows = np.maximum.accumulate((spans[:, 0] - margin).clip(0, T - 1).astype(np.int64))
        highs = (spans[:, 1] + margin).clip(1, T).astype(np.int64)
        highs = np.minimum.accumulate(highs[::-1])[::-1].copy()
        lows[0], highs[-1] = 0, T
        statistics = np.empty((3, len(states) - 1))
        inside = _statistics(
            columns, *densities, states, lows, highs, np.float32(scale), tail, statistics
        )
        if inside or margin > T:
            mean, low, high = statistics
            return mean.clip(low, high), low.astype(np.int64), high.astype(np.int64)
        margin *= 2


@compiled
def log_likelihoods(columns, weights, constants, low, high, result):
    """Set `result` to the log-likelihoods of the frames low to high - 1 in a mixture."""
    size = high - low
    log_densities = np.empty((weights.shape[0], size), np.float32)
    multiply(weights, columns[:, low:high], log_densities, False)
    largest, total = np.full(size, np.float32(IMPOSSIBLE_FLOAT32)), np.zeros(size, np.float32)
    for m in range(weights.shape[0]):
        row, constant = log_densities[m], constants[m]
        for t in range(size):
            row[t] += constant
            largest[t] = max(largest[t], row[t])
    for m in range(weights.shape[0]):
        row = log_densities[m]
        for t in range(size):
            total[t] += exp(row[t] - largest[t])
    for t in range(size):
        result[t] = largest[t] + log(total[t])


@compiled
def _statistics(columns, weights, constants, states, lows, highs, scale, tail, statistics):
    """Fill in the mean and both quantiles of each boundary; return whether the bands hold them.

    State u takes one or more of the frames lows[u] to highs[u] - 1, the first state frame 0 and the
    last one the last frame.
    """
    N, T = states.size, columns.shape[1]
    widest = (highs - lows).max()
    if widest < 1:
        return False
    scores = np.empty((N, widest), np.float32)  # of frame lows[u] + i in state u
    for u in range(N):
        if highs[u] <= lows[u]:
            return False
        of_state = states[u]
        row = scores[u, : highs[u] - lows[u]]
        log_likelihoods(columns, weights[of_state], constants[of_state], lows[u], highs[u], row)
        for i in range(row.size):
            row[i] *= scale
    # ln of the sum over all ways by which frame t is in state u, frame t included; and of those by
    # which the frames after it go on from there.
    before, after = np.full((N, widest), IMPOSSIBLE), np.full((N, widest), IMPOSSIBLE)
    for u in range(N):
        staying = IMPOSSIBLE
        for t in range(lows[u], highs[u]):
            entering = 0.0 if u == 0 and t == 0 else IMPOSSIBLE
            if u > 0 and lows[u - 1] < t <= highs[u - 1]:
                entering = before[u - 1, t - 1 - lows[u - 1]]
            staying = log_sum(staying, entering) + scores[u, t - lows[u]]
            before[u, t - lows[u]] = staying
    for u in range(N - 1, -1, -1):
        for t in range(highs[u] - 1, lows[u] - 1, -1):
            here = 0.0 if u == N - 1 and t == T - 1 else IMPOSSIBLE
            if t + 1 < highs[u]:
                i = t + 1 - lows[u]
                here = after[u, i] + scores[u, i]
            if u + 1 < N and lows[u + 1] <= t + 1 < highs[u + 1]:
                i = t + 1 - lows[u + 1]
                here = log_sum(here, after[u + 1, i] + scores[u + 1, i])
            after[u, t - lows[u]] = here
    evidence = before[N - 1, T - 1 - lows[N - 1]]
    if evidence < NEVER:
        return False
    inside = True
    for u in range(N - 1):
        first, last = max(lows[u] + 1, lows[u + 1]), min(highs[u], highs[u + 1] - 1)
        mean, cumulative, low, high, rim = 0.0, 0.0, last, last, 0.0
        for t in range(first, last + 1):
            entering = before[u, t - 1 - lows[u]] + scores[u + 1, t - lows[u + 1]]
            probability = math.exp(entering + after[u + 1, t - lows[u + 1]] - evidence)
            mean += t * probability
            if cumulative < tail <= cumulative + probability:
                low = t
            if cumulative < 1 - tail <= cumulative + probability:
                high = t
            cumulative += probability
            cut_before = t < first + RIM and first > 1
            cut_after = t > last - RIM and last < T - 1
            if cut_before or cut_after:
                rim += probability
        statistics[0, u], statistics[1, u], statistics[2, u] = mean, low, high
        inside = inside and rim < LEAST
    return inside
