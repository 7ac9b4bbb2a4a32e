"""Settings in frozen dataclasses: read from tables and text, written as TOML and JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


class RecipeError(ValueError):
    """Something is wrong with a recipe: one sentence with the setting and what it may be."""


def setting_names(settings: object) -> list[str]:
    """All the dotted names: train.learning_rate and the like."""
    return list(flat_settings(settings))


def flat_settings(settings: object, prefix: str = "") -> dict[str, Any]:
    """Every setting's value by its dotted name."""
    flat: dict[str, Any] = {}
    for part in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, part.name)
        if is_dataclass(value):
            flat |= flat_settings(value, f"{prefix}{part.name}.")
        else:
            flat[prefix + part.name] = value
    return flat


def settings_from(
    settings: Settings, table: Mapping[str, Any], *, folder: Path | None = None, prefix: str = ""
) -> Settings:
    """The settings with what the table names put in place, its types checked.

    Paths are taken relative to `folder`. RecipeError if the table names what there is not.
    """
    return _filled(settings, table, _Reading(folder or Path.cwd(), settings), prefix)


# --- Reading ------------------------------------------------------------------------------------


class Text(str):
    """A value given as text, from a command line, of whatever type its setting has."""


@dataclass(frozen=True)
class _Reading:
    """What reading one value needs to know of the whole."""

    folder: Path  # that paths are relative to
    root: object  # the settings whose names may be suggested

    def unknown(self, name: str) -> RecipeError:
        names = setting_names(self.root)
        last = name.rpartition(".")[2]
        # The right name in the wrong section is likelier than any misspelling.
        same = [known for known in names if known.rpartition(".")[2] == last]
        nearest = same or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        return RecipeError(f"there is no setting {name}; did you mean {nearest[0]}?")


def _filled(
    settings: Settings, table: Mapping[str, Any], reading: _Reading, prefix: str
) -> Settings:
    kinds = get_type_hints(type(settings))
    changed = {}
    for key, value in table.items():
        name = prefix + key
        if key not in kinds:
            raise reading.unknown(name)
        current = getattr(settings, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{name} is a section, with settings of its own, not {value!r}")
            changed[key] = _filled(current, value, reading, f"{name}.")
        elif isinstance(value, Mapping):
            raise reading.unknown(f"{name}.{next(iter(value), '')}")
        else:
            changed[key] = _value(kinds[key], value, name, reading.folder)
    try:
        return replace(settings, **changed)  # type: ignore[type-var]
    except ValueError as error:  # of what a value must be
        raise RecipeError(f"{prefix}{error}") from None


def _value(kind: Any, value: Any, name: str, folder: Path) -> Any:
    """The value as the setting's type has it."""
    if get_origin(kind) in (Union, UnionType):
        if value is None or value == "none":  # JSON's and a command line's; TOML leaves it out
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice or (isinstance(value, Text) and value == str(choice)):
                return choice
        raise RecipeError(f"{name} must be {_listed(get_args(kind))}, not {_shown(value)}")
    if kind is Path and isinstance(value, str):
        return folder / Path(value).expanduser()
    if isinstance(value, Text):
        value = _parsed(kind, value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        what = {int: "a whole number", float: "a number", bool: "true or false"}
        raise RecipeError(f"{name} must be {what.get(kind, 'text')}, not {_shown(value)}")
    return value


def _parsed(kind: Any, text: Text) -> Any:
    """Text as a number or a truth value, or as it is where it is none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(str(text))
    except ValueError:
        return text


def _shown(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str) else str(value)


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"


def check_at_least(settings: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


# --- Writing ------------------------------------------------------------------------------------


def toml_sections(settings: object, name: str) -> Iterator[str]:
    values = {part.name: getattr(settings, part.name) for part in fields(settings)}  # type: ignore[arg-type]
    plain = {key: value for key, value in values.items() if not is_dataclass(value)}
    if plain:
        yield f"\n[{name}]"
        yield from (f"{key} = {_toml(value)}" for key, value in plain.items() if value is not None)
    for key, value in values.items():
        if is_dataclass(value):
            yield from toml_sections(value, f"{name}.{key}".lstrip("."))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_json(settings: object) -> str:
    """The settings as JSON, which `settings_from` reads back."""
    return json.dumps(asdict(settings), default=str)  # type: ignore[call-overload]
