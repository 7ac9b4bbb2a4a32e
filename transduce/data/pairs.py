"""Pairs of sequences, the split of text into symbols, and errors with file and line."""

from __future__ import annotations

import gzip
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from transduce.alphabet import Alphabet

Symbols = tuple[str, ...]
Item = TypeVar("Item")
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
# The suffixes of sound files.
SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".sph", ".nist"}


class DataError(ValueError):
    """An error in the data: a sentence that names the file, the line and the remedy."""


@dataclass(frozen=True)
class Origin:
    """The file and line that a pair was read from; errors begin with it."""

    file: Path
    line: int | None = None  # from 1; None if the pair is the whole file
    inside: str | None = None  # the place in a file without lines, such as "row 3"

    def __post_init__(self) -> None:
        if not isinstance(self.file, Path):  # accept a string
            object.__setattr__(self, "file", Path(self.file))

    def __str__(self) -> str:
        place = self.inside if self.line is None else f"line {self.line}"
        return str(self.file) if place is None else f"{self.file}, {place}"

    def error(self, problem: str) -> DataError:
        """Return, without raising it, the error of `problem` at this place."""
        return DataError(f"{self}: {problem}")

    def file_error(self, file: Path | Audio, problem: str) -> DataError:
        """Return the error of a file named here, whose `problem` names it, without raising it."""
        return DataError(problem) if str(self) == str(file) else self.error(problem)


@dataclass(frozen=True)
class Member:
    """A file inside a tar archive: some of the archive's bytes."""

    name: str  # for messages alone; it is never a path
    offset: int  # of the first byte
    size: int  # bytes

    def __str__(self) -> str:
        return f"member {self.name}"


@dataclass(frozen=True)
class Cell:
    """The bytes of one row of a Parquet file, in its column of sounds."""

    column: str
    row: int  # from 1, in the whole file
    group: int  # the row group that has it, from 0
    place: int  # in that row group, from 0

    def __str__(self) -> str:
        return f"row {self.row}"


@dataclass(frozen=True)
class Audio:
    """A sound file, or a part of one; the file may lie inside another one."""

    path: Path
    start: float | None = None  # seconds; None: the whole file
    duration: float | None = None  # seconds, as the manifest states it
    inside: Member | Cell | None = None  # where the sound lies in `path`; None: it is the file

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def __str__(self) -> str:
        return str(self.path) if self.inside is None else f"{self.path}, {self.inside}"


@dataclass(frozen=True)
class Recording:
    """What is known of a sound once it has been read."""

    seconds: float
    sample_rate: int  # before it was resampled
    loudest: float  # the largest absolute value of its samples, which are in [-1, 1]


@dataclass(frozen=True)
class Frames:
    """A .npy file of feature vectors [T, D]."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))


@dataclass(frozen=True)
class Pair:
    """An input sequence and an output sequence, with no alignment between them."""

    name: str
    source: Symbols | Audio | Frames
    target: Symbols  # empty if unknown
    origin: Origin
    alternatives: tuple[Symbols, ...] = ()  # other correct targets

    @property
    def references(self) -> tuple[Symbols, ...]:
        """Return all correct targets."""
        return (self.target, *self.alternatives)


@dataclass(frozen=True)
class Splits:
    """The training, validation and test sets of an experiment."""

    training: Sequence[Pair]  # a tuple; a manifest is parsed line by line when it is needed
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]


@dataclass(frozen=True)
class Notation:
    """A rule to split a line of text into symbols. `normal_form` has no default on purpose."""

    split: Literal["characters", "spaces"]
    normal_form: NormalForm | None  # of Unicode; None: keep the text as written

    def __post_init__(self) -> None:
        if self.split not in ("characters", "spaces"):
            raise ValueError(f"split must be characters or spaces, not {self.split!r}")
        if self.normal_form not in (None, "NFC", "NFD", "NFKC", "NFKD"):
            raise ValueError(
                f"normal_form must be NFC, NFD, NFKC, NFKD or None, not {self.normal_form!r}"
            )

    def symbols(self, text: str) -> Symbols:
        """Normalise and split a line of text."""
        if self.normal_form is not None:
            text = unicodedata.normalize(self.normal_form, text)
        return tuple(text.split() if self.split == "spaces" else text.strip())


@contextmanager
def skipping(skipped: list[DataError] | None) -> Iterator[None]:
    """Append a DataError raised in the block to `skipped`; if that is None, let it pass."""
    try:
        yield
    except DataError as error:
        if skipped is None:
            raise
        skipped.append(error)


def with_errors(
    read: Callable[[list[DataError]], Iterator[Item]],
) -> Iterator[Item | DataError]:
    """Yield what a reader yields, and the errors that it appends to its list, each in its place.

    An error that ends the reading is the last item.
    """
    skipped: list[DataError] = []
    try:
        for item in read(skipped):
            yield from skipped
            skipped.clear()
            yield item
    except DataError as error:
        skipped.append(error)
    yield from skipped


def check_some_left(left: Sequence[object], skipped: Sequence[DataError] | None) -> None:
    """Raise a DataError with the first error if all pairs were skipped."""
    if not left and skipped:
        raise DataError(f"no pair can be read; the first error is: {skipped[0]}")


def skipped_report(skipped: Sequence[DataError], num_kept: int, shown: int = 5) -> str:
    """Return a line with the counts of skipped and all pairs, and the first few errors."""
    lines = [f"skipped {len(skipped)} of {len(skipped) + num_kept}"]
    lines += [f"  {error}" for error in skipped[:shown]]
    if len(skipped) > shown:
        lines.append(f"  and {len(skipped) - shown} more")
    return "\n".join(lines)


def read_lines(
    path: str | Path, skipped: list[DataError] | None = None, separator: str | None = None
) -> Iterator[tuple[Origin, str]]:
    """Yield each line of a UTF-8 file that is not blank, without its line ending, and its origin.

    A file that ends in .gz is decompressed. A line that contains `separator` is not blank, even if
    it contains nothing else. Raise a DataError if the file is missing or has no lines.
    """
    path, is_empty = Path(path), True
    if not path.is_file():
        raise Origin(path).error("there is no such file; check the path")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, raw in enumerate(_unpacked(lines, path), start=1):
            text = ""
            with skipping(skipped):
                text = decode_line(raw, Origin(path, number))
            is_empty = is_empty and not raw.strip()
            if text.strip() or (separator and separator in text):
                is_empty = False
                yield Origin(path, number), text.rstrip("\r\n")
    if is_empty:
        raise Origin(path).error("the file is empty; write a line for each pair")


def _unpacked(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of an open file; raise a DataError if gzip cannot decompress them."""
    try:
        yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = str(error).rstrip(".")
        raise Origin(path).error(f"gzip cannot read it ({reason}); copy the file again") from None


def decode_line(raw: bytes, origin: Origin) -> str:
    """Decode a line of UTF-8; raise a DataError if it is something else."""
    try:
        return raw.decode("utf-8-sig" if origin.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise origin.error(
            f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8"
        ) from None


def alphabet_of(sequences: Iterable[Symbols]) -> Alphabet:
    """Return the sorted symbols of the sequences as an alphabet."""
    symbols = set[str]()
    for sequence in sequences:
        symbols.update(sequence)
    return Alphabet(sorted(symbols))


def target_alphabet(pairs: Iterable[Pair]) -> Alphabet:
    """Return the alphabet of all targets, alternatives included."""
    return alphabet_of(target for pair in pairs for target in pair.references)


def source_alphabet(pairs: Iterable[Pair]) -> Alphabet:
    """Return the alphabet of all sources; raise a DataError for audio or features."""
    return alphabet_of(source_symbols(pair) for pair in pairs)


def source_symbols(pair: Pair) -> Symbols:
    """Return the source of a pair of texts; raise a DataError for audio or features."""
    if not isinstance(pair.source, tuple):
        raise pair.origin.error("the source is audio or features, not symbols; give text to read")
    return pair.source


def encode(pair: Pair, symbols: Symbols, alphabet: Alphabet) -> list[int]:
    """Return the ids of the symbols; raise a DataError for the first unknown symbol."""
    try:
        return alphabet.encode(symbols)
    except ValueError as error:
        one_word = len(symbols) == 1 and len(symbols[0]) > 1
        characters = (
            "; if its characters are the symbols, set --data.target_notation.split characters"
        )
        raise pair.origin.error(
            f"{error}; correct the symbol, leave the line out, or train with the symbol"
            f"{characters if one_word else ''}"
        ) from None
