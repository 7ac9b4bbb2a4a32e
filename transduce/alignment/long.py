"""Long recordings: which stretch of the sound says which words, before each is aligned exactly.

A search without the text hears phones all along the sound, a fifth of them wrong. Their edit
distance to the phones of the text tells which words were heard where. Where the two agree, the
sound is cut between words into stretches of a few seconds. Words that are not in the sound, and
sound that is not in the text, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from transduce.decoding.hypothesis import Labels

# A word is supported if this share of its phones and of NEIGHBOURS phones on either side of it were
# heard: of right words, four fifths are; of any others, a third are by chance.
SUPPORT, NEIGHBOURS = 0.55, 12
# Phones of words without support, one after the other, that stay with their neighbours, because
# each word can be told from what was heard; and phones that were heard between two words, but that
# the text lacks. What has more is left out.
FEW_PHONES = 15
MORE_PHONES = 45  # that stay, if as many were heard: words found against words forced
# A phone that was heard counts if so many of the phones around it were heard about as far from it.
AROUND, DRIFT, FEW_MATCHES = 5, 4, 3
# Vectors of a stretch that is cut further, if it can be: memory and time against cuts in speech.
LONGEST = 750


class Stretch(NamedTuple):
    """Words and the vectors in which they were said."""

    first_word: int
    last_word: int  # the one after
    first_vector: int
    last_vector: int  # the one after


@dataclass(frozen=True, eq=False)
class _Match:
    """The phones of a text beside the phones that were heard."""

    starts: np.ndarray  # [words + 1], the first phone of each word, and the number of phones
    place: np.ndarray  # [phones], the number of the heard phone that equals it, or -1
    frames: np.ndarray  # [heard], the vector of each heard phone

    def supported(self) -> np.ndarray:
        """Return whether each word is supported by the words around it, [words]."""
        equal = np.concatenate([[0], (self.place >= 0).cumsum()])
        low = (self.starts[:-1] - NEIGHBOURS).clip(0)
        high = (self.starts[1:] + NEIGHBOURS).clip(None, len(self.place))
        found: np.ndarray = equal[high] - equal[low] >= SUPPORT * (high - low)
        return found

    def heard_in(self, first: int, last: int) -> tuple[int, int] | None:
        """Return the first and last heard phone that words first to last-1 match; None if none."""
        places = self.place[self.starts[first] : self.starts[last]]
        places = places[places >= 0]
        return (int(places[0]), int(places[-1])) if len(places) else None


def find_stretches(
    words: Sequence[Labels], heard: Labels, frames: Sequence[int], num_vectors: int
) -> list[Stretch]:
    """Return the stretches of a recording, in order; words in none of them were not found.

    `words` has a pronunciation of each word, `heard` the phones of a search without them, and
    `frames` the vector of each.
    """
    match = _match(words, heard, frames)
    islands = [
        island for whole in _islands(match) for island in _split_at_other_sound(match, whole)
    ]
    heard_in = [match.heard_in(*island) or (0, 0) for island in islands]
    found, low = list[Stretch](), 0
    for i, (first, last) in enumerate(islands):
        low = max(low, _edge_before(match, first, heard_in[i][0]))
        high = _edge_after(match, last, heard_in[i][1], num_vectors)
        if i + 1 < len(islands):
            high = min(high, _between(match, heard_in[i][1], heard_in[i + 1][0]))
        if high > low:
            found += _cut(match, Stretch(first, last, low, high))
            low = high
    return found


def _match(words: Sequence[Labels], heard: Labels, frames: Sequence[int]) -> _Match:
    text = [label for word in words for label in word]
    place = np.full(len(text), -1)
    for block in Levenshtein.opcodes(text, heard):
        if block.tag == "equal":
            place[block.src_start : block.src_end] = np.arange(block.dest_start, block.dest_end)
    starts = np.array(list(accumulate(map(len, words), initial=0)))
    return _Match(starts, _without_chance(place), np.array(frames, np.int64))


def _without_chance(place: np.ndarray) -> np.ndarray:
    """Leave out phones that match alone, as in sound or text that the other lacks.

    A match counts if FEW_MATCHES of the phones before and after it match nearby in the sound.
    """
    agreeing = np.zeros(len(place), np.int64)
    for shift in range(-AROUND, AROUND + 1):
        if shift == 0 or abs(shift) >= len(place):
            continue
        here, there = (slice(max(0, k), len(place) + min(0, k)) for k in (-shift, shift))
        drift = np.abs(place[there] - place[here] - shift)
        agreeing[here] += (place[there] >= 0) & (drift <= DRIFT)
    return np.where(agreeing >= min(FEW_MATCHES, len(place) - 1), place, -1)


def _islands(match: _Match) -> list[tuple[int, int]]:
    """Return runs of words that were heard; a few words that were not may be among them.

    A run begins and ends with a word half of whose phones were heard, unless it is at an end of the
    text with a few words more.
    """
    starts = match.starts
    equal = np.concatenate([[0], (match.place >= 0).cumsum()])[starts]
    own = 2 * np.diff(equal) >= np.diff(starts)
    anchors = np.nonzero(match.supported() & own)[0].tolist()
    islands = list[tuple[int, int]]()
    for word in anchors:
        if islands and _belong_together(match, islands[-1][1], word):
            islands[-1] = islands[-1][0], word + 1
        else:
            islands.append((word, word + 1))
    islands = [(first, last) for first, last in islands if last - first > 1 or len(own) == 1]
    if islands and starts[islands[0][0]] <= FEW_PHONES:
        islands[0] = 0, islands[0][1]
    if islands and starts[-1] - starts[islands[-1][1]] <= FEW_PHONES:
        islands[-1] = islands[-1][0], len(own)
    return islands


def _belong_together(match: _Match, first: int, last: int) -> bool:
    """Return whether words first to last-1, between two islands, stay with them.

    A few do; and more do, if about as many phones were heard between the islands as they have.
    """
    written = int(match.starts[last] - match.starts[first])
    if written <= FEW_PHONES:
        return True
    before, after = match.heard_in(first - 1, first), match.heard_in(last, last + 1)
    assert before is not None and after is not None
    heard = after[0] - before[1] - 1
    return written <= MORE_PHONES and written <= 2 * heard <= 4 * written


def _split_at_other_sound(match: _Match, island: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Cut an island where much was heard between two of its words."""
    first = island[0]
    anchored = [w for w in range(*island) if match.heard_in(w, w + 1) is not None]
    for before, after in pairwise(anchored):
        left, right = match.heard_in(before, before + 1), match.heard_in(after, after + 1)
        assert left is not None and right is not None
        written = match.starts[after] - match.starts[before + 1]
        if right[0] - left[1] - 1 > FEW_PHONES + 2 * written:
            yield first, before + 1
            first = before + 1
    yield first, island[1]


def _edge_before(match: _Match, first: int, heard: int) -> int:
    """Return the first vector of an island's sound, given its first matching heard phone.

    A little sound before the first word of the text belongs to it. Otherwise the sound begins
    between two heard phones, so that there are as many for the phones that were not matched.
    """
    if heard == 0 or (first == 0 and heard <= FEW_PHONES):
        return 0
    missed = int(np.argmax(match.place[match.starts[first] :] >= 0))
    previous = max(0, heard - 1 - missed)
    return _between(match, previous, previous + 1)


def _edge_after(match: _Match, last: int, heard: int, num_vectors: int) -> int:
    """Return the vector after the last of an island's sound, given its last matching phone."""
    left = len(match.frames) - 1 - heard
    if left == 0 or (last == len(match.starts) - 1 and left <= FEW_PHONES):
        return num_vectors
    missed = int(np.argmax(match.place[: match.starts[last]][::-1] >= 0))
    following = min(len(match.frames) - 1, heard + 1 + missed)
    return _between(match, following - 1, following)


def _between(match: _Match, before: int, after: int) -> int:
    """Return the vector half-way between two heard phones."""
    return int(match.frames[before] + match.frames[after] + 1) // 2


def _cut(match: _Match, whole: Stretch) -> list[Stretch]:
    """Cut a stretch that is too long between two words that were heard, in the longest pause."""
    if whole.last_vector - whole.first_vector <= LONGEST:
        return [whole]
    # A cut needs the phones on both sides of it, one heard right after the other.
    borders = match.starts[whole.first_word + 1 : whole.last_word]
    before, after = match.place[borders - 1], match.place[borders]
    sound = (before >= 0) & (after == before + 1)
    gaps = np.where(sound, match.frames[after] - match.frames[before], 0)
    if gaps.max(initial=0) < 2:
        return [whole]
    middles = (match.frames[after] + match.frames[before] + 1) // 2
    # Prefer a cut that is not near an end: by a pause, or else by the middle.
    inside = np.minimum(middles - whole.first_vector, whole.last_vector - middles) / LONGEST
    best = int(np.argmax(np.where(gaps >= 2, gaps * inside.clip(0, 0.5), 0)))
    word, vector = whole.first_word + 1 + best, int(middles[best])
    if not whole.first_vector < vector < whole.last_vector:
        return [whole]
    return [
        *_cut(match, Stretch(whole.first_word, word, whole.first_vector, vector)),
        *_cut(match, Stretch(word, whole.last_word, vector, whole.last_vector)),
    ]
