"""A model's file: weights, and all that is needed to use them, in safetensors. No pickles.

Tensors are the network's weights, under `network.`, and the statistics of its features; weights in
int8 have their rows' scales under `scales.network.`. The rest
is JSON in the file's header. A file is put in place whole, by renaming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.architectures import Network, NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.pairs import Notation
from transduce.decoding.ensemble import Ensemble
from transduce.files import write_by_rename
from transduce.model.signature import Signature
from transduce.networks import Transducer
from transduce.settings import replace_settings

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.toml"  # of a run
VERSION = 1  # of what the header says
SCALES = "scales."  # before the name of a tensor whose rows they are to be multiplied by


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


def save_model(model: TrainedModel, path: Path, dtype: torch.dtype | None = None) -> None:
    """Writes the model into a run's folder, or under a file's name, whole or not at all.

    The weights are written in `dtype`, such as torch.float16, which takes half the room, or
    torch.int8, a quarter: whole numbers, with a scale for every row of a matrix. A network that is
    loaded has float32 again.
    """
    if isinstance(model.network, Ensemble):
        raise ValueError("an ensemble has no file of its own; save its members")
    signature = model.signature
    tensors = network_tensors(model.network)
    if dtype is not None:
        tensors = {
            key: tensor
            for name, weights in tensors.items()
            for key, tensor in _in_type(name, weights, dtype).items()
        }
    if signature.statistics is not None:
        tensors["statistics.mean"] = signature.statistics.mean
        tensors["statistics.deviation"] = signature.statistics.deviation
    header = {
        "network": asdict(model.config),
        "standing": asdict(model.standing),
        "targets": signature.targets.symbols,
        "target_notation": asdict(signature.target_notation),
        "sources": signature.sources and signature.sources.symbols,
        "source_notation": signature.source_notation and asdict(signature.source_notation),
        "features": signature.features and asdict(signature.features),
    }
    write_tensors(path / MODEL_FILE if path.is_dir() else path, tensors, header, "a model")


def load_model(path: Path) -> TrainedModel:
    """The model of a run's folder, or of a file, on the CPU and ready to be used."""
    if path.is_dir():
        path = path / MODEL_FILE
    tensors, header = read_tensors(path, "a model")
    try:
        config = replace_settings(NetworkConfig(), header["network"])
        signature = _signature(header, tensors)
        network = build_network(config, signature.input_size, len(signature.targets))
        standing = replace_settings(Standing(), header["standing"])
        load_network_tensors(network, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise CheckpointError(f"{path} is damaged ({reason}); train the model again") from None
    network.eval()
    return TrainedModel(network, config, signature, standing)


def load_ensemble(paths: Sequence[Path]) -> TrainedModel:
    """The model of a run; of several runs, the ensemble of their models."""
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
    # Which way each member goes is the ensemble's own affair.
    ensemble = Ensemble(members, [model.config.backwards for model in models])
    return TrainedModel(ensemble, replace(first.config, backwards=False), first.signature)


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


# --- Tensors and JSON in one file ---------------------------------------------------------------


def network_tensors(network: Network) -> dict[str, Tensor]:
    return {f"network.{name}": weights for name, weights in network.state_dict().items()}


def _in_type(name: str, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is written of a tensor. In int8 that is of matrices; the rest is small, and float16."""
    if dtype == torch.int8 and name.endswith(("weight", "weights")):
        scales = (
            weights.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        )
        return {name: (weights / scales).round().to(dtype), SCALES + name: scales}
    converted = weights.to(torch.float16 if dtype == torch.int8 else dtype)
    if not converted.isfinite().all():
        raise ValueError(f"{name} has a weight that is too large for {dtype}; save it in float32")
    return {name: converted}


def load_network_tensors(network: Network, tensors: Mapping[str, Tensor]) -> None:
    prefix = "network."
    inside = {name: weights for name, weights in tensors.items() if name.startswith(prefix)}
    whole = {
        name: weights * tensors[SCALES + name] if weights.dtype == torch.int8 else weights
        for name, weights in inside.items()
    }
    network.load_state_dict({name.removeprefix(prefix): w for name, w in whole.items()})


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: str
) -> None:
    """The tensors and a header of JSON values; `kind` says of what, so that none is confused."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {"transduce": json.dumps({"kind": kind, "version": VERSION, **header})}
    write_by_rename(path, save(plain, described))


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; a CheckpointError if it is anything else."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give the folder of a run")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy or make it again") from None
    try:
        header = json.loads(metadata["transduce"])
        found = (header["kind"], header["version"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} was not written by transduce; give another file") from None
    if found[0] != kind:
        raise CheckpointError(f"{path} is {found[0]}, not {kind}; give another file")
    if found[1] != VERSION:
        raise CheckpointError(
            f"{path} has version {found[1]} where {VERSION} is wanted; read it as it was written"
        )
    return tensors, header
