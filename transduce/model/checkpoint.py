"""A model's file: the network's weights, and everything that is needed to use them.

Tensors are the weights, under `network.`, and the statistics of the features; weights in int8 have
the scales of their rows under `scales.network.`. The rest is JSON in the file's header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.alphabet import Alphabet
from transduce.architectures import (
    CTC,
    NetworkConfig,
    NextLabelPredictor,
    Transducer,
    build_network,
)
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.pairs import Notation
from transduce.decoding.ensemble import Ensemble
from transduce.model.signature import Signature
from transduce.model.tensors import (
    CheckpointError,
    dequantise,
    quantise,
    read_tensors,
    write_tensors,
)
from transduce.settings import replace_settings

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.toml"  # in the folder of a run
Network = Transducer | CTC | NextLabelPredictor | Ensemble


@dataclass(frozen=True)
class TrainingStatus:
    """How far the training of a model had come, and how good it was then."""

    epoch: int = 0  # complete passes through the training set
    step: int = 0
    bits_per_label: float | None = None  # on the validation set
    error_rate: float | None = None  # on the validation set


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A network, the meaning of its inputs and outputs, and the status of its training."""

    network: Network
    config: NetworkConfig
    signature: Signature
    status: TrainingStatus = field(default_factory=TrainingStatus)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device


def save_model(model: TrainedModel, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model into a run's folder, or under a file's name, whole or not at all.

    The weights are written in `dtype`: torch.float16 takes half the room, torch.int8 a quarter. A
    network that is loaded has float32 again.
    """
    if isinstance(model.network, Ensemble):
        raise ValueError("an ensemble has no file of its own; save its members")
    signature = model.signature
    tensors = network_tensors(model.network)
    if dtype is not None:
        tensors = {
            key: tensor
            for name, weights in tensors.items()
            for key, tensor in quantise(name, weights, dtype).items()
        }
    if signature.statistics is not None:
        tensors["statistics.mean"] = signature.statistics.mean
        tensors["statistics.deviation"] = signature.statistics.deviation
    header = {
        "network": asdict(model.config),
        "standing": asdict(model.status),
        "targets": signature.targets.symbols,
        "target_notation": asdict(signature.target_notation),
        "sources": signature.sources and signature.sources.symbols,
        "source_notation": signature.source_notation and asdict(signature.source_notation),
        "features": signature.features and asdict(signature.features),
    }
    write_tensors(path / MODEL_FILE if path.is_dir() else path, tensors, header, "a model")


def load_model(path: Path) -> TrainedModel:
    """Load the model of a run's folder, or of a file, onto the CPU, in eval mode."""
    if path.is_dir():
        path = path / MODEL_FILE
    tensors, header = read_tensors(path, "a model")
    try:
        config = replace_settings(NetworkConfig(), header["network"])
        signature = _signature(header, tensors)
        network = build_network(config, signature.input_size, len(signature.targets))
        status = replace_settings(TrainingStatus(), header["standing"])
        load_network_tensors(network, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise CheckpointError(f"{path} is damaged ({reason}); train the model again") from None
    network.eval()
    return TrainedModel(network, config, signature, status)


def load_ensemble(paths: Sequence[Path]) -> TrainedModel:
    """Load the model of one run, or the models of several runs as an ensemble."""
    models = [load_model(path) for path in paths]
    if len(models) == 1:
        return models[0]
    first, members = models[0], list[Transducer]()
    for path, model in zip(paths, models, strict=True):
        if not isinstance(model.network, Transducer):
            raise CheckpointError(
                f"{path} is of the kind {model.config.network}; an ensemble is of transducers"
            )
        members.append(model.network)
        if differs := first.signature.difference(model.signature):
            raise CheckpointError(
                f"{path} has other {differs} than {paths[0]}; give runs trained on the same data"
            )
    # The members know their own direction.
    config = replace(first.config, backwards=False)
    return TrainedModel(Ensemble(members), config, first.signature)


def _signature(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Signature:
    optional: dict[str, Any] = {}
    if header["sources"] is not None:
        optional["sources"] = Alphabet(header["sources"])
    if header["source_notation"] is not None:
        optional["source_notation"] = Notation(**header["source_notation"])
    if header["features"] is not None:
        optional["features"] = replace_settings(FeatureSettings(), header["features"])
    if "statistics.mean" in tensors:
        optional["statistics"] = Statistics(
            tensors["statistics.mean"], tensors["statistics.deviation"]
        )
    return Signature(Alphabet(header["targets"]), Notation(**header["target_notation"]), **optional)


def network_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's weights under the names that they have in a file."""
    return {f"network.{name}": weights for name, weights in network.state_dict().items()}


def load_network_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put weights that were read from a file into a network."""
    prefix = "network."
    network.load_state_dict(
        {
            name.removeprefix(prefix): dequantise(name, tensors)
            for name in tensors
            if name.startswith(prefix)
        }
    )
