"""The file of a model: the weights of a network, its configuration and its signature.

The tensors are the weights, named `network.*`, and the statistics of the features. Weights in int8
have scales of their rows, named `scales.network.*`. The rest is JSON in the file's header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from transduce.architectures import AnyNetwork, NetworkConfig, Transducer, build_network
from transduce.audio.features import FeatureSettings
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.protocols import Scorer
from transduce.model.header import read_signature, signature_header
from transduce.model.signature import Signature
from transduce.model.tensors import (
    JOINT_NGRAM,
    CheckpointError,
    Shape,
    dequantise,
    is_joint_ngram,
    quantise,
    read_header,
    read_tensors,
    stored_shapes,
    write_tensors,
)
from transduce.settings import replace_settings

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.toml"  # in the folder of a run
Network = AnyNetwork | Ensemble


@dataclass(frozen=True)
class TrainingStatus:
    """The length of a model's training, and its results on the validation set."""

    epoch: int = 0  # complete passes over the training set
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
    """Write a model into a run's folder or to a file; an error leaves the old file in place.

    The weights are stored in `dtype`: torch.float16 takes half the space of float32, torch.int8 a
    quarter. Loading converts them to float32.
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
    outputs = signature.outputs
    statistics = signature.statistics if outputs is None else outputs.statistics
    if statistics is not None:
        tensors["statistics.mean"] = statistics.mean
        tensors["statistics.deviation"] = statistics.deviation
    header = {
        "network": asdict(model.config),
        "standing": asdict(model.status),  # the key in the files that ship
        **signature_header(signature),
    }
    write_tensors(path / MODEL_FILE if path.is_dir() else path, tensors, header, "a model")


def load_model(path: Path) -> TrainedModel:
    """Load the model of a run's folder or of a file onto the CPU, in eval mode."""
    if path.is_dir():
        begun, path = (path / CONFIG_FILE).is_file(), path / MODEL_FILE
        if begun and not path.is_file():
            raise CheckpointError(
                f"there is no file {path}, because its training was stopped before the first "
                "validation; continue it with transduce train --resume"
            )
    shapes, header = read_header(path, "a model")
    try:
        config = replace_settings(NetworkConfig(), header["network"])
        # The weights of an outline have shapes but no memory. To draw numbers for them would import
        # a second's worth of PyTorch.
        with torch.device("meta"), _SkipInitialisation():
            sizes = _input_size(header, shapes), _output_size(header, shapes)
            outline = build_network(config, *sizes)
        _check_shapes(outline, shapes)
        tensors, _ = read_tensors(path, "a model")
        signature = read_signature(header, tensors)
        network = build_network(config, signature.input_size, signature.output_size)
        status = replace_settings(TrainingStatus(), header["standing"])
        load_network_tensors(network, tensors)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(
            f"{path} is damaged (there is no {error.args[0]}); train the model again"
        ) from None
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise CheckpointError(f"{path} is damaged ({reason}); train the model again") from None
    network.eval()
    return TrainedModel(network, config, signature, status)


def load_ensemble(paths: Sequence[Path]) -> TrainedModel:
    """Load the model of one run, or the models of several runs as an ensemble.

    The files of joint n-gram models among them become the ensemble's scorers.
    """
    joints = [path for path in paths if is_joint_ngram(path)]
    runs = [path for path in paths if path not in joints]
    if not runs:
        raise CheckpointError(
            f"{joints[0]} is {JOINT_NGRAM}, which ranks the outputs of transducers; give the run "
            "of a transducer"
        )
    models = [load_model(path) for path in runs]
    if len(paths) == 1:
        return models[0]
    first, members = models[0], list[Transducer]()
    for path, model in zip(runs, models, strict=True):
        if not isinstance(model.network, Transducer):
            raise CheckpointError(
                f"{path} is of the kind {model.config.network}; an ensemble is of transducers, so "
                "leave it out"
            )
        members.append(model.network)
        _check_same_symbols(runs[0], first.signature, path, model.signature)
    scorers = [_load_scorer(path, runs[0], first.signature) for path in joints]
    # Each member has its own direction.
    config = replace(first.config, backwards=False)
    return TrainedModel(Ensemble(members, scorers=scorers), config, first.signature)


def _load_scorer(path: Path, first: Path, signature: Signature) -> Scorer:
    """Load a joint n-gram model for an ensemble whose first member has a signature."""
    from transduce.model.joint_ngram import load_joint_ngram  # it needs Numba

    joint = load_joint_ngram(path)
    _check_same_symbols(first, signature, path, joint.signature)
    return joint.ngram


def _check_same_symbols(first: Path, signature: Signature, path: Path, other: Signature) -> None:
    """Raise CheckpointError if two files of an ensemble have different inputs or outputs."""
    ours, theirs = signature.input_kind, other.input_kind
    if ours != theirs:
        raise CheckpointError(
            f"{path} reads {theirs}, and {first} reads {ours}; an ensemble is of models that read "
            "the same, so leave one out"
        )
    if differs := signature.difference(other):
        raise CheckpointError(
            f"{path} has other {differs} than {first}; give runs trained on the same data"
        )


class _SkipInitialisation(TorchFunctionMode):
    """A mode in which the functions of torch.nn.init do nothing."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return function(*args, **named)


def _input_size(header: Mapping[str, Any], shapes: Mapping[str, Shape]) -> int:
    """Return the input size of a file's network; raise ValueError if its statistics do not fit."""
    if header["sources"] is not None:
        return len(header["sources"])
    return _frame_size(header["features"], shapes)


def _output_size(header: Mapping[str, Any], shapes: Mapping[str, Shape]) -> int:
    """Return the number of labels of a file's network, or the numbers in its outputs."""
    outputs = header.get("outputs")
    if outputs is None:
        return len(header["targets"])
    return int(outputs["stacking"]) * _frame_size(outputs["features"], shapes)


def _frame_size(settings: Mapping[str, Any] | None, shapes: Mapping[str, Shape]) -> int:
    """Return the numbers in a frame; raise ValueError if the statistics do not fit."""
    mean, deviation = (shapes.get(f"statistics.{name}", (0,)) for name in ("mean", "deviation"))
    if len(mean) != 1 or mean != deviation:
        raise ValueError(
            f"statistics.mean has the shape {list(mean)} and statistics.deviation "
            f"{list(deviation)}, which must be the same, [D]"
        )
    if mean[0] and settings is not None:
        features = replace_settings(FeatureSettings(), settings)
        if features.size != mean[0]:
            raise ValueError(
                f"its header has features of {features.size} numbers, but statistics.mean has "
                f"{mean[0]}"
            )
    return mean[0]


def _check_shapes(network: nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError unless a file's tensors are the network's, in names and shapes."""
    expected = {
        key: size
        for name, weights in network_tensors(network).items()
        for key, size in stored_shapes(name, tuple(weights.shape), shapes).items()
    }
    for name, shape in expected.items():
        if name not in shapes:
            raise KeyError(f"tensor {name}")
        if shapes[name] != shape:
            raise ValueError(
                f"{name} has the shape {list(shapes[name])} where its header means {list(shape)}"
            )
    for name, shape in shapes.items():
        if name not in expected and not name.startswith("statistics."):
            raise ValueError(f"{name} {list(shape)} is no tensor of its network")


def network_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's weights by their names in a file."""
    return {f"network.{name}": weights for name, weights in network.state_dict().items()}


def load_network_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights of a file's tensors into a network."""
    prefix = "network."
    network.load_state_dict(
        {
            name.removeprefix(prefix): dequantise(name, tensors)
            for name in tensors
            if name.startswith(prefix)
        }
    )
