"""Manifests: files with one pair a line.

JSONL lists audio or features: `{"audio_filepath": "a.flac", "duration": 2.1, "text": "a cat"}`.
Paths are relative to the manifest; any field can be the target. TSV lists pairs of texts: source,
tab, target. A plain text file lists targets alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    Symbols,
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


def _source(origin: Origin, fields: dict[str, Any]) -> Audio | Frames:
    keys = [key for key in ("audio_filepath", "features_filepath") if key in fields]
    if len(keys) != 1:
        raise origin.error(
            f"there is {'both' if keys else 'neither'} audio_filepath "
            f"{'and' if keys else 'nor'} features_filepath; give one of them"
        )
    if not isinstance(fields[keys[0]], str):
        raise origin.error(f"{keys[0]} is {fields[keys[0]]!r}; it must be a path, in quotes")
    path = _existing_file(origin, fields[keys[0]])
    if keys == ["features_filepath"]:
        return Frames(path)
    duration, start = (_seconds(origin, fields, key) for key in ("duration", "offset"))
    if start is not None and duration is None:
        raise origin.error("there is an offset but no duration; give both, in seconds")
    return Audio(path, start, duration)


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
    if isinstance(source, Frames) or source.start is None:
        return source.path.stem
    return f"{source.path.stem}@{source.start:g}"
