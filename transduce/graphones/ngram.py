"""N-grams of graphones with modified Kneser-Ney smoothing, as an automaton.

A state is a context: the empty one, or an n-gram shorter than the longest. An arc of a state is an
n-gram: the context with one more symbol. Arcs are numbered by their length, their context and their
last symbol, so that those of a state are neighbours. Arc a leads to state a + 1, unless its n-gram
has the largest length; then it leads to the state of its suffix. A symbol without an arc is looked
for in the context one symbol shorter, whose probability is multiplied by a back-off weight.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from transduce.graphones.reference import discounts
from transduce.graphones.segmentation import Sequences


class Automaton(NamedTuple):
    """A back-off n-gram model.

    Its symbols are ids from 0; the one after the last is the end, and the next is the start. State
    0 is the empty context.
    """

    first_arcs: np.ndarray  # [S + 1], the first arc of each state
    symbols: np.ndarray  # [A]
    log_probs: np.ndarray  # [A]
    suffixes: np.ndarray  # [A], the state of the n-gram without its first symbol
    back_off: np.ndarray  # [S], ln of the weight of the shorter context


class _NGrams(NamedTuple):
    """All n-grams of one length, sorted by their contexts and last symbols."""

    contexts: np.ndarray  # the place of each context among the n-grams one symbol shorter
    symbols: np.ndarray
    suffixes: np.ndarray  # the place of each suffix among these
    occurrences: np.ndarray
    at_start: np.ndarray  # whether the first symbol is the start


def estimate_ngrams(sequences: Sequences, num_symbols: int, order: int) -> Automaton:
    """Estimate an n-gram model of sequences of ids below `num_symbols`, all of which occur."""
    levels = _levels(sequences, num_symbols, order)
    lengths = [len(level.symbols) for level in levels]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shorter = np.array([1 / (num_symbols + 2)])  # all symbols, the end, and an unknown symbol
    probs, weights = list[np.ndarray](), list[np.ndarray]()
    for n, level in enumerate(levels):
        counts = level.occurrences
        if n + 1 < order:
            before = np.bincount(levels[n + 1].suffixes, minlength=len(counts))
            counts = np.where(level.at_start, counts, before)
        counts_of_counts = Counter(counts[counts > 0].tolist())
        taken = np.array(discounts(counts_of_counts))[np.minimum(counts, 3)]
        num_contexts = len(shorter)
        totals = np.bincount(level.contexts, counts, num_contexts)
        totals = np.maximum(totals, 1)  # nothing follows the end
        weights.append(np.bincount(level.contexts, taken, num_contexts) / totals)
        own = (counts - taken) / totals[level.contexts]
        shorter = own + weights[n][level.contexts] * shorter[level.suffixes]
        probs.append(shorter)
    first_arcs = [
        offsets[n] + np.searchsorted(level.contexts, np.arange(len(weights[n])))
        for n, level in enumerate(levels)
    ]
    suffixes = [np.zeros(lengths[0], np.int64)]
    suffixes += [1 + offsets[n - 1] + levels[n].suffixes for n in range(1, order)]
    symbols = np.concatenate([level.symbols for level in levels])
    with np.errstate(divide="ignore"):  # of states and arcs that no sequence reaches
        back_off = np.log(np.concatenate(weights))
        log_probs = np.log(np.concatenate(probs))
    return Automaton(
        np.concatenate([*first_arcs, offsets[-1:]]).astype(np.int32),
        symbols.astype(np.int32),
        log_probs.astype(np.float32),
        np.concatenate(suffixes).astype(np.int32),
        back_off.astype(np.float32),
    )


def _levels(sequences: Sequences, num_symbols: int, order: int) -> list[_NGrams]:
    """Return the n-grams of every length, the start and the end among their symbols."""
    end, start = num_symbols, num_symbols + 1
    starts = sequences.starts
    symbols = np.insert(sequences.ids, starts[:-1], start)
    symbols = np.insert(symbols, starts[1:] + np.arange(1, len(starts)), end)
    begins = np.flatnonzero(symbols == start)
    reach = (
        np.arange(len(symbols))
        - begins[np.searchsorted(begins, np.arange(len(symbols)), "right") - 1]
    )
    everything = np.arange(num_symbols + 2)
    occurrences = np.bincount(symbols, minlength=num_symbols + 2)
    occurrences[start] = 0  # it does not follow anything
    nothing = np.zeros(num_symbols + 2, np.int64)
    levels = [_NGrams(nothing, everything, nothing, occurrences, nothing > 0)]
    last = symbols  # the place of the longest n-gram so far that ends here
    for n in range(1, order):
        here = np.flatnonzero(reach >= n)  # where an n-gram one symbol longer ends
        found = last[here - 1] * (num_symbols + 2) + symbols[here]
        keys, first, places = np.unique(found, return_index=True, return_inverse=True)
        contexts, ends = np.divmod(keys, num_symbols + 2)
        suffixes, at_start = last[here][first], (reach[here] == n)[first]
        levels.append(_NGrams(contexts, ends, suffixes, np.bincount(places), at_start))
        last = np.full(len(symbols), -1)
        last[here] = places
    return levels
