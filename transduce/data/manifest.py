"""Manifests: files with one pair a line, all of it in memory or an index of its lines.

JSONL lists audio or features: `{"audio_filepath": "a.flac", "duration": 2.1, "text": "a cat"}`.
Paths are relative to the manifest; any field can be the target. TSV lists pairs of texts: source,
tab, target. A plain text file lists targets alone.
"""

from __future__ import annotations

import json
import math
import random
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
from transduce.data.records import Record, existing_file, json_object, seconds, target_symbols

EXAMPLE = '{"audio_filepath": ..., "text": ...}'


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
    for record in manifest_records(path, skipped):
        with skipping(skipped):
            pairs.append(record.pair(notation, target))
    return pairs


def manifest_records(path: str | Path, skipped: list[DataError] | None = None) -> Iterator[Record]:
    """Yield the lines of a JSONL manifest, each with all its fields that may be targets."""
    for origin, line in read_lines(path, skipped):
        with skipping(skipped):
            yield _record(origin, json_object(origin, line, EXAMPLE))


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
                        duration, symbols_here = _plain_line(raw, target, notation) or _line(
                            Origin(path, number), raw, target, notation
                        )
                        symbols.update(symbols_here)
                        block.append((0, number, start, len(raw), duration, len(symbols_here)))
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
        names = [_name(PurePath(one.written), one.start) for one in sources_of_lines]
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
                found.update(
                    target_symbols(origin, _target_fields(fields), self.target, self.notation)
                )
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
        return _record(origin, fields).pair(self.notation, self.target)


def _line(origin: Origin, raw: bytes, target: str, notation: Notation) -> tuple[float, Symbols]:
    """Return the duration of a line, or NaN, and its target; check the line."""
    fields = _parsed(origin, raw)
    duration = _named(origin, fields).duration
    symbols = target_symbols(origin, _target_fields(fields), target, notation)
    return math.nan if duration is None else duration, symbols


def _plain_line(raw: bytes, target: str, notation: Notation) -> tuple[float, Symbols] | None:
    """Return what `_line` does, in a third of the time, for lines as they mostly are.

    Return None for any other line, good or bad.
    """
    try:
        fields = json.loads(raw.decode())
        duration, start = fields["duration"], fields.get("offset", 0.0)
        symbols = notation.symbols(fields[target])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    in_order = type(duration) is type(start) is float and 0 <= duration < math.inf > start >= 0
    sound = type(fields.get("audio_filepath")) is str and "features_filepath" not in fields
    if not (in_order and sound and symbols and type(fields[target]) is str):
        return None
    return duration, symbols


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
    return json_object(origin, decode_line(raw, origin).rstrip("\r\n"), EXAMPLE)


def _target_fields(fields: dict[str, Any]) -> dict[str, Any]:
    others = ("audio_filepath", "features_filepath", "duration", "offset")
    return {name: value for name, value in fields.items() if name not in others}


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
    duration, start = (seconds(origin, fields, name) for name in ("duration", "offset"))
    if start is not None and duration is None:
        raise origin.error("there is an offset but no duration; give both, in seconds")
    return _Named(key, fields[key], start, duration)


def _record(origin: Origin, fields: dict[str, Any]) -> Record:
    """Return the sound or frames of a line; raise a DataError if its file is not there."""
    named = _named(origin, fields)
    rule = "paths are relative to the manifest"
    path = existing_file(origin, named.written, [origin.file.parent], rule)
    source: Audio | Frames = Frames(path)
    if named.key == "audio_filepath":
        source = Audio(path, named.start, named.duration)
    return Record(_name(path, named.start), source, origin, _target_fields(fields))


def _name(path: PurePath, start: float | None) -> str:
    """Return the name of the file, with the offset if the pair is a part of it."""
    return path.stem if start is None else f"{path.stem}@{start:g}"
