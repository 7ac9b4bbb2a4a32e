"""Recipes: all settings of a run, in TOML files that name only what differs from the defaults."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transduce.architectures import NetworkConfig
from transduce.audio.augmentation import SoundAugment
from transduce.settings import (
    OptionError,
    OptionText,
    RecipeError,
    check_at_least,
    check_at_most,
    replace_settings,
    toml_sections,
)
from transduce.training.corpus import DataConfig


@dataclass(frozen=True)
class SpecAugment:
    """Random masks in time and frequency (SpecAugment, Park et al., 2019), and random stretching
    of utterances and their spectra."""

    time_masks: int = 0  # masked bands of frames in an utterance
    time_width: int = 25  # most frames in a band
    time_share: float = 0.2  # largest share of the utterance in a band
    frequency_masks: int = 0  # masked bands of coefficients, for spectrograms, not cepstra
    frequency_width: int = 8  # most coefficients in a band
    time_stretch: float = 0.0  # 0.1: an utterance becomes 0.9 to 1.1 times as long
    frequency_stretch: float = 0.0  # the same for its spectrum, from the lowest channel upwards

    @property
    def num_masks(self) -> int:
        """Return the number of masks in an utterance."""
        return self.time_masks + self.frequency_masks

    def __post_init__(self) -> None:
        counts = ("time_masks", "time_width", "frequency_masks", "frequency_width")
        check_at_least(self, 0, *counts)
        check_at_most(self, 1000, "time_masks", "frequency_masks")
        if not 0 <= self.time_share <= 1:
            raise ValueError(f"time_share must be between 0 and 1, not {self.time_share}")
        for name in ("time_stretch", "frequency_stretch"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
                )


@dataclass(frozen=True)
class TrainConfig:
    """The optimiser, the regularisation and the end of training. The defaults are the paper's."""

    optimiser: Literal["sgd", "adamw"] = "sgd"  # sgd: steepest descent
    learning_rate: float = 1e-4
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0  # of adamw
    warm_up: int = 0  # steps in which the learning rate rises linearly to its full value
    decay: Literal["none", "cosine"] = "none"  # of the learning rate, to 0 at max_epochs
    weight_noise: float = 0.075  # standard deviation of the weights' noise in each step
    # Consistency regularisation: each step sees every sequence twice, with different masks and
    # dropout, and adds the KL divergence between the two outputs times this; 0: off
    consistency: float = 0.0
    # Decay of the exponential moving average (EMA) of the weights, which is validated and saved in
    # their place; 0: no averaging
    averaging: float = 0.0
    initial_range: float = 0.1  # initial weights are uniform in [-this, this]
    max_sequences: int = 1  # in a step, over all processes; 1: online training
    max_cells: int = 1_000_000  # of padded lattice in a step, B x T x (U+1)
    max_epochs: int = 1000
    patience: int = 20  # epochs without improvement before the run stops
    validate_every: int = 1  # epochs from one validation to the next
    stop_at: Literal["log_loss", "error_rate"] = "log_loss"  # the measure to minimise in validation
    clip: float | None = None  # largest norm of the gradient; None: no clipping
    spec_augment: SpecAugment = field(default_factory=SpecAugment)  # of audio
    sound: SoundAugment = field(default_factory=SoundAugment)  # of audio, before its frames
    init_prediction: Path | None = None  # a run with the initial prediction network
    init_transcription: Path | None = None  # a run with the initial transcription network
    # Distillation: transducers (runs, files or names of models that ship) whose expectations of the
    # next label the network learns, and their share of the targets; the rest is the labels. {} in a
    # path stands for the code of each language, such as kor, that has a model of its own
    teacher: tuple[Path, ...] = ()
    distillation: float = 0.7
    # Minimum-risk training, as a last phase: minimise the expected label errors over the target and
    # so many best outputs of the initial network, init_transcription and init_prediction; 0: off
    minimum_risk: int = 0
    seed: int = 0  # of initial weights, batches, noise, dropout, masks and changes of sound
    save_every: int | None = None  # steps between saved states; None: after each epoch
    # tf32: matrix products in TF32 on a GPU, also the LSTMs'; bf16-mixed: the output layers in
    # bfloat16, and the LSTMs' products on a GPU
    precision: Literal["32-true", "tf32", "bf16-mixed"] = "32-true"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Processes on each machine, which share a step's sequences, and machines; None: those that
    # torchrun or srun started, otherwise 1
    devices: int | None = None
    machines: int | None = None

    def __post_init__(self) -> None:
        counts = ("max_sequences", "max_cells", "max_epochs", "patience", "validate_every")
        check_at_least(self, 1, *counts, "save_every", "devices", "machines")
        amounts = ("momentum", "weight_decay", "warm_up", "weight_noise", "consistency")
        check_at_least(self, 0, *amounts, "minimum_risk")
        check_at_most(self, 1000, "minimum_risk", "devices", "machines")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must be at least 0 and below 1, not {self.averaging}")
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation must be between 0 and 1, not {self.distillation}")
        if not 0 < self.initial_range < math.inf:
            raise ValueError(f"initial_range must be positive, not {self.initial_range}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, not {self.clip}")


@dataclass(frozen=True)
class Recipe:
    """All settings of a run, which determine its weights on the same code and machine."""

    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the recipes that ship, by name."""
    package = Path(__file__).parent.parent
    # A wheel has them in the package, a checkout beside it.
    folder = next(f for f in (package / "recipes", package.parent / "recipes") if f.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def recipe_file(recipe: Path) -> Path:
    """Return the file of a recipe, which is a path or the name of a recipe that ships."""
    if recipe.suffix == ".toml" or recipe.is_file():
        return recipe
    shipped = shipped_recipes()
    if str(recipe) not in shipped:
        near = difflib.get_close_matches(str(recipe), shipped, n=1)
        raise RecipeError(
            f"there is no recipe {str(recipe)!r}{f' (did you mean {near[0]}?)' if near else ''}; "
            "give a .toml file, or a name that `transduce recipes` lists"
        )
    return shipped[str(recipe)]


def read_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe from a TOML file, with `overrides` such as {"train.learning_rate": "1e-3"}.

    Paths in the file are relative to its folder, paths in overrides to the working folder.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML ({error}); correct it") from None
    except RecursionError:
        raise RecipeError(f"{path} nests lists or tables too deeply; correct it") from None
    try:
        recipe = replace_settings(Recipe(), table, folder=path.absolute().parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    try:
        # All at once, because some settings are only valid together.
        return replace_settings(recipe, _nested(overrides or {}), folder=Path.cwd())
    except RecipeError as error:
        raise OptionError(str(error)) from None


def _nested(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return {"train.seed": "1"} as {"train": {"seed": "1"}}."""
    table: dict[str, Any] = {}
    for name, text in overrides.items():
        *sections, last = name.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
            if isinstance(inner, str):
                raise RecipeError(f"{section} is a setting and a section of {name}; correct one")
        inner[last] = OptionText(text)
    return table


def recipe_toml(recipe: Recipe) -> str:
    """Write a recipe as TOML with all settings that are not None."""
    return "\n".join(toml_sections(recipe, "")).lstrip("\n") + "\n"
