"""The graph of all pronunciations of a text, and the most probable way through it.

The prediction network depends on all labels so far, so that no two ways through the graph can be
merged, and none is fixed beforehand: Algorithm 1 searches the label sequences that the graph
allows, with the graph in the place of a language model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.decoding.protocols import Predictor
from transduce.decoding.search import run_search

# Hypotheses kept after every vector, at first and at most: more find a way through a text that does
# not fit, or a better one through many variants; fewer take less time.
FIRST_WIDTH, MOST_WIDTH = 12, 3072

Position = tuple[int, int, int]  # word, variant (-1 before its first label), labels of it so far
Variants = Sequence[Sequence[Labels]]  # the pronunciations of each word, in labels


class PronunciationGraph:
    """All label sequences that pronounce some words, as a `LanguageModel`.

    A label that no pronunciation allows has the log-probability -inf, every other 0. States are
    numbers of sets of positions, because two words may have pronunciations that begin alike.
    """

    def __init__(self, words: Variants, num_labels: int) -> None:
        if not all(variants and all(variants) for variants in words):
            raise ValueError("every word needs a pronunciation with at least one label")
        self.words, self.num_labels = words, num_labels
        self._sets: list[frozenset[Position]] = []
        self._numbers: dict[frozenset[Position], int] = {}
        self._next: list[dict[int, int]] = []
        self._log_probs: list[np.ndarray] = []

    def start(self) -> int:
        """Return the state before the first word."""
        return self._state(frozenset([(0, -1, 0)]))

    def advance(self, state: int, label: int) -> int:
        """Return the state after one more label."""
        after = self._next[state]
        if label not in after:
            places = self._sets[state]
            after[label] = self._state(
                frozenset(p for place in places for p in self._steps(place, label))
            )
        return after[label]

    def log_probs(self, state: int) -> np.ndarray:
        """Return 0 for each label that may come next, and -inf for the others."""
        return self._log_probs[state]

    def is_complete(self, labels: Labels) -> bool:
        """Return whether the labels pronounce all words."""
        state = self.start()
        for label in labels:
            state = self.advance(state, label)
        return (len(self.words), -1, 0) in self._sets[state]

    def variants_of(self, labels: Labels) -> tuple[int, ...]:
        """Return the variant of each word in a complete sequence; the first ones, if several fit.

        They differ only where a word's end may also be the next one's beginning.
        """
        ends: list[dict[int, int]] = [{0: -1}]  # of each word: labels so far, and its variant
        for variants in self.words:
            reached: dict[int, int] = {}
            for start in ends[-1]:
                for number, variant in enumerate(variants):
                    end = start + len(variant)
                    if labels[start:end] == tuple(variant):
                        reached.setdefault(end, number)
            ends.append(reached)
        place, chosen = len(labels), list[int]()
        for variants, before, after in zip(
            reversed(self.words), ends[-2::-1], ends[:0:-1], strict=True
        ):
            numbers = [after[place], *range(len(variants))]
            number = next(
                n
                for n in numbers
                if place - len(variants[n]) in before
                and labels[place - len(variants[n]) : place] == tuple(variants[n])
            )
            chosen.append(number)
            place -= len(variants[number])
        return tuple(reversed(chosen))

    def _state(self, places: frozenset[Position]) -> int:
        """Return the number of a set of positions."""
        if places not in self._numbers:
            self._numbers[places] = len(self._sets)
            self._sets.append(places)
            self._next.append({})
            row = np.full(self.num_labels, -math.inf)
            row[[label - 1 for place in places for label in self._labels_after(place)]] = 0.0
            self._log_probs.append(row)
        return self._numbers[places]

    def _branches(self, place: Position) -> list[tuple[int, int]]:
        """Return the variants that a position may be in, and the labels of each so far."""
        word, variant, done = place
        if word == len(self.words):
            return []
        return [(n, 0) for n in range(len(self.words[word]))] if variant < 0 else [(variant, done)]

    def _labels_after(self, place: Position) -> list[int]:
        return [self.words[place[0]][v][done] for v, done in self._branches(place)]

    def _steps(self, place: Position, label: int) -> list[Position]:
        """Return the positions that a label leads to."""
        word = place[0]
        return [
            (word, v, done + 1) if done + 1 < len(self.words[word][v]) else (word + 1, -1, 0)
            for v, done in self._branches(place)
            if self.words[word][v][done] == label
        ]


def choose_pronunciations(
    vectors: Tensor,  # [T, K+1], f
    network: Predictor,
    words: Variants,
    *,
    first_width: int = FIRST_WIDTH,
) -> tuple[Labels, tuple[int, ...]] | None:
    """Return the most probable labels that pronounce the words, and the variant of each word.

    The probability of a label sequence is the sum over its alignments. While no complete sequence
    is among the hypotheses, search again with more of them. Return None if none is found.
    """
    if all(len(variants) == 1 for variants in words):
        return tuple(label for [variant] in words for label in variant), (0,) * len(words)
    graph = PronunciationGraph(words, vectors.shape[1] - 1)
    longest = sum(max(map(len, variants)) for variants in words) + 1
    width = first_width
    while width <= MOST_WIDTH:
        options = SearchOptions(
            beam_width=width,
            n_best=width,
            length_normalised=False,
            max_labels_per_frame=longest,
            fusion=graph,
            fusion_weight=1.0,
            with_timings=False,
        )
        [found] = run_search([vectors], network, None, options, "auto")
        for hypothesis in found:
            if graph.is_complete(hypothesis.labels):
                return hypothesis.labels, graph.variants_of(hypothesis.labels)
        width *= 4
    return None
