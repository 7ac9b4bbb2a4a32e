"""The log-loss of the three networks: what training lowers and evaluation reports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.architectures import NetworkConfig
from transduce.data.batches import Batch, Example
from transduce.decoding.ensemble import Ensemble
from transduce.lattice.consistency import lattice_symmetric_kl, symmetric_kl
from transduce.lattice.loss import transducer_loss


def sequence_losses(network: nn.Module, config: NetworkConfig, batch: Batch) -> Tensor:
    """-ln Pr(y|x) of each sequence in nats, [B]; of a prediction network -ln Pr(y).

    A sequence of which the network says no numbers has NaN.
    """
    if isinstance(network, Ensemble):
        return network.losses(*batch.tensors)
    if config.backwards:
        batch = batch.from_the_end()
    return _log_losses(config, batch, _outputs(network, config, batch))


def consistent_losses(
    network: nn.Module, config: NetworkConfig, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Of each sequence of a batch that holds all of them twice, one copy after the other: the mean
    of the two log-losses, and how far what the network says of the two disagrees, both [B]."""
    if config.backwards:
        batch = batch.from_the_end()
    outputs = _outputs(network, config, batch)
    losses = _log_losses(config, batch, outputs).view(2, -1).mean(0)
    if losses.device.type == "cpu" and not losses.isfinite().all():
        return losses, torch.zeros_like(losses)  # there is nothing to compare
    labels, num_labels = batch.labels, batch.num_labels
    if config.network == "transducer":
        transcription, prediction, num_frames = outputs
        apart = lattice_symmetric_kl(transcription, prediction, labels, num_frames, num_labels)
    elif config.network == "ctc":
        apart = symmetric_kl(*outputs)
    else:
        apart = symmetric_kl(outputs[0], num_labels)
    return losses, apart


def _outputs(network: nn.Module, config: NetworkConfig, batch: Batch) -> tuple[Tensor, ...]:
    """What the network says of the batch: f, g and how many vectors f has, or f and how many, or,
    of a prediction network, g without what comes after the last label, which is not asked."""
    if config.network == "transducer":
        return network(batch.frames, batch.num_frames, batch.labels)  # type: ignore[no-any-return]
    if config.network == "ctc":
        return network(batch.frames, batch.num_frames)  # type: ignore[no-any-return]
    return (network(batch.labels)[:, :-1],)


def _log_losses(config: NetworkConfig, batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
    labels, num_labels = batch.labels, batch.num_labels
    if config.network == "transducer":
        transcription, prediction, num_frames = outputs
        if transcription.device.type == "cpu":
            finite = _finite(transcription) & _finite(prediction)
            if not finite.all():  # NaN, as on a GPU, where `transducer_loss` would raise
                return torch.where(finite, 0.0, torch.nan)
        return transducer_loss(transcription, prediction, labels, num_frames, num_labels)
    if config.network == "ctc":
        transcription, num_frames = outputs
        log_prob = transcription.log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(
            log_prob, labels, num_frames, num_labels, blank=NULL, reduction="none"
        )
    # Label k is output k - 1, and so padding, which is null, is -1.
    losses = nn.functional.cross_entropy(
        outputs[0].transpose(1, 2), labels - 1, ignore_index=-1, reduction="none"
    )
    return losses.sum(1)


def _finite(vectors: Tensor) -> Tensor:
    return vectors.detach().isfinite().flatten(1).all(1)


def ctc_can_align(example: Example, pooling: int = 1) -> bool:
    """Whether there are frames enough for the labels and a blank between any two equal ones."""
    labels = example.labels
    repeats = int((labels[1:] == labels[:-1]).sum())
    return example.num_vectors(pooling) >= len(labels) + repeats
