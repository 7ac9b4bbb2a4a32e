"""The log-loss of the three networks: what training lowers and evaluation reports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.data.batches import Batch, Example
from transduce.ensembles import Ensemble
from transduce.lattice.loss import transducer_loss
from transduce.recipe import NetworkConfig


def sequence_losses(network: nn.Module, config: NetworkConfig, batch: Batch) -> Tensor:
    """-ln Pr(y|x) of each sequence in nats, [B]; of a prediction network -ln Pr(y).

    A sequence of which the network says no numbers has NaN.
    """
    labels, num_labels = batch.labels, batch.num_labels
    if isinstance(network, Ensemble):
        return network.losses(batch.frames, batch.num_frames, labels, num_labels)
    if config.network == "transducer":
        transcription, prediction, num_frames = network(batch.frames, batch.num_frames, labels)
        if transcription.device.type == "cpu":
            finite = _finite(transcription) & _finite(prediction)
            if not finite.all():  # NaN, as on a GPU, where `transducer_loss` would raise
                return torch.where(finite, 0.0, torch.nan)
        return transducer_loss(transcription, prediction, labels, num_frames, num_labels)
    if config.network == "ctc":
        transcription, num_frames = network(batch.frames, batch.num_frames)
        log_prob = transcription.log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(
            log_prob, labels, num_frames, num_labels, blank=NULL, reduction="none"
        )
    prediction = network(labels)[:, :-1]  # what comes after the last label is not asked
    # Label k is output k - 1, and so padding, which is null, is -1.
    losses = nn.functional.cross_entropy(
        prediction.transpose(1, 2), labels - 1, ignore_index=-1, reduction="none"
    )
    return losses.sum(1)


def _finite(vectors: Tensor) -> Tensor:
    return vectors.detach().isfinite().flatten(1).all(1)


def ctc_can_align(example: Example, pooling: int = 1) -> bool:
    """Whether there are frames enough for the labels and a blank between any two equal ones."""
    labels = example.labels
    repeats = int((labels[1:] == labels[:-1]).sum())
    return -(-example.num_frames // pooling) >= len(labels) + repeats
