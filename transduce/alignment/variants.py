"""Which pronunciation of each word was said, and what was said in place of a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein
from torch import Tensor

from transduce.alignment.detours import CONTEXT, Detour, LabelPath
from transduce.decoding.cpu.prediction import PackedWeights
from transduce.decoding.hypothesis import Labels

# Labels by which the place of a word may differ, where e^DOUBT is the likelihood ratio of something
# else: more detours against surer ratios.
CUTS, DOUBT = 2, 6.0

Variants = Sequence[Sequence[Labels]]  # the pronunciations of each word, in labels


class Choice(NamedTuple):
    """The pronunciation of each word, and the path of all their labels."""

    variants: tuple[int, ...]  # the number of each word's pronunciation
    spans: list[tuple[int, int]]  # of each word's labels
    path: LabelPath


def choose_pronunciations(vectors: Tensor, weights: PackedWeights, words: Variants) -> Choice:
    """Return the pronunciation of every word with which the labels are most probable.

    The probability is Pr(y|x), the sum over all alignments. Begin with the first pronunciation of
    every word; replace those for which another one makes it larger, and repeat around them until
    there are none.
    """
    chosen = [0] * len(words)
    spans = _spans(words, chosen)
    path = LabelPath.of(vectors, weights, _labels(words, chosen))
    changed = set(range(len(words)))
    while changed:
        better = _better(path, words, chosen, spans, changed)
        taken = _apart(better, spans)
        changed = set()
        while taken:
            attempt = [taken.get(w, variant) for w, variant in enumerate(chosen)]
            other = path.with_labels(_labels(words, attempt))
            if other.log_likelihood > path.log_likelihood:
                near = _near(taken, spans)
                path, chosen, spans, changed = other, attempt, _spans(words, attempt), near
                break
            # Together they are worse than each alone: take the best half of them.
            taken = dict(list(taken.items())[: len(taken) // 2])
    return Choice(tuple(chosen), spans, path)


def _better(
    path: LabelPath, words: Variants, chosen: Sequence[int], spans: Sequence[tuple[int, int]],
    changed: set[int],
) -> list[tuple[float, int, int]]:  # fmt: skip
    """Return gain, word and variant of the best improvement of each word, the largest first."""
    others = [
        (w, variant, Detour(*spans[w], words[w][variant]))
        for w in sorted(changed)
        for variant in range(len(words[w]))
        if variant != chosen[w]
    ]
    gains = path.gains([detour for _, _, detour in others]).tolist()
    best: dict[int, tuple[float, int, int]] = {}
    for gain, (w, variant, _) in zip(gains, others, strict=True):
        if gain > max(0.0, best.get(w, (0.0,))[0]):
            best[w] = gain, w, variant
    return sorted(best.values(), reverse=True)


def _apart(
    better: Sequence[tuple[float, int, int]], spans: Sequence[tuple[int, int]]
) -> dict[int, int]:
    """Return the words and variants of the best improvements that do not affect each other."""
    taken: dict[int, int] = {}
    for _, w, variant in better:
        first, last = spans[w][0] - CONTEXT, spans[w][1] + CONTEXT
        if all(spans[v][1] <= first or last <= spans[v][0] for v in taken):
            taken[w] = variant
    return taken


def _near(taken: dict[int, int], spans: Sequence[tuple[int, int]]) -> set[int]:
    """Return the words whose detours a change may have made better or worse."""
    reach = 2 * CONTEXT
    return {
        w
        for w, (start, end) in enumerate(spans)
        if any(start < spans[v][1] + reach and spans[v][0] - reach < end for v in taken)
    }


def _labels(words: Variants, chosen: Sequence[int]) -> Labels:
    return tuple(
        label for word, variant in zip(words, chosen, strict=True) for label in word[variant]
    )


def _spans(words: Variants, chosen: Sequence[int]) -> list[tuple[int, int]]:
    lengths = [len(word[variant]) for word, variant in zip(words, chosen, strict=True)]
    return list(pairwise(accumulate(lengths, initial=0)))


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
