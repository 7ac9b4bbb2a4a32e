"""Copy initial weights from pretrained networks.

The paper's Results section proposes to pretrain the prediction network on targets alone. The
transcription network may come from CTC in the same way.
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
    """The error of weights that do not fit the network: one sentence."""


def check_direction(pretrained: TrainedModel, backwards: bool) -> None:
    """Raise PretrainingError unless both networks read in the same direction."""
    if pretrained.config.backwards != backwards:
        ways = {False: "forwards", True: "backwards"}
        raise PretrainingError(
            f"it reads {ways[not backwards]}, and the network to be trained {ways[backwards]}; "
            "give one that reads in the same direction"
        )


@torch.no_grad()
def copy_prediction(pretrained: TrainedModel, network: Network, signature: Signature) -> None:
    """Copy the weights of the pretrained prediction network, symbol by symbol.

    A next-label predictor has no output for null; the network keeps its own weights there.
    """
    source, target = _prediction(pretrained.network), _prediction(network)
    labels = _ids(pretrained.signature.targets, signature.targets, "label")
    _copy_lstm(source.lstm, target.lstm, labels)
    _copy_outputs(source.output, target.output, labels, source.with_null, target.with_null)


@torch.no_grad()
def copy_transcription(pretrained: TrainedModel, network: Network, signature: Signature) -> None:
    """Copy the weights of the pretrained transcription network, of CTC or a transducer."""
    source, target = _transcription(pretrained.network), _transcription(network)
    theirs = pretrained.signature
    symbols = None
    if theirs.sources is not None and signature.sources is not None:
        symbols = _ids(theirs.sources, signature.sources, "source symbol")
    elif theirs.sources is not signature.sources or theirs.features != signature.features:
        raise PretrainingError("the pretrained network has other inputs; give one with the same")
    for name in ("pooling", "lookahead"):
        if (there := getattr(source, name)) != (here := getattr(target, name)):
            raise PretrainingError(
                f"the pretrained network has {name} {there}, not {here}; make them equal"
            )
    labels = _ids(theirs.targets, signature.targets, "label")
    _copy_lstm(source.lstm, target.lstm, symbols)
    if source.upper_lstm is not None and target.upper_lstm is not None:
        _copy_lstm(source.upper_lstm, target.upper_lstm, None)
    elif source.upper_lstm is not target.upper_lstm:
        raise PretrainingError(
            "the pretrained network has another number of layers; make network.num_layers equal"
        )
    _copy_outputs(source.output, target.output, labels, True, True)


def _prediction(network: Network) -> PredictionNetwork:
    """Return the prediction network of a network; raise PretrainingError if it has none."""
    _check_has_labels(network)
    if isinstance(network, Transducer):
        return network.prediction_network
    if isinstance(network, PredictionNetwork):
        return network
    raise PretrainingError("CTC has no prediction network; give a run that has one")


def _transcription(network: Network) -> TranscriptionNetwork:
    """Return the transcription network of a network; raise PretrainingError if it has none."""
    _check_has_labels(network)
    if isinstance(network, Transducer):
        return network.transcription_network
    if isinstance(network, TranscriptionNetwork):
        return network
    raise PretrainingError("a prediction network does not transcribe; give CTC or a transducer")


def _check_has_labels(network: Network) -> None:
    if not network.has_labels:
        raise PretrainingError(
            "a continuous transducer has outputs of its own, which fit no other network; give a "
            "run of another kind"
        )


def _ids(theirs: Alphabet, ours: Alphabet, what: str) -> Tensor:
    """Return the ids of our symbols in their alphabet, [K]."""
    if missing := [symbol for symbol in ours.symbols if symbol not in theirs.symbols]:
        raise PretrainingError(
            f"the pretrained network has no {what} {missing[0]!r}; train it on data that have it"
        )
    return torch.tensor(theirs.encode(ours.symbols))


def _copy_lstm(source: torch.nn.Module, target: torch.nn.Module, symbols: Tensor | None) -> None:
    """Copy all weights; of a layer that reads symbols, those of the given symbols."""
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
    """Copy the output weights of each label, and of null if both networks have it.

    Without null, label k is output k - 1.
    """
    theirs = labels if source_null else labels - 1
    first = 1 if target_null else 0
    target.weight[first:] = source.weight[theirs]
    target.bias[first:] = source.bias[theirs]
    if source_null and target_null:
        target.weight[NULL], target.bias[NULL] = source.weight[NULL], source.bias[NULL]
