"""What a teacher is: a transducer, or a joint n-gram model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transduce.architectures import Transducer
from transduce.data.batches import Batch
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.signature import Signature

if TYPE_CHECKING:  # it needs Numba
    from transduce.graphones.model import JointNGram


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained transducer, and its ids for the symbols of the network that learns from it."""

    network: Transducer
    ours: Signature
    theirs: Signature
    labels: Tensor  # [K+1], from our ids to its
    sources: Tensor | None  # the same for source symbols

    @property
    def backwards(self) -> bool:
        """Return whether it reads from the end."""
        return self.network.backwards

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Return what the teacher expects after each prefix of the labels, [B, U+1, K+1].

        The prefixes of a teacher that reads backwards begin at the end.
        """
        batch = self._translated(batch)
        if self.backwards:
            batch = batch.reversed()
        f, g, num_vectors = self.network(batch.frames, batch.num_frames, batch.labels)
        found = next_label_log_probs(f, g, batch.labels, num_vectors, batch.num_labels)
        return found[..., self.labels.to(found.device)]

    @torch.no_grad()
    def log_likelihoods(
        self, batch: Batch, rows: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Return ln Pr(y|x), [R], of labels [R, U], each for the input rows[r] of the batch."""
        labels = self.labels.to(labels.device)[labels]
        return -self.network.candidate_losses(self._translated(batch), rows, labels, num_labels)

    @torch.no_grad()
    def outputs(self, batch: Batch, number: int) -> list[list[Labels]]:
        """Return the `number` best outputs of a beam of that width for each input, in our labels.

        With 1 it is the greedy search.
        """
        ours = self.labels.argsort().tolist()
        options = SearchOptions(number, number, length_normalised=False, with_timings=False)
        found = self.network.search(self._translated(batch), options)
        return [[tuple(ours[label] for label in one.labels) for one in best] for best in found]

    def _translated(self, batch: Batch) -> Batch:
        """Return a batch of ours in the teacher's ids and with its normalisation."""
        labels = self.labels.to(batch.labels.device)[batch.labels]
        return replace(batch, frames=self._frames(batch.frames), labels=labels, targets=None)

    def _frames(self, frames: Tensor) -> Tensor:
        """Return our input as the teacher's: its ids, or frames with its normalisation."""
        if self.sources is not None:
            return self.sources.to(frames.device)[frames]
        ours, theirs = self.ours.statistics, self.theirs.statistics
        assert ours is not None and theirs is not None
        if torch.equal(ours.mean, theirs.mean) and torch.equal(ours.deviation, theirs.deviation):
            return frames
        as_read = frames * ours.deviation.to(frames.device) + ours.mean.to(frames.device)
        return theirs.normalise(as_read)


@dataclass(frozen=True, eq=False)
class JointNGramTeacher:
    """A joint n-gram model, and its ids for the symbols of the network that learns from it."""

    ngram: JointNGram
    labels: Tensor  # [K+1], from our ids to its
    sources: Tensor  # the same for source symbols

    def log_likelihoods(
        self, batch: Batch, rows: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Return ln Pr(x, y), [R], of labels [R, U], each for the input rows[r] of the batch."""
        frames, labels = self.sources[batch.frames.cpu()], self.labels[labels.cpu()]
        found = self.ngram.log_joints(frames, batch.num_frames, rows, labels, num_labels)
        return found.to(batch.frames.device)
