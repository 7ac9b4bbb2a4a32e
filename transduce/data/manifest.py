"""Manifests: files with one pair a line, all of it in memory or an index of its lines.

JSONL lists audio or features: `{"audio_filepath": "a.flac", "duration": 2.1, "text": "a cat"}`.
Paths are relative to the manifest; any field can be the target. TSV lists pairs of texts: source,
tab, target. A plain text file lists targets alone.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from transduce.alphabet import Alphabet
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    Symbols,
    decode_line,
    read_lines,
    skipping,
)


def read_manifest(
    path: str | Path,
    notation: Notation | None,
    target: str = "text",
    skipped: list[DataError] | None = None,
) -> list[Pair]:
    """Read the pairs of a JSONL manifest; `notation` splits the text of field `target`.

    A line has `audio_filepath`, optionally with its `duration` and the `offset` of its start in
    seconds, or `features_filepath`, a .npy file of [T, D]. A target may also be a list of symbols.
    Without a notation, leave targets empty, as for transcription. Check that the files exist, but
    do not open them.
    """
    pairs = []
    for origin, line in read_lines(path, skipped):
        with skipping(skipped):
            fields = _fields(origin, line)
            source = _source(origin, fields)
            symbols = _target(origin, fields, target, notation) if notation else ()
            pairs.append(Pair(_name(source), source, symbols, origin))
    return pairs


# What is kept of each line in memory: 34 bytes.
LINE = np.dtype(
    [
        ("file", np.int16),  # of `files`
        ("number", np.int64),  # of the line, from 1
        ("start", np.int64),  # of its bytes
        ("size", np.int32),  # in bytes
        ("seconds", np.float64),  # its `duration`; NaN if it has none
        ("num_labels", np.int32),
    ]
)
BLOCK = 65_536  # lines that are indexed at once


class Manifest(Sequence[Pair]):
    """The pairs of a JSONL manifest, each parsed when it is asked for.

    Opening it reads every line once, and names lines that are no pair, but does not look for the
    files that they name. A pair whose file is missing is a DataError when it is asked for. The
    index in memory has 34 bytes a line.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        notation: Notation,
        target: str,
        lines: np.ndarray,
        symbols: Iterable[str] | None = None,
    ) -> None:
        self.files, self.notation, self.target = files, notation, target
        self.lines = lines  # [N] of LINE
        self.symbols = symbols  # of all targets; None if it takes another pass to know

    @classmethod
    def open(
        cls,
        path: str | Path,
        notation: Notation,
        target: str = "text",
        skipped: list[DataError] | None = None,
    ) -> Manifest:
        """Index a file; raise a DataError for the first bad line, or append all to `skipped`."""
        path = Path(path)
        blocks, block = list[np.ndarray](), list[tuple[int, int, int, int, float, int]]()
        start, is_empty, symbols = 0, True, set[str]()
        if not path.is_file():
            raise Origin(path).error("there is no such file; check the path")
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.isspace():
                    is_empty = False
                    try:
                        seconds, symbols_here = _plain_line(raw, target, notation) or _line(
                            Origin(path, number), raw, target, notation
                        )
                        symbols.update(symbols_here)
                        block.append((0, number, start, len(raw), seconds, len(symbols_here)))
                    except DataError as error:
                        if skipped is None:
                            raise
                        skipped.append(error)
                start += len(raw)
                if len(block) == BLOCK:
                    blocks.append(np.array(block, LINE))
                    block.clear()
        if is_empty:
            raise Origin(path).error("the file is empty; write a line for each pair")
        lines = np.concatenate([*blocks, np.array(block, LINE)])
        return cls((path,), notation, target, lines, symbols)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.subset(np.arange(len(self))[index])
        line = self.lines[index]
        path = self.files[line["file"]]
        with path.open("rb") as file:
            file.seek(line["start"])
            return self._pair(path, int(line["number"]), file.read(line["size"]))

    def __iter__(self) -> Iterator[Pair]:
        for origin, fields in self._all_fields():
            yield self._pair_of(origin, fields)

    def read(self, skipped: list[DataError] | None = None) -> list[Pair]:
        """Return all pairs, and check that their files exist, as `read_manifest` does."""
        pairs = []
        for origin, fields in self._all_fields():
            with skipping(skipped):
                pairs.append(self._pair_of(origin, fields))
        return pairs

    def subset(self, indices: np.ndarray) -> Manifest:
        """Return the pairs at some indices."""
        return Manifest(self.files, self.notation, self.target, self.lines[indices])

    def joined(self, other: Manifest) -> Manifest:
        """Append the pairs of another manifest with the same notation and target."""
        lines = other.lines.copy()
        lines["file"] += len(self.files)
        files, both = self.files + other.files, np.concatenate([self.lines, lines])
        return Manifest(files, self.notation, self.target, both)

    def hold_out(self, num_sources: int, seed: int) -> tuple[Manifest, Manifest]:
        """Split off all pairs of `num_sources` sources, as `dictionaries.hold_out` does."""
        sources_of_lines = (_named(*one) for one in self._all_fields())
        names = [_name_of(PurePath(one.written), one.start) for one in sources_of_lines]
        sources = sorted(set(names))
        if not 0 <= num_sources < len(sources):
            raise ValueError(
                f"cannot hold out {num_sources} of {len(sources)} sources; hold out fewer"
            )
        drawn = set(random.Random(seed).sample(sources, num_sources))
        out = np.array([name in drawn for name in names], bool)
        return self.subset(np.flatnonzero(~out)), self.subset(np.flatnonzero(out))

    def target_alphabet(self) -> Alphabet:
        """Return the alphabet of all targets; that of a subset takes a pass over its lines."""
        if self.symbols is None:
            found = set[str]()
            for origin, fields in self._all_fields():
                found.update(_target(origin, fields, self.target, self.notation))
            self.symbols = found
        return Alphabet(sorted(self.symbols))

    def _all_fields(self) -> Iterator[tuple[Origin, dict[str, Any]]]:
        """Yield the origin and the fields of each line, in order."""
        for first in range(0, len(self), BLOCK):
            block = self.lines[first : first + BLOCK]
            with ExitStack() as stack:
                opened = {
                    i: stack.enter_context(path.open("rb")) for i, path in enumerate(self.files)
                }
                for i, number, start, size, *_ in block.tolist():
                    opened[i].seek(start)
                    origin = Origin(self.files[i], number)
                    yield origin, _parsed(origin, opened[i].read(size))

    def _pair(self, path: Path, number: int, raw: bytes) -> Pair:
        origin = Origin(path, number)
        return self._pair_of(origin, _parsed(origin, raw))

    def _pair_of(self, origin: Origin, fields: dict[str, Any]) -> Pair:
        source = _source(origin, fields)
        return Pair(
            _name(source), source, _target(origin, fields, self.target, self.notation), origin
        )


def _line(origin: Origin, raw: bytes, target: str, notation: Notation) -> tuple[float, Symbols]:
    """Return the duration of a line, or NaN, and its target; check the line."""
    fields = _parsed(origin, raw)
    seconds = _named(origin, fields).duration
    return math.nan if seconds is None else seconds, _target(origin, fields, target, notation)


def _plain_line(raw: bytes, target: str, notation: Notation) -> tuple[float, Symbols] | None:
    """Return what `_line` does, in a third of the time, for lines as they mostly are.

    Return None for any other line, good or bad.
    """
    try:
        fields = json.loads(raw.decode())
        seconds, start = fields["duration"], fields.get("offset", 0.0)
        symbols = notation.symbols(fields[target])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    in_order = type(seconds) is type(start) is float and 0 <= seconds < math.inf > start >= 0
    sound = type(fields.get("audio_filepath")) is str and "features_filepath" not in fields
    if not (in_order and sound and symbols and type(fields[target]) is str):
        return None
    return seconds, symbols


class Spoken(NamedTuple):
    """A sound, and the words or phones that are said in it."""

    pair: Pair  # without a target
    text: str | None
    phones: str | Sequence[str] | None  # if there is no text


def read_spoken(path: str | Path, skipped: list[DataError] | None = None) -> list[Spoken]:
    """Read the sounds of a JSONL manifest with the field `text`, or else `phones`, of each line."""
    found = []
    for origin, line in read_lines(path, skipped):
        with skipping(skipped):
            fields = _fields(origin, line)
            source = _source(origin, fields)
            if isinstance(source, Frames):
                raise origin.error("there is no sound; give audio_filepath")
            name = "text" if fields.get("text") is not None else "phones"
            said = fields.get(name)
            listed = isinstance(said, list) and all(isinstance(one, str) for one in said)
            if not (isinstance(said, str) or (name == "phones" and listed)):
                problem = "there is neither text nor phones"
                if name in fields:
                    problem = f"{name} is {said!r}, neither words nor phones"
                raise origin.error(f"{problem}; write the words that are said")
            pair = Pair(_name(source), source, (), origin)
            found.append(Spoken(pair, *((said, None) if name == "text" else (None, said))))
    return found


def target_fields(path: Path) -> list[str]:
    """Return the fields of a manifest's first line that may be targets."""
    origin, line = next(read_lines(path))
    return _target_fields(_fields(origin, line))


def read_tsv(
    path: str | Path,
    source: Notation,
    target: Notation,
    skipped: list[DataError] | None = None,
) -> list[Pair]:
    """Read the pairs of a file with a source, a tab and a target on each line.

    Further targets, each after a tab, become the pair's alternatives. A pair's name is its source.
    """
    pairs = []
    for origin, line in read_lines(path, skipped, separator="\t"):
        with skipping(skipped):
            written, *targets = (column.strip() for column in line.split("\t"))
            if not targets:
                raise origin.error("there is no tab; write source, tab, target")
            if not written:
                raise origin.error("the source is empty; write it before the tab")
            if not all(targets):
                raise origin.error("the target is empty; write it after the tab")
            first, *others = map(target.symbols, targets)
            pairs.append(Pair(written, source.symbols(written), first, origin, tuple(others)))
    return pairs


def read_targets(
    path: str | Path, notation: Notation, skipped: list[DataError] | None = None
) -> list[Pair]:
    """Read targets without sources, one a line: the training data of a prediction network."""
    return [
        Pair(str(origin.line), (), notation.symbols(line), origin)
        for origin, line in read_lines(path, skipped)
    ]


def _parsed(origin: Origin, raw: bytes) -> dict[str, Any]:
    return _fields(origin, decode_line(raw, origin).rstrip("\r\n"))


def _fields(origin: Origin, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise origin.error(
            f"the line is not JSON ({error.msg} at column {error.colno}); write one object a line"
        ) from None
    except (ValueError, RecursionError):
        raise origin.error(
            "a number is too long, or lists are too deep; shorten the line, or leave it out"
        ) from None
    if not isinstance(fields, dict):
        raise origin.error(
            'the line is not a JSON object; write {"audio_filepath": ..., "text": ...}'
        )
    return fields


def _target_fields(fields: dict[str, Any]) -> list[str]:
    others = ("audio_filepath", "features_filepath", "duration", "offset")
    return [name for name in fields if name not in others]


class _Named(NamedTuple):
    """The source that a line names, whether or not its file is there."""

    key: str  # audio_filepath or features_filepath
    written: str
    start: float | None = None
    duration: float | None = None


def _named(origin: Origin, fields: dict[str, Any]) -> _Named:
    keys = [key for key in ("audio_filepath", "features_filepath") if key in fields]
    if len(keys) != 1:
        raise origin.error(
            f"there is {'both' if keys else 'neither'} audio_filepath "
            f"{'and' if keys else 'nor'} features_filepath; give one of them"
        )
    [key] = keys
    if not isinstance(fields[key], str):
        raise origin.error(f"{key} is {fields[key]!r}; it must be a path, in quotes")
    if key == "features_filepath":
        return _Named(key, fields[key])
    duration, start = (_seconds(origin, fields, name) for name in ("duration", "offset"))
    if start is not None and duration is None:
        raise origin.error("there is an offset but no duration; give both, in seconds")
    return _Named(key, fields[key], start, duration)


def _source(origin: Origin, fields: dict[str, Any]) -> Audio | Frames:
    named = _named(origin, fields)
    path = _existing_file(origin, named.written)
    if named.key == "features_filepath":
        return Frames(path)
    return Audio(path, named.start, named.duration)


def _existing_file(origin: Origin, written: str) -> Path:
    try:
        path = origin.file.parent / Path(written).expanduser()
        exists = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, ~ of an unknown user
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise origin.error(f"{written[:60]!r} cannot be a path ({reason}); correct it") from None
    if not exists:
        raise origin.error(f"there is no file {path}; paths are relative to the manifest")
    return path


def _seconds(origin: Origin, fields: dict[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise origin.error(f"{key} is {value!r}; it must be a number of seconds")
    return float(value)


def _target(origin: Origin, fields: dict[str, Any], target: str, notation: Notation) -> Symbols:
    if target not in fields:
        raise origin.error(
            f"there is no field {target!r} for the target; choose one of "
            f"{', '.join(_target_fields(fields))} with --data.target (train) or --target"
        )
    value = fields[target]
    if isinstance(value, list) and all(isinstance(symbol, str) for symbol in value):
        symbols = tuple(value)
    elif isinstance(value, str):
        symbols = notation.symbols(value)
    else:
        raise origin.error(f"{target} is {value!r}; it must be text, or a list of symbols")
    if not symbols:
        raise origin.error(f"{target} is empty; transcribe it, or leave the line out")
    return symbols


def _name(source: Audio | Frames) -> str:
    """Return the name of the file, with the offset if the pair is a part of it."""
    return _name_of(source.path, None if isinstance(source, Frames) else source.start)


def _name_of(path: PurePath, start: float | None) -> str:
    return path.stem if start is None else f"{path.stem}@{start:g}"
