"""A pair of sequences, how text becomes symbols, and what is said of a pair that is no good."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transduce.alphabet import Alphabet

Symbols = tuple[str, ...]
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]


class DataError(ValueError):
    """Something is wrong with the data: one sentence with the file, the line and the remedy."""


@dataclass(frozen=True)
class Origin:
    """Where a pair was read: what an error says first."""

    file: Path
    line: int | None = None  # counted from 1; None if the pair is the whole file

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", Path(self.file))  # a string will do

    def __str__(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}, line {self.line}"

    def error(self, problem: str) -> DataError:
        """The error that names this place, to be raised."""
        return DataError(f"{self}: {problem}")


@dataclass(frozen=True)
class Audio:
    """A sound file, or a part of one."""

    path: Path
    start: float | None = None  # in seconds; None if the whole file is meant
    duration: float | None = None  # in seconds, as the corpus gives it

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))


@dataclass(frozen=True)
class Frames:
    """A file of feature vectors, [T, D] as NumPy writes it."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))


@dataclass(frozen=True)
class Pair:
    """An input sequence and an output sequence, with no alignment between them."""

    name: str
    source: Symbols | Audio | Frames
    target: Symbols  # empty if it is not known
    origin: Origin
    alternatives: tuple[Symbols, ...] = ()  # targets as good as the first

    @property
    def references(self) -> tuple[Symbols, ...]:
        """All the targets that are right."""
        return (self.target, *self.alternatives)


@dataclass(frozen=True)
class Splits:
    """The three sets of an experiment."""

    training: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]


@dataclass(frozen=True)
class Notation:
    """How a line of text becomes symbols. The normal form is to be chosen, not assumed."""

    split: Literal["characters", "spaces"]
    normal_form: NormalForm | None  # None leaves the text as it is written

    def __post_init__(self) -> None:
        if self.split not in ("characters", "spaces"):
            raise ValueError(f"split must be characters or spaces, not {self.split!r}")
        if self.normal_form not in (None, "NFC", "NFD", "NFKC", "NFKD"):
            raise ValueError(
                f"normal_form must be NFC, NFD, NFKC, NFKD or None, not {self.normal_form!r}"
            )

    def symbols(self, text: str) -> Symbols:
        if self.normal_form is not None:
            text = unicodedata.normalize(self.normal_form, text)
        return tuple(text.split() if self.split == "spaces" else text.strip())


@contextmanager
def skipping(skipped: list[DataError] | None) -> Iterator[None]:
    """Lets a DataError through, or, given a list, adds it to the list and goes on."""
    try:
        yield
    except DataError as error:
        if skipped is None:
            raise
        skipped.append(error)


def skipped_report(skipped: Sequence[DataError], num_kept: int, shown: int = 5) -> str:
    """How many were skipped of how many, and the first few reasons, a line each."""
    lines = [f"skipped {len(skipped)} of {len(skipped) + num_kept}"]
    lines += [f"  {error}" for error in skipped[:shown]]
    if len(skipped) > shown:
        lines.append(f"  and {len(skipped) - shown} more")
    return "\n".join(lines)


def read_lines(
    path: str | Path, skipped: list[DataError] | None = None, separator: str | None = None
) -> Iterator[tuple[Origin, str]]:
    """The lines of a UTF-8 file that are not blank, without their ends, and where each stands.

    A line with the separator is not blank, even if there is nothing on either side of it.
    """
    path, nothing = Path(path), True
    if not path.is_file():
        raise Origin(path).error("there is no such file; check the path")
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            text = ""
            with skipping(skipped):
                text = _decoded(raw, Origin(path, number))
            nothing = nothing and not raw.strip()
            if text.strip() or (separator and separator in text):
                nothing = False
                yield Origin(path, number), text.rstrip("\r\n")
    if nothing:
        raise Origin(path).error("there is nothing in it; write a line for each pair")


def _decoded(raw: bytes, origin: Origin) -> str:
    try:
        return raw.decode("utf-8-sig" if origin.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise origin.error(
            f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8"
        ) from None


def alphabet_of(sequences: Iterable[Symbols]) -> Alphabet:
    """The symbols that occur in the sequences, sorted."""
    return Alphabet(sorted(set().union(*sequences)))


def target_alphabet(pairs: Iterable[Pair]) -> Alphabet:
    return alphabet_of(target for pair in pairs for target in pair.references)


def source_alphabet(pairs: Iterable[Pair]) -> Alphabet:
    """The symbols of the sources, which must not be audio."""
    return alphabet_of(source_symbols(pair) for pair in pairs)


def source_symbols(pair: Pair) -> Symbols:
    if not isinstance(pair.source, tuple):
        raise pair.origin.error("the source is audio or features, not symbols; give text to read")
    return pair.source


def encode(pair: Pair, symbols: Symbols, alphabet: Alphabet) -> list[int]:
    """The symbols' ids; a DataError names the first symbol that the alphabet lacks."""
    try:
        return alphabet.encode(symbols)
    except ValueError as error:
        raise pair.origin.error(
            f"{error}; correct it, or leave the line out, or train with it"
        ) from None
