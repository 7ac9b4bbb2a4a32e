"""Where states of a hidden Markov model follow each other, each state in a band of frames.

The same sums, and the same best path, as over all ways to divide the frames among the states, but
for ways that leave the bands. Nearly all other frames are hopeless: a band is where a recogniser
has put the phone, and some time on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transduce.kernels.sentinels import IMPOSSIBLE, IMPOSSIBLE_FLOAT32, NEVER
from transduce.kernels.simd.functions import exp, log
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.products import multiply
from transduce.lattice.cpu.emissions import log_sum

MARGIN = 40  # frames on either side of where a phone was heard: 0.2 s
# If a boundary has more than this probability within RIM frames of the edge of a band, all bands
# become twice as wide, up to the reach: time against what is left out.
RIM, LEAST = 4, 1e-4
NO_WAY, AT_RIM, INSIDE = 0, 1, 2  # what bands hold: no way at all, ways that they may cut off, all


class Densities(NamedTuple):
    """Mixtures of S states in float32: ln of density m of x is weights[m] [x, x^2] + constant."""

    weights: np.ndarray  # [S, M, 2 D]
    constants: np.ndarray  # [S, M]


class Heard(NamedTuple):
    """The frames between which each of N states was heard, and how far from there it may be."""

    spans: np.ndarray  # [N, 2]
    reach: np.ndarray  # [N], in frames; inf: anywhere


# Mixtures, and the state among them of each state of a sequence [N]. The log-likelihoods of several
# are averaged.
States = Sequence[tuple[Densities, np.ndarray]]


def boundary_statistics(
    frames: np.ndarray,  # [T, D], float32
    states: States,
    heard: Heard,
    scale: float,  # of log-likelihoods
    tail: float,
) -> np.ndarray:
    """Return [3, N - 1]: the median of the first frame of each later state, and two quantiles.

    There are at least as many frames as states. The median is within the quantiles.
    """
    columns, parts = _columns(frames), _parts(states)
    statistics = np.empty((3, len(heard.spans) - 1))
    for lows, highs, is_enough in _bands(heard, len(frames)):
        found = _statistics(columns, parts, lows, highs, np.float32(scale), tail, statistics)
        if found >= is_enough:
            break
    median, low, high = statistics
    return np.stack([median.clip(low, high), low, high])


def state_ends(frames: np.ndarray, states: States, heard: Heard) -> np.ndarray:
    """Return the end [N - 1] of each state but the last on the most probable path.

    It is the first frame of the next state.
    """
    columns, parts = _columns(frames), _parts(states)
    ends = np.empty(len(heard.spans) - 1, np.int64)
    for lows, highs, is_enough in _bands(heard, len(frames)):
        if _best_path(columns, parts, lows, highs, ends) >= is_enough:
            break
    return ends


def _columns(frames: np.ndarray) -> np.ndarray:
    """Return the frames and their squares as columns [2 D, T]."""
    return np.ascontiguousarray(np.concatenate([frames, frames * frames], 1).T)


def _parts(states: States) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    return tuple((*densities, ids) for densities, ids in states)


def _bands(heard: Heard, T: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield ever wider bands, and what they must hold: lows and highs, state u in low to high - 1.

    Bands that reach no further are enough if they hold any way. If there is none, no state is
    bound. A state without a bound lies between its neighbours.
    """
    margin = MARGIN
    while margin < min(T, heard.reach.min()):
        yield *_around(heard.spans, np.full(len(heard.spans), margin), T), INSIDE
        margin *= 2
    yield *_around(heard.spans, np.minimum(T, heard.reach), T), AT_RIM
    yield *_around(heard.spans, np.full(len(heard.spans), T), T), NO_WAY


def _around(spans: np.ndarray, margins: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lows and highs that rise from state to state; the ends of the sound are inside."""
    lows = np.maximum.accumulate((spans[:, 0] - margins).clip(0, T - 1).astype(np.int64))
    highs = (spans[:, 1] + margins).clip(1, T).astype(np.int64)
    highs = np.minimum.accumulate(highs[::-1])[::-1].copy()
    lows[0], highs[-1] = 0, T
    return lows, highs


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
def _scores(columns, parts, lows, highs, scale):
    """Return [N, widest]: the log-likelihood of frame lows[u] + i in state u, times `scale`."""
    N, widest = lows.size, (highs - lows).max()
    scores, each = np.zeros((N, widest), np.float32), np.empty(widest, np.float32)
    share = np.float32(scale / len(parts))
    for weights, constants, states in parts:
        for u in range(N):
            size, of_state = highs[u] - lows[u], states[u]
            log_likelihoods(
                columns, weights[of_state], constants[of_state], lows[u], highs[u], each[:size]
            )
            for i in range(size):
                scores[u, i] += share * each[i]
    return scores


@compiled
def _cut(t, first, last, T):
    """Return whether a boundary at t is where bands end that could be wider."""
    return (t < first + RIM and first > 1) or (t > last - RIM and last < T - 1)


@compiled
def _statistics(columns, parts, lows, highs, scale, tail, statistics):
    """Fill in the median and both quantiles of each boundary; return what the bands hold.

    State u takes one or more of the frames lows[u] to highs[u] - 1, the first state frame 0 and the
    last one the last frame. For the median, the probability of a boundary before frame t is spread
    evenly from t - 1/2 to t + 1/2.
    """
    N, T = lows.size, columns.shape[1]
    if (highs - lows).min() < 1:
        return NO_WAY
    scores = _scores(columns, parts, lows, highs, scale)
    # ln of the sum over all ways by which frame t is in state u, frame t included; and of those by
    # which the frames after it go on from there.
    before, after = np.full(scores.shape, IMPOSSIBLE), np.full(scores.shape, IMPOSSIBLE)
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
        return NO_WAY
    found = INSIDE
    for u in range(N - 1):
        first, last = max(lows[u] + 1, lows[u + 1]), min(highs[u], highs[u + 1] - 1)
        cumulative, median, low, high, rim = 0.0, float(last), last, last, 0.0
        for t in range(first, last + 1):
            entering = before[u, t - 1 - lows[u]] + scores[u + 1, t - lows[u + 1]]
            probability = math.exp(entering + after[u + 1, t - lows[u + 1]] - evidence)
            reached = cumulative + probability
            if cumulative < tail <= reached:
                low = t
            if cumulative < 0.5 <= reached:
                median = t + 0.5 - (reached - 0.5) / probability
            if cumulative < 1 - tail <= reached:
                high = t
            cumulative = reached
            if _cut(t, first, last, T):
                rim += probability
        statistics[0, u], statistics[1, u], statistics[2, u] = median, low, high
        if rim >= LEAST:
            found = AT_RIM
    return found


@compiled
def _best_path(columns, parts, lows, highs, ends):
    """Fill in the end of each state but the last on the best path; return what the bands hold."""
    N, T = lows.size, columns.shape[1]
    if (highs - lows).min() < 1:
        return NO_WAY
    scores = _scores(columns, parts, lows, highs, np.float32(1))
    # ln of the best way by which frame t is in state u, and whether it enters the state there.
    best, enters = np.full(scores.shape, IMPOSSIBLE), np.zeros(scores.shape, np.bool_)
    for u in range(N):
        staying = IMPOSSIBLE
        for t in range(lows[u], highs[u]):
            entering = 0.0 if u == 0 and t == 0 else IMPOSSIBLE
            if u > 0 and lows[u - 1] < t <= highs[u - 1]:
                entering = best[u - 1, t - 1 - lows[u - 1]]
            enters[u, t - lows[u]] = entering > staying
            staying = max(staying, entering) + scores[u, t - lows[u]]
            best[u, t - lows[u]] = staying
    if best[N - 1, T - 1 - lows[N - 1]] < NEVER:
        return NO_WAY
    found, u = INSIDE, N - 1
    for t in range(T - 1, 0, -1):
        if u > 0 and enters[u, t - lows[u]]:
            u -= 1
            ends[u] = t
            first, last = max(lows[u] + 1, lows[u + 1]), min(highs[u], highs[u + 1] - 1)
            if _cut(t, first, last, T):
                found = AT_RIM
    return found
