"""What a teacher is: a transducer, a joint n-gram model, or a set of either for many languages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import Transducer
from transduce.data.batches import Batch, Example
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.signature import Signature
from transduce.training.checks import TrainingError

if TYPE_CHECKING:  # it needs Numba
    from transduce.graphones.model import JointNGram

END_OF_PREFIX = ":"  # of an input's language, as in kor:
# ln of the probability of labels that a model lacks: finite, so that other models can rank them.
LEAST_LOG_LIKELIHOOD = -1000.0


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
        ours = {label: k for k, label in enumerate(self.labels.tolist())}
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


SingleTeacher = Teacher | JointNGramTeacher


@dataclass(frozen=True, eq=False)
class LanguageTeachers:
    """A teacher of all languages: for each language a model of that language alone.

    Each input begins with its language, as in `kor:`, and its model reads what follows. All inputs
    of a batch have the same language. A model's ids of the labels and source symbols that it lacks
    are null.
    """

    path: Path  # with {} in place of a language's code
    sources: Alphabet  # ours
    models: Mapping[Labels, SingleTeacher]  # by our ids of the prefix

    def log_likelihoods(
        self, batch: Batch, rows: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Return what the model of the batch's language returns, [R]: ln Pr(y|x), or ln Pr(x, y).

        Labels that the model lacks have LEAST_LOG_LIKELIHOOD.
        """
        model, alone = self._of_language(batch)
        found = torch.full_like(num_labels, LEAST_LOG_LIKELIHOOD, dtype=torch.float64)
        is_lacking = model.labels.to(labels.device) == NULL
        is_lacking[NULL] = False  # padding
        known = (~is_lacking[labels].any(1)).nonzero()[:, 0]
        if len(known):
            lengths = num_labels[known]
            candidates = labels[known, : int(lengths.max())]
            asked = model.log_likelihoods(alone, rows[known], candidates, lengths)
            found[known] = asked.double()
        return found

    def outputs(self, batch: Batch, number: int) -> list[list[Labels]]:
        """Return the `number` best outputs that the model of the batch's language finds."""
        model, alone = self._of_language(batch)
        assert isinstance(model, Teacher)
        return model.outputs(alone, number)

    def group_by_language(self, examples: Sequence[Example]) -> list[list[int]]:
        """Return the indices of the examples of each language.

        Raise TrainingError if no model reads an input.
        """
        known = {
            prefix: {ours for ours, theirs in enumerate(model.sources.tolist()) if theirs != NULL}
            for prefix, model in self.models.items()
            if model.sources is not None
        }
        groups = defaultdict(list)
        for i, example in enumerate(examples):
            ids = example.frames.tolist()
            prefix = self._prefix(ids)
            if prefix not in known or len(prefix) == len(ids):
                raise TrainingError(
                    f"train.teacher, {self.path}: there is no model for the language with which "
                    f"the input {example.pair.name!r} begins; train one, or leave the input out"
                )
            for letter in ids[len(prefix) :]:
                if letter not in known[prefix]:
                    raise TrainingError(
                        f"train.teacher, {self.path}: the model for the language of the input "
                        f"{example.pair.name!r} does not know its letter "
                        f"{self.sources.symbols[letter - 1]!r}; train it on data that have the "
                        "letter, or leave the input out"
                    )
            groups[prefix].append(i)
        return list(groups.values())

    def _prefix(self, ids: list[int]) -> Labels:
        """Return the language with which an input of ours begins, such as `kor:`, or nothing."""
        (end,) = self.sources.encode(END_OF_PREFIX)
        return tuple(ids[: ids.index(end) + 1]) if end in ids else ()

    def _of_language(self, batch: Batch) -> tuple[SingleTeacher, Batch]:
        """Return the model of a batch's language, and the batch without the prefix."""
        prefix = self._prefix(batch.frames[0].tolist())
        size = len(prefix)
        alone = replace(batch, frames=batch.frames[:, size:], num_frames=batch.num_frames - size)
        return self.models[prefix], alone
