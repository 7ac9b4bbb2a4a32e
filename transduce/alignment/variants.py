"""Which pronunciation of each word was said, and what was said in place of a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from rapidfuzz.distance import Levenshtein
from torch import Tensor

from transduce.alignment.detours import CONTEXT, Detour, LabelPath
from transduce.decoding.hypothesis import Labels

if TYPE_CHECKING:  # it needs Numba
    from transduce.decoding.cpu.prediction import PackedWeights

# Labels by which the place of a word may differ, where e^DOUBT is the likelihood ratio of something
# else: more detours against surer ratios.
CUTS, DOUBT = 2, 6.0

# Words, one after the other, whose pronunciations are changed together, and the ways to change them
# that are tried: a surer choice against time.
MOST_TOGETHER, MOST_MOVES = 2, 16

Variants = Sequence[Sequence[Labels]]  # the pronunciations of each word, in labels
Move = dict[int, int]  # words and their other variants


class Choice(NamedTuple):
    """The pronunciation of each word, and the path of all their labels."""

    variants: tuple[int, ...]  # the number of each word's pronunciation
    spans: list[tuple[int, int]]  # of each word's labels
    path: LabelPath


def choose_pronunciations(vectors: Tensor, weights: PackedWeights, words: Variants) -> Choice:
    """Return the pronunciation of every word with which the labels are most probable.

    The probability is Pr(y|x), the sum over all alignments. Begin with the first pronunciation of
    every word. Replace those for which another one makes it larger, until there are none; then look
    for two words, one after the other, for which other ones together make it larger.
    """
    choice = _choice(words, [0] * len(words), LabelPath.of(vectors, weights, ()))
    every = set(range(len(words)))
    size, near = 1, every
    while size <= MOST_TOGETHER:
        better = _improved(words, choice, _moves(words, choice.variants, size, near))
        if better is None:
            size, near = size + 1, every
        else:
            size, near = 1, _near(choice, better)
            choice = better
    return choice


def _choice(words: Variants, variants: Sequence[int], path: LabelPath) -> Choice:
    """Return a choice of pronunciations, given any path through the same lattice."""
    chosen = [word[variant] for word, variant in zip(words, variants, strict=True)]
    spans = list(pairwise(accumulate(map(len, chosen), initial=0)))
    return Choice(tuple(variants), spans, path.with_labels(tuple(chain.from_iterable(chosen))))


def _moves(words: Variants, chosen: Sequence[int], size: int, near: set[int]) -> Iterator[Move]:
    """Yield other variants for some words, one after the other, all of which change."""
    others = [
        [v for v in range(len(word)) if v != now] for word, now in zip(words, chosen, strict=True)
    ]
    for first in range(len(words) - size + 1):
        together = range(first, first + size)
        if not near.isdisjoint(together) and prod(len(others[w]) for w in together) <= MOST_MOVES:
            for variants in product(*(others[w] for w in together)):
                yield dict(zip(together, variants, strict=True))


def _improved(words: Variants, choice: Choice, moves: Iterable[Move]) -> Choice | None:
    """Return a more probable choice by the best moves that do not affect each other, or None."""
    tried = list(moves)
    spans, path = choice.spans, choice.path
    gains = path.gains([_detour(words, spans, move) for move in tried]).tolist()
    taken = list[Move]()
    for gain, move in sorted(zip(gains, tried, strict=True), key=lambda one: -one[0]):
        first, last = spans[min(move)][0] - CONTEXT, spans[max(move)][1] + CONTEXT
        if gain > 0 and all(spans[max(v)][1] <= first or last <= spans[min(v)][0] for v in taken):
            taken.append(move)
    while taken:
        attempt = dict(enumerate(choice.variants))
        for move in taken:
            attempt |= move
        other = _choice(words, list(attempt.values()), path)
        if other.path.log_likelihood > path.log_likelihood:
            return other
        taken = taken[: len(taken) // 2]  # together they are worse than the best of them
    return None


def _detour(words: Variants, spans: Sequence[tuple[int, int]], move: Move) -> Detour:
    labels = tuple(label for w, variant in move.items() for label in words[w][variant])
    return Detour(spans[min(move)][0], spans[max(move)][1], labels)


def _near(before: Choice, after: Choice) -> set[int]:
    """Return the words whose moves a change may have made better or worse."""
    reach, spans = 2 * CONTEXT, after.spans
    changed = [w for w in range(len(spans)) if before.variants[w] != after.variants[w]]
    return {
        w
        for w, (start, end) in enumerate(spans)
        if any(start < spans[v][1] + reach and spans[v][0] - reach < end for v in changed)
    }


class Fit(NamedTuple):
    """How well the sound fits a word."""

    log_ratio: float  # ln Pr(y|x) - ln Pr(y|x with what was heard in place of the word), at most 0
    heard: Labels  # what was heard: the word's own labels if nothing fits better


def word_fits(
    path: LabelPath, spans: Sequence[tuple[int, int]], free: Sequence[Labels]
) -> list[Fit]:
    """Compare each word with what free searches heard in its place, and with nothing.

    `free` are the most probable label sequences without a text, best first. The edit distance to y
    tells which of their labels are in the place of a word. It errs where the two differ; so for the
    words that something else fits better, other cuts of the best sequence are tried too.
    """
    y = path.labels
    places = [_places(y, labels) for labels in free]
    fits = [Fit(0.0, y[slice(*span)]) for span in spans]

    def compare(candidates: dict[int, Iterable[Labels]]) -> None:
        detours = [
            (w, Detour(*spans[w], labels))
            for w, heard in candidates.items()
            for labels in dict.fromkeys(heard)
            if labels != y[slice(*spans[w])] and len(labels) + len(y) > spans[w][1] - spans[w][0]
        ]
        gains = path.gains([detour for _, detour in detours]).tolist()
        for gain, (w, detour) in zip(gains, detours, strict=True):
            if -gain < fits[w].log_ratio:
                fits[w] = Fit(-gain, detour.labels)

    every = range(len(free))
    compare(
        {
            w: chain([()], *(_between(free[i], places[i], span) for i in every))
            for w, span in enumerate(spans)
        }
    )
    compare(
        {
            w: _between(free[0], places[0], spans[w], CUTS)
            for w, fit in enumerate(fits)
            if fit.log_ratio < -DOUBT
        }
    )
    return fits


def _places(y: Labels, heard: Labels) -> list[tuple[int, int]]:
    """Return, for each place between labels of y, the first and last such place in `heard`."""
    found = [(len(heard), 0)] * (len(y) + 1)
    for block in Levenshtein.opcodes(y, heard):
        for place in range(block.src_start, block.src_end + 1):
            one_to_one = block.tag not in ("insert", "delete")
            low = block.dest_start + (place - block.src_start if one_to_one else 0)
            high = block.dest_end if block.tag == "insert" else low
            found[place] = min(found[place][0], low), max(found[place][1], high)
    return found


def _between(
    heard: Labels, places: Sequence[tuple[int, int]], span: tuple[int, int], margin: int = 0
) -> Iterator[Labels]:
    """Yield the labels that were heard in the place of a span, in every way to cut them.

    With a margin, the cuts may be so many labels earlier or later, on either side.
    """
    starts, ends = (
        range(max(0, low - margin), min(len(heard), high + margin) + 1)
        for low, high in (places[span[0]], places[span[1]])
    )
    yield from (heard[start:end] for start in starts for end in ends if start <= end)
