"""A model's file: weights, and all that is needed to use them, in safetensors. No pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transduce.corpus import Signature
from transduce.networks import PredictionNetwork, TranscriptionNetwork, Transducer
from transduce.recipe import NetworkConfig

MODEL_FILE = "model.safetensors"
Network = Transducer | TranscriptionNetwork | PredictionNetwork


class CheckpointError(ValueError):
    """Something is wrong with a model's file: one sentence with the file and what to do."""


@dataclass(frozen=True)
class Standing:
    """How far the training of some weights had come, and how good they were."""

    epoch: int = 0  # complete passes through the training set
    step: int = 0
    bits_per_label: float | None = None  # on the validation set
    error_rate: float | None = None  # likewise


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A network, what its inputs and outputs stand for, and where it came from."""

    network: Network
    config: NetworkConfig
    signature: Signature
    standing: Standing = field(default_factory=Standing)


def build_network(config: NetworkConfig, input_size: int, num_labels: int) -> Network:
    """The network that a recipe asks for, its weights uniform in [-0.1, 0.1]."""
    raise NotImplementedError


def save_model(model: TrainedModel, path: Path) -> None:
    """Writes `model.safetensors`, or the file named, whole or not at all."""
    raise NotImplementedError


def load_model(path: Path) -> TrainedModel:
    """The model of a run's folder, or of a file, on the CPU and ready to be used."""
    raise NotImplementedError
