"""Several networks as one: an ensemble of transducers is itself a transducer.

The product of the members' distributions at every node of the output lattice, each to the power of
one over their number, normalised again, has the means of their f and of their g as its own f and g
(docs/derivations.md, section 6). So an ensemble goes wherever a network goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from transduce.networks import PredictionNetwork, TranscriptionNetwork, Transducer

Network = TypeVar("Network", bound=nn.Module)


def ensemble(members: Sequence[Network]) -> Network:
    """The log-linear average of transducers, of CTC networks, or of prediction networks."""
    for kind, average in (
        (Transducer, Ensemble),
        (TranscriptionNetwork, MeanTranscription),
        (PredictionNetwork, mean_prediction),
    ):
        if all(isinstance(member, kind) for member in members):
            return cast(Network, cast(Any, average)(members))
    raise ValueError("the members of an ensemble must be networks of one kind")


class Ensemble(Transducer):
    """The transducer whose f and g are the means of its members'.

    It is made to be used, not trained: it shares its members' transcription networks, and puts
    them in evaluation mode, but has a copy of the weights of their prediction networks. Members may
    differ in size and in the depth of their transcription networks.
    """

    def __init__(self, members: Sequence[Transducer]) -> None:
        nn.Module.__init__(self)
        self.transcription_network = MeanTranscription([m.transcription_network for m in members])
        self.prediction_network = mean_prediction([m.prediction_network for m in members])
        self.eval()


class MeanTranscription(TranscriptionNetwork):
    """The mean of its members' f; of CTC networks, the average of their distributions."""

    def __init__(self, members: Sequence[TranscriptionNetwork]) -> None:
        nn.Module.__init__(self)
        if any(isinstance(member, MeanTranscription) for member in members):
            raise ValueError("a member is itself an ensemble; give all the members at once")
        self.pooling = _same("pooling", [member.pooling for member in members])
        _same("input_size", [member.lstm.input_size for member in members])
        _same("num_labels", [member.output.out_features - 1 for member in members])
        self.members = nn.ModuleList(members)
        self.eval()

    def forward(self, frames: Tensor, num_frames: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """f [B, T, K+1] and each utterance's own number of vectors, [B]."""
        outputs = [member(frames, num_frames) for member in self._networks()]
        return torch.stack([f for f, _ in outputs]).mean(0), outputs[0][1]

    def each_alone(self, frames: Tensor, num_frames: Tensor) -> list[Tensor]:
        """f [T, K+1] of each utterance, to the last bit what it is with no other beside it."""
        outputs = [member.each_alone(frames, num_frames) for member in self._networks()]
        return [torch.stack(fs).mean(0) for fs in zip(*outputs, strict=True)]

    def _networks(self) -> Iterable[TranscriptionNetwork]:
        return cast(Iterable[TranscriptionNetwork], self.members)


@torch.no_grad()
def mean_prediction(members: Sequence[PredictionNetwork]) -> PredictionNetwork:
    """One network whose g is the mean of its members'.

    Its hidden units are all of theirs, side by side, and none sees another member's: the matrices
    between hidden units are block-diagonal.
    """
    num_labels = _same("num_labels", [member.num_labels for member in members])
    num_layers = _same("prediction_layers", [member.lstm.num_layers for member in members])
    with_null = _same("with_null", [member.with_null for member in members])
    hidden_size = sum(member.lstm.hidden_size for member in members)
    backend = members[0].lstm.backend
    mean = PredictionNetwork(
        num_labels, hidden_size, num_layers, with_null=bool(with_null), backend=backend
    )
    mean.to(members[0].output.weight).eval().requires_grad_(False)
    mean.blocks = tuple(block for member in members for block in member.blocks)
    layers = (cast(Iterable[Any], network.lstm.layers) for network in (mean, *members))
    for i, (layer, *parts) in enumerate(zip(*layers, strict=True)):
        inputs = [_gates(part.input_weights) for part in parts]
        hidden = [_gates(part.hidden_weights) for part in parts]
        biases = [_gates(part.biases) for part in parts]
        # All members read the same labels; above the first layer each reads its own.
        _gates(layer.input_weights).copy_(torch.cat(inputs, 1) if i == 0 else _blocks(inputs))
        _gates(layer.hidden_weights).copy_(_blocks(hidden))
        _gates(layer.biases).copy_(torch.cat(biases, 1))
        layer.peepholes.copy_(torch.cat([part.peepholes for part in parts], 2))
    weights = [member.output.weight for member in members]
    mean.output.weight.copy_(torch.cat(weights, 1) / len(members))
    mean.output.bias.copy_(torch.stack([member.output.bias for member in members]).mean(0))
    return mean


def _gates(weights: Tensor) -> Tensor:
    """One direction's weights [1, 4 H, ...] gate by gate, a view [4, H, ...]."""
    return weights[0].view(4, -1, *weights.shape[2:])


def _blocks(matrices: Sequence[Tensor]) -> Tensor:
    """Each gate's matrices [4, H_m, I_m] on the diagonal of one, [4, Σ H_m, Σ I_m]."""
    gates = zip(*matrices, strict=True)
    return torch.stack([torch.block_diag(*gate) for gate in gates])  # type: ignore[no-untyped-call]


def _same(name: str, values: Sequence[int]) -> int:
    """The value that all members have."""
    if not values:
        raise ValueError("an ensemble needs a member; give at least one")
    for m, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"the members of an ensemble must have the same {name}, but that of the first is "
                f"{values[0]} and that of member {m + 1} is {value}"
            )
    return values[0]
