"""Learn graphones from pairs of sequences, and cut the pairs into them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from transduce.graphones.reference import FIRST_WEIGHTS, LEAST_COUNT, MOST_LABELS, ROUNDS
from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.options import compiled
from transduce.lattice.cpu.emissions import log_sum


class Sequences(NamedTuple):
    """Sequences of ids, one after the other."""

    ids: np.ndarray  # [N]
    starts: np.ndarray  # [number + 1]

    @classmethod
    def of(cls, sequences: Iterable[np.ndarray]) -> Sequences:
        """Join some sequences."""
        parts = list(sequences)
        lengths = np.array([0, *map(len, parts)])
        return cls(np.concatenate([np.empty(0, np.int64), *parts]), lengths.cumsum())

    def not_empty(self) -> Sequences:
        """Return the sequences without the empty ones."""
        return Sequences(self.ids, np.unique(self.starts))


class Segmented(NamedTuple):
    """Pairs that are cut into graphones."""

    keys: np.ndarray  # [G], of the graphones, ascending; a graphone's id is its place among them
    log_probs: np.ndarray  # [G], of the graphones, as if they were independent of each other
    sequences: Sequences  # of their ids; a pair that cannot be cut has none


class _Arcs(NamedTuple):
    """The graphones of which pairs may consist, as arcs between the places where they may be cut.

    The place after i source symbols and u labels has the number i (U + 1) + u. Arcs are sorted by
    where they start, so that no arc ends where an earlier one starts.
    """

    starts: np.ndarray  # [pairs + 1], the first arc of each pair
    tails: np.ndarray  # [A]
    heads: np.ndarray  # [A]
    keys: np.ndarray  # [A], of the graphones


def segment_pairs(sources: Sequences, targets: Sequences, num_labels: int) -> Segmented:
    """Learn graphones by expectation maximisation; cut each pair in the most probable way."""
    arcs = _arcs_of(sources, targets, num_labels)
    sizes = (np.diff(sources.starts) + 1) * (np.diff(targets.starts) + 1)  # places of each pair
    keys, ids = np.unique(arcs.keys, return_inverse=True)
    places = (arcs.starts, arcs.tails, arcs.heads, ids, sizes)
    log_weights = np.log(np.array(FIRST_WEIGHTS)[_label_counts(keys, num_labels)])
    for _ in range(ROUNDS):
        counts = np.zeros(len(keys))
        _expect(*places, log_weights, counts)
        kept = counts >= LEAST_COUNT
        log_weights = np.full(len(keys), IMPOSSIBLE)
        log_weights[kept] = np.log(counts[kept] / counts.sum())
    best, lengths = np.empty(sources.starts[-1], np.int64), np.zeros(len(sizes), np.int64)
    best = best[: _best_paths(*places, log_weights, best, lengths)]
    used, best = np.unique(best, return_inverse=True)
    sequences = Sequences(best, np.concatenate([[0], lengths.cumsum()]))
    return Segmented(keys[used], log_weights[used], sequences)


def _arcs_of(sources: Sequences, targets: Sequences, num_labels: int) -> _Arcs:
    """Enumerate the arcs of all pairs."""
    starts = np.zeros(len(sources.starts), np.int64)
    nothing = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
    _enumerate(*sources, *targets, num_labels, starts, *nothing)  # counts them
    size = int(starts[-1])
    arcs = _Arcs(starts, *(np.empty(size, part.dtype) for part in nothing))
    _enumerate(*sources, *targets, num_labels, *arcs)
    return arcs


def _label_counts(keys: np.ndarray, num_labels: int) -> np.ndarray:
    """Return how many labels the graphones of some keys have."""
    places = (num_labels + 1) ** np.arange(MOST_LABELS)
    digits: np.ndarray = keys[:, None] // places % (num_labels + 1)
    return np.asarray(np.count_nonzero(digits, axis=1))


@compiled
def graphone_key(symbol, labels, u, count, num_labels):
    """Return the number of the graphone of a source symbol and `count` labels from u on."""
    key = symbol
    for k in range(MOST_LABELS):
        key = key * (num_labels + 1) + (labels[u + k] if k < count else 0)
    return key


@compiled
def can_end(i, u, T, U):
    """Return whether the last T - i source symbols can become the last U - u labels."""
    return u <= U and U - u <= MOST_LABELS * (T - i)


@compiled
def _enumerate(
    sources, source_starts, targets, target_starts, num_labels, starts, tails, heads, keys
):
    """Fill the arcs of all pairs; if there is no room for them, only `starts`."""
    a = 0
    for n in range(len(starts) - 1):
        source = sources[source_starts[n] : source_starts[n + 1]]
        labels = targets[target_starts[n] : target_starts[n + 1]]
        T, U = len(source), len(labels)
        for i in range(T):
            for u in range(min(U, MOST_LABELS * i) + 1):
                for count in range(MOST_LABELS + 1):
                    if can_end(i + 1, u + count, T, U):
                        if len(keys) > 0:
                            tails[a] = i * (U + 1) + u
                            heads[a] = (i + 1) * (U + 1) + u + count
                            keys[a] = graphone_key(source[i], labels, u, count, num_labels)
                        a += 1
        starts[n + 1] = a


@compiled
def _expect(starts, tails, heads, ids, sizes, log_weights, counts):
    """Add how often each graphone is expected in the pairs."""
    for n in range(len(starts) - 1):
        size = sizes[n]
        alpha, beta = np.full(size, IMPOSSIBLE), np.full(size, IMPOSSIBLE)
        alpha[0], beta[size - 1] = 0.0, 0.0
        for a in range(starts[n], starts[n + 1]):
            weight = alpha[tails[a]] + log_weights[ids[a]]
            if weight > NEVER:
                alpha[heads[a]] = log_sum(alpha[heads[a]], weight)
        total = alpha[size - 1]
        if total <= NEVER:
            continue
        for a in range(starts[n + 1] - 1, starts[n] - 1, -1):
            weight = beta[heads[a]] + log_weights[ids[a]]
            if weight > NEVER:
                beta[tails[a]] = log_sum(beta[tails[a]], weight)
                expected = alpha[tails[a]] + weight - total
                if expected > -50.0:
                    counts[ids[a]] += np.exp(expected)


@compiled
def _best_paths(starts, tails, heads, ids, sizes, log_weights, best, lengths):
    """Fill the graphones of each pair's most probable path, and their number; return the sum.

    Break ties by the smaller number of the last arc, then of the arc before it.
    """
    filled = 0
    for n in range(len(starts) - 1):
        size = sizes[n]
        log_best, last = np.full(size, IMPOSSIBLE), np.full(size, -1)
        log_best[0] = 0.0
        for a in range(starts[n], starts[n + 1]):
            weight = log_best[tails[a]] + log_weights[ids[a]]
            if weight > NEVER and weight > log_best[heads[a]]:
                log_best[heads[a]], last[heads[a]] = weight, a
        place, first = size - 1, filled
        while last[place] >= 0:
            best[filled] = ids[last[place]]
            place = tails[last[place]]
            filled += 1
        best[first:filled] = best[first:filled][::-1].copy()
        lengths[n] = filled - first
    return filled
