"""Nested frozen dataclasses of settings: read from tables and options, written as TOML and JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


# What people call a setting, and the last part of its name here, or the name of an option.
SYNONYMS = {
    "amp": "precision",
    "batch": "max_sequences",
    "batch_size": "max_sequences",
    "checkpoint": "resume",
    "continue": "resume",
    "cuda": "device",
    "data": "training",
    "dev": "validation",
    "dim": "hidden_size",
    "early_stopping": "patience",
    "ema": "averaging",
    "epochs": "max_epochs",
    "fp16": "precision",
    "gpu": "device",
    "gpus": "devices",
    "grad_clip": "clip",
    "layers": "num_layers",
    "lr": "learning_rate",
    "model": "network",
    "nodes": "machines",
    "num_epochs": "max_epochs",
    "num_gpus": "devices",
    "optim": "optimiser",
    "out": "run",
    "output": "run",
    "output_dir": "run",
    "random_seed": "seed",
    "restart": "resume",
    "save_dir": "run",
    "sr": "sample_rate",
    "train": "training",
    "units": "hidden_size",
    "valid": "validation",
    "wd": "weight_decay",
}
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, 3e38  # PyTorch's int64 and float32


class RecipeError(ValueError):
    """An error in a recipe: a sentence that names the setting and its allowed values."""


class OptionError(RecipeError):
    """The same in an option of the command line."""


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
        nearest = nearest_name(name, setting_names(self.root))
        return RecipeError(f"there is no setting {name}; did you mean {nearest}?")

    def unknown_section(self, name: str) -> RecipeError:
        """Return the error for a section that is none, with the nearest that is."""
        sections = [part.name for part in fields(self.root)]  # type: ignore[arg-type]
        [nearest] = difflib.get_close_matches(name, sections, n=1, cutoff=0.0)
        return RecipeError(f"there is no section {name}; did you mean {nearest}?")


def nearest_name(name: str, names: Sequence[str]) -> str:
    """Return the name that a wrong one most probably means.

    Prefer the same last part in another section, then a synonym, then a similar last part.
    """
    by_last_part = {known.rpartition(".")[2]: known for known in names}
    last = name.rpartition(".")[2]
    for meant in (last, SYNONYMS.get(last, "")):
        if meant in by_last_part:
            return by_last_part[meant]
    if near := difflib.get_close_matches(last, by_last_part, n=1, cutoff=0.7):
        return by_last_part[near[0]]
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def _replace(
    settings: Settings, table: Mapping[str, Any], context: _Context, prefix: str
) -> Settings:
    kinds = get_type_hints(type(settings))
    changed = {}
    for key, value in table.items():
        name = prefix + key
        if key not in kinds:
            is_section = isinstance(value, Mapping) and not prefix
            raise context.unknown_section(name) if is_section else context.unknown(name)
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
    if get_origin(kind) is tuple:
        return _convert_all(get_args(kind)[0], value, name, folder)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice or (isinstance(value, OptionText) and value == str(choice)):
                return choice
        raise RecipeError(f"{name} must be {_join(get_args(kind))}, not {_quote(value)}")
    if kind is Path and isinstance(value, str):
        if not value:
            raise RecipeError(f"{name} is empty; give a path, or none")
        return folder / Path(value).expanduser()
    if isinstance(value, OptionText):
        value = _parse(kind, value)
    if kind in (int, float) and type(value) is int and abs(value) > LARGEST_INT:
        raise RecipeError(f"{name} must be below 2^63, not a number of {len(str(value))} digits")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        what = {int: "a whole number", float: "a number", bool: "true or false"}
        raise RecipeError(f"{name} must be {what.get(kind, 'text')}, not {_quote(value)}")
    if kind is float and not abs(value) <= LARGEST_FLOAT:  # also NaN
        raise RecipeError(f"{name} must be a finite number in float32, not {value}")
    return value


def _convert_all(kind: Any, value: Any, name: str, folder: Path) -> tuple[Any, ...]:
    """Convert a list to a tuple of a setting's type; an option has commas between its items."""
    if value == "none":
        return ()
    if isinstance(value, str):
        value = [type(value)(item) for item in value.split(",")]
    if not isinstance(value, list | tuple):
        raise RecipeError(f"{name} must be a list, not {value}")
    return tuple(_convert(kind, item, name, folder) for item in value)


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


def check_at_most(settings: object, most: int, *names: str) -> None:
    """Raise a ValueError if a named setting is more than `most`; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value <= most:
            raise ValueError(f"{name} must be at most {most:,}, not {value}")


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
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_json(settings: object) -> str:
    """Return the settings as JSON; `replace_settings` reads it back."""
    return json.dumps(asdict(settings), default=str)  # type: ignore[call-overload]
