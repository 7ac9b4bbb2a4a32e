"""One loop that trains any of the three networks, on Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from transduce.checkpoint import TrainedModel
from transduce.corpus import Corpus
from transduce.data.batches import Example
from transduce.progress import Progress
from transduce.recipe import Recipe

# The error rate of a model on the validation set; the transducer's and CTC's need a decoder.
Validate = Callable[[TrainedModel, Sequence[Example]], float]


class TrainingError(RuntimeError):
    """A run that cannot begin or go on: one sentence with what to do."""


class NonFiniteLoss(TrainingError):
    """A loss that is no number, with the names of the pairs it is of."""


def fit(
    recipe: Recipe,
    run_folder: Path,
    *,
    corpus: Corpus | None = None,  # read from recipe.data if not given
    resume: bool = False,
    validate: Validate | None = None,
    progress: Progress | None = None,
) -> TrainedModel:
    """Trains the recipe's network, and returns the best model, that of run/model.safetensors."""
    raise NotImplementedError
