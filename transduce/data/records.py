"""What all readers of sounds share: a sound with the fields of its line, and its target."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.data.pairs import Audio, DataError, Frames, Notation, Origin, Pair, Symbols

# Other names that data sets have for the text that is said, besides `text`.
TEXT_NAMES = ("sentence", "transcription", "transcript")


@dataclass(frozen=True)
class Record:
    """A sound, or frames, and the fields beside it that may be its target."""

    name: str
    source: Audio | Frames
    origin: Origin
    fields: Mapping[str, Any]

    def pair(self, notation: Notation | None, target: str = "text") -> Pair:
        """Return the pair with field `target` split by `notation`; without one, no target.

        A target may be of several fields (`target_symbols`).
        """
        symbols: Symbols = ()
        if notation is not None:
            symbols = target_symbols(self.origin, self.fields, target, notation)
        return Pair(self.name, self.source, symbols, self.origin)


def target_symbols(
    origin: Origin, fields: Mapping[str, Any], target: str, notation: Notation
) -> Symbols:
    """Return field `target` split by `notation`; a list of symbols is split already.

    A target such as "speaker,phones" has several fields. All but the last become one symbol each,
    which stands before those of the last: speaker=theo S EH V AH N.
    """
    *conditions, target = target_fields_of(target)
    before = tuple(_condition(origin, fields, name) for name in conditions)
    if target not in fields:
        raise no_target(origin, "field", target, list(fields))
    value = fields[target]
    if isinstance(value, list) and all(isinstance(symbol, str) for symbol in value):
        symbols = tuple(value)
    elif isinstance(value, str):
        symbols = notation.symbols(value)
    else:
        raise origin.error(f"{target} is {value!r}; it must be text, or a list of symbols")
    if not symbols:
        raise origin.error(f"{target} is empty; transcribe it, or leave it out")
    return before + symbols


def target_fields_of(target: str) -> list[str]:
    """Return the fields of a target, which commas separate."""
    return target.split(",")


def _condition(origin: Origin, fields: Mapping[str, Any], name: str) -> str:
    """Return the symbol of a field that stands before the target, such as speaker=theo."""
    if name not in fields:
        raise no_target(origin, "field", name, list(fields))
    value = fields[name]
    if not isinstance(value, str) or not value.split():
        raise origin.error(f"{name} is {value!r}; it must be text that is not empty")
    return f"{name}={'_'.join(value.split())}"


def no_target(origin: Origin, kind: str, target: str, others: Sequence[str]) -> DataError:
    """Return, without raising it, the error of a target that is not there; `others` are."""
    remedy = f"choose one of {', '.join(others)} with --data.target (train) or --target"
    return origin.error(
        f"there is no {kind} {target!r} for the target; {remedy if others else 'add it'}"
    )


def name_of_field(field: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that a field has: its own, or for `text` another usual one."""
    wanted = (field, *TEXT_NAMES) if field == "text" else (field,)
    there = set(names)
    return next((name for name in wanted if name in there), None)


def file_name(written: str) -> str:
    """Make one file's name of text from a data set, in which it may be any path."""
    return re.sub(r"[\\/\x00-\x1f\x7f]+", "-", written).strip("-")[:200] or "unnamed"


def existing_file(origin: Origin, written: str, folders: Sequence[Path], rule: str) -> Path:
    """Return the first file of that path in `folders`; raise a DataError that has `rule` if none.

    An absolute path is in any folder, and ~ is the user's home.
    """
    try:
        paths = [folder / Path(written).expanduser() for folder in folders]
        found = next((path for path in paths if path.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ of an unknown user, a null
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise origin.error(f"{written[:60]!r} cannot be a path ({reason}); correct it") from None
    if found is None:
        raise origin.error(f"there is no file {paths[0]}; {rule}")
    return found


def json_object(origin: Origin, line: str, example: str) -> dict[str, Any]:
    """Parse a JSON object; raise a DataError that shows `example` if it is none."""
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
        raise origin.error(f"the line is not a JSON object; write {example}")
    return fields


def seconds(origin: Origin, fields: Mapping[str, Any], key: str) -> float | None:
    """Return a number of seconds, or None if it is not there."""
    value = fields.get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise origin.error(f"{key} is {value!r}; it must be a number of seconds")
    return float(value)
