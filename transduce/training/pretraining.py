"""Weights to begin with, from networks that were trained apart.

The paper's Results section proposes it: a prediction network pretrained on targets alone, then
trained with the rest. The transcription network likewise may come from CTC.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import Transducer
from transduce.model.checkpoint import Network, TrainedModel
from transduce.model.signature import Signature
from transduce.networks import PredictionNetwork, TranscriptionNetwork


class PretrainingError(ValueError):
    """Weights that do not fit where they are to go: one sentence."""


def check_direction(pretrained: TrainedModel, backwards: bool) -> None:
    """A PretrainingError unless both go the same way through a sequence."""
    if pretrained.config.backwards != backwards:
        ways = {False: "forwards", True: "backwards"}
        raise PretrainingError(
            f"it reads {ways[not backwards]}, and the network to be trained {ways[backwards]}; "
            "give one that reads in the same direction"
        )


@torch.no_grad()
def copy_prediction(pretrained: TrainedModel, network: Network, signature: Signature) -> None:
    """The pretrained prediction network's weights, symbol by symbol.

    A standalone one has no output for null; that output's weights are then left as they are.
    """
    source, target = _prediction(pretrained.network), _prediction(network)
    labels = _ids(pretrained.signature.targets, signature.targets, "label")
    _copy_lstm(source.lstm, target.lstm, labels)
    _copy_outputs(source.output, target.output, labels, source.with_null, target.with_null)


@torch.no_grad()
def copy_transcription(pretrained: TrainedModel, network: Network, signature: Signature) -> None:
    """The pretrained transcription network's weights, CTC's or a transducer's."""
    source, target = _transcription(pretrained.network), _transcription(network)
    theirs = pretrained.signature
    symbols = None
    if theirs.sources is not None and signature.sources is not None:
        symbols = _ids(theirs.sources, signature.sources, "source symbol")
    elif theirs.sources is not signature.sources or theirs.features != signature.features:
        raise PretrainingError("the pretrained network has other inputs; train one on these")
    if source.pooling != target.pooling:
        raise PretrainingError(
            f"the pretrained network has pooling {source.pooling}, not {target.pooling}"
        )
    labels = _ids(theirs.targets, signature.targets, "label")
    _copy_lstm(source.lstm, target.lstm, symbols)
    if source.upper_lstm is not None and target.upper_lstm is not None:
        _copy_lstm(source.upper_lstm, target.upper_lstm, None)
    elif source.upper_lstm is not target.upper_lstm:
        raise PretrainingError("the pretrained network has another number of layers")
    _copy_outputs(source.output, target.output, labels, True, True)


def _prediction(network: Network) -> PredictionNetwork:
    if isinstance(network, Transducer):
        return network.prediction_network
    if isinstance(network, PredictionNetwork):
        return network
    raise PretrainingError("CTC has no prediction network; give another network")


def _transcription(network: Network) -> TranscriptionNetwork:
    if isinstance(network, Transducer):
        return network.transcription_network
    if isinstance(network, TranscriptionNetwork):
        return network
    raise PretrainingError("a prediction network does not transcribe; give another network")


def _ids(theirs: Alphabet, ours: Alphabet, what: str) -> Tensor:
    """Which of their ids each of our symbols has."""
    if missing := [symbol for symbol in ours.symbols if symbol not in theirs.symbols]:
        raise PretrainingError(
            f"the pretrained network has no {what} {missing[0]!r}; train one on data that have it"
        )
    return torch.tensor(theirs.encode(ours.symbols))


def _copy_lstm(source: torch.nn.Module, target: torch.nn.Module, symbols: Tensor | None) -> None:
    """All the weights; of the inputs only those of the symbols, where these are given."""
    weights = source.state_dict()
    if symbols is not None:
        inputs, embedding = "layers.0.input_weights", "layers.0.embedding"
        if embedding in weights:  # id k is row k - 1
            weights[embedding] = weights[embedding][symbols - 1]
        else:  # or column k - 1
            weights[inputs] = weights[inputs][:, :, symbols - 1]
    wanted = {name: tensor.shape for name, tensor in target.state_dict().items()}
    if wanted != {name: tensor.shape for name, tensor in weights.items()}:
        raise PretrainingError(
            f"the pretrained LSTM is of ({source.extra_repr()}), not of ({target.extra_repr()}); "
            "make the sizes agree"
        )
    target.load_state_dict(weights)


def _copy_outputs(
    source: torch.nn.Linear,
    target: torch.nn.Linear,
    labels: Tensor,
    source_null: bool,
    target_null: bool,
) -> None:
    """Label by label; null's if both have it. Without null, label k is output k - 1."""
    theirs = labels if source_null else labels - 1
    first = 1 if target_null else 0
    target.weight[first:] = source.weight[theirs]
    target.bias[first:] = source.bias[theirs]
    if source_null and target_null:
        target.weight[NULL], target.bias[NULL] = source.weight[NULL], source.bias[NULL]
