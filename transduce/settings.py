"""Nested frozen dataclasses of settings: read from tables and options, written as TOML and JSON."""

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
    """An error in a recipe: a sentence that names the setting and its allowed values."""


def setting_names(settings: object) -> list[str]:
    """Return the dotted names of all settings, such as train.learning_rate."""
    return list(flat_settings(settings))


def flat_settings(settings: object, prefix: str = "") -> dict[str, Any]:
    """Return all settings as one dictionary from dotted names to values."""
    flat: dict[str, Any] = {}
    for part in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, part.name)
        if is_dataclass(value):
            flat |= flat_settings(value, f"{prefix}{part.name}.")
        else:
            flat[prefix + part.name] = value
    return flat


def replace_settings(
    settings: Settings, table: Mapping[str, Any], *, folder: Path | None = None, prefix: str = ""
) -> Settings:
    """Return a copy of the settings with the values of `table`; check their types.

    Take paths relative to `folder`. Raise a RecipeError for a name that is no setting.
    """
    return _replace(settings, table, _Context(folder or Path.cwd(), settings), prefix)


# --- Reading ------------------------------------------------------------------------------------


class OptionText(str):
    """A value from the command line, still to be parsed as its setting's type."""


@dataclass(frozen=True)
class _Context:
    """The constants of one call of `replace_settings`."""

    folder: Path  # paths are relative to it
    root: object  # the outermost settings; their names serve as suggestions

    def unknown(self, name: str) -> RecipeError:
        """Return the error for a name that is no setting, with the nearest name that is."""
        names = setting_names(self.root)
        last = name.rpartition(".")[2]
        # Prefer the same name in another section to a similar name.
        same = [known for known in names if known.rpartition(".")[2] == last]
        nearest = same or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        return RecipeError(f"there is no setting {name}; did you mean {nearest[0]}?")


def _replace(
    settings: Settings, table: Mapping[str, Any], context: _Context, prefix: str
) -> Settings:
    kinds = get_type_hints(type(settings))
    changed = {}
    for key, value in table.items():
        name = prefix + key
        if key not in kinds:
            raise context.unknown(name)
        current = getattr(settings, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{name} is a section with settings of its own, not {value!r}")
            changed[key] = _replace(current, value, context, f"{name}.")
        elif isinstance(value, Mapping):
            raise context.unknown(f"{name}.{next(iter(value), '')}")
        else:
            changed[key] = _convert(kinds[key], value, name, context.folder)
    try:
        return replace(settings, **changed)  # type: ignore[type-var]
    except ValueError as error:  # from the dataclass's __post_init__
        raise RecipeError(f"{prefix}{error}") from None


def _convert(kind: Any, value: Any, name: str, folder: Path) -> Any:
    """Convert a value to the setting's type; raise a RecipeError if it has another."""
    if get_origin(kind) in (Union, UnionType):
        if value is None or value == "none":  # JSON and options write none so; TOML omits the key
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice or (isinstance(value, OptionText) and value == str(choice)):
                return choice
        raise RecipeError(f"{name} must be {_join(get_args(kind))}, not {_quote(value)}")
    if kind is Path and isinstance(value, str):
        return folder / Path(value).expanduser()
    if isinstance(value, OptionText):
        value = _parse(kind, value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        what = {int: "a whole number", float: "a number", bool: "true or false"}
        raise RecipeError(f"{name} must be {what.get(kind, 'text')}, not {_quote(value)}")
    return value


def _parse(kind: Any, text: OptionText) -> Any:
    """Parse text as `kind`, a number or a truth value; return the text if it is neither."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(str(text))
    except ValueError:
        return text


def _quote(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str) else str(value)


def _join(choices: tuple[Any, ...]) -> str:
    return ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Raise a ValueError if a named setting is less than `least`; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


# --- Writing ------------------------------------------------------------------------------------


def toml_sections(settings: object, name: str) -> Iterator[str]:
    """Yield the lines of the settings as TOML: section `name`, then its subsections."""
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
    """Return the settings as JSON; `replace_settings` reads it back."""
    return json.dumps(asdict(settings), default=str)  # type: ignore[call-overload]
