"""Manifests: files with one pair a line.

JSONL lists audio or features: `{"audio_filepath": "a.flac", "duration": 2.1, "text": "a cat"}`.
Paths are relative to the manifest; any field can be the target. TSV lists pairs of texts: source,
tab, target. A plain text file lists targets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    read_lines,
    skipping,
)
from transduce.data.records import Record, existing_file, json_object, seconds

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
            fields = json_object(origin, line, EXAMPLE)
            source = _source(origin, fields)
            yield Record(_name(source), source, origin, _target_fields(fields))


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


def _target_fields(fields: dict[str, Any]) -> dict[str, Any]:
    others = ("audio_filepath", "features_filepath", "duration", "offset")
    return {name: value for name, value in fields.items() if name not in others}


def _source(origin: Origin, fields: dict[str, Any]) -> Audio | Frames:
    keys = [key for key in ("audio_filepath", "features_filepath") if key in fields]
    if len(keys) != 1:
        raise origin.error(
            f"there is {'both' if keys else 'neither'} audio_filepath "
            f"{'and' if keys else 'nor'} features_filepath; give one of them"
        )
    if not isinstance(fields[keys[0]], str):
        raise origin.error(f"{keys[0]} is {fields[keys[0]]!r}; it must be a path, in quotes")
    rule = "paths are relative to the manifest"
    path = existing_file(origin, fields[keys[0]], [origin.file.parent], rule)
    if keys == ["features_filepath"]:
        return Frames(path)
    duration, start = (seconds(origin, fields, key) for key in ("duration", "offset"))
    if start is not None and duration is None:
        raise origin.error("there is an offset but no duration; give both, in seconds")
    return Audio(path, start, duration)


def _name(source: Audio | Frames) -> str:
    """Return the name of the file, with the offset if the pair is a part of it."""
    if isinstance(source, Frames) or source.start is None:
        return source.path.stem
    return f"{source.path.stem}@{source.start:g}"
