"""Teachers: trained transducers whose expectations of the next label another network learns.

What a teacher expects after each prefix of a target does not depend on frames. So it is computed
once, on the input without augmentation, and serves in every epoch and for every architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from transduce.alphabet import Alphabet
from transduce.architectures import Transducer
from transduce.data.batches import Batch, Batches, Example
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.checkpoint import load_model
from transduce.model.model import FOLDER, model_names
from transduce.model.signature import Signature
from transduce.model.tensors import CheckpointError
from transduce.sequences import reverse_padded
from transduce.training.checks import TrainingError

CELLS = {"cpu": 200_000, "cuda": 5_000_000}  # of padded lattice at once; each takes 100 bytes


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained transducer, and its ids for the symbols of the network that learns from it."""

    network: Transducer
    ours: Signature
    theirs: Signature
    labels: Tensor  # [K+1], from our ids to its
    sources: Tensor | None  # the same for source symbols

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Return what the teacher expects after each prefix of the labels, [B, U+1, K+1]."""
        device, network = batch.labels.device, self.network
        batch = replace(
            batch, frames=self._frames(batch.frames), labels=self.labels.to(device)[batch.labels]
        )
        if network.backwards:
            batch = batch.reversed()
        f, g, num_vectors = network(batch.frames, batch.num_frames, batch.labels)
        found = next_label_log_probs(f, g, batch.labels, num_vectors, batch.num_labels)
        return found[..., self.labels.to(device)]

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


def load_teachers(paths: Sequence[Path], signature: Signature, backwards: bool) -> list[Teacher]:
    """Load the teachers of a network with a signature; raise TrainingError if one does not fit."""
    return [_load_teacher(path, signature, backwards) for path in paths]


def teacher_targets(
    teachers: Sequence[Teacher],
    examples: Sequence[Example],
    share: float,
    device: torch.device,
) -> list[Tensor]:
    """Return the targets of each example: a float16 distribution for each prefix, [U+1, K+1].

    They are the label that follows, and with the weight `share` the normalised geometric mean of
    what the teachers expect. Null is the end. A teacher that reads backwards begins at the end.
    """
    networks = nn.ModuleList(teacher.network for teacher in teachers).to(device)
    sizes = [example.num_frames * (example.num_labels + 1) for example in examples]
    batches = Batches(examples, max(CELLS[device.type], *sizes), seed=0)
    targets: list[Tensor] = [torch.empty(0)] * len(examples)
    for ids in batches.by_length():
        batch = next(batches.load([ids])).to(device)
        expected = torch.stack([teacher.log_probs(batch) for teacher in teachers])
        mean = expected.mean(0).softmax(-1)
        labels = batch.labels
        if teachers[0].network.backwards:
            labels = reverse_padded(labels, batch.num_labels)
        following = nn.functional.pad(labels, (0, 1))  # padding is null
        certain = nn.functional.one_hot(following, mean.shape[2])
        mixed = (share * mean + (1 - share) * certain).half().cpu()
        for i, target in zip(ids, mixed, strict=True):
            targets[i] = target[: examples[i].num_labels + 1].clone()
            if not targets[i].isfinite().all():
                raise TrainingError(
                    f"the teacher's distributions for {examples[i].pair.name} are not finite; "
                    "check its weights"
                )
    networks.cpu()
    return targets


def _load_teacher(path: Path, ours: Signature, backwards: bool) -> Teacher:
    """Load a teacher from a run's folder, a file, or the name of a model that ships."""
    where = f"train.teacher, {path}"
    if not path.exists() and path.name in model_names():
        path = FOLDER / f"{path.name}.safetensors"
    try:
        model = load_model(path)
    except CheckpointError as error:
        raise TrainingError(f"train.teacher: {error}") from None
    if not isinstance(model.network, Transducer):
        raise TrainingError(f"{where}: it is of the kind {model.config.network}; give a transducer")
    if model.network.backwards != backwards:
        ways = {False: "forwards", True: "backwards"}
        raise TrainingError(
            f"{where}: it reads {ways[not backwards]}, and the network to be trained "
            f"{ways[backwards]}; give a teacher that reads in the same direction"
        )
    theirs, sources = model.signature, None
    if theirs.sources is not None and ours.sources is not None:
        sources = _ids(theirs.sources, ours.sources, "source symbol", where)
    elif theirs.sources is not ours.sources:
        kinds = ("sound", "text") if theirs.sources is None else ("text", "sound")
        raise TrainingError(
            f"{where}: it reads {kinds[0]}, and the network to be trained {kinds[1]}; give a "
            "teacher with the same kind of input"
        )
    elif theirs.features != ours.features or theirs.input_size != ours.input_size:
        raise TrainingError(
            f"{where}: it has other features; set data.features to those of its config.toml, or "
            "give a teacher that was trained on these"
        )
    for symbol in theirs.targets.symbols:
        if symbol not in ours.targets.symbols:
            raise TrainingError(
                f"{where}: it has a label {symbol!r} that the training data do not have; give a "
                "teacher with the same labels"
            )
    labels = _ids(theirs.targets, ours.targets, "label", where)
    return Teacher(model.network, ours, theirs, labels, sources)


def _ids(theirs: Alphabet, ours: Alphabet, what: str, where: str) -> Tensor:
    """Return the teacher's id of each of our ids; null stays null."""
    for symbol in ours.symbols:
        if symbol not in theirs.symbols:
            raise TrainingError(
                f"{where}: it has no {what} {symbol!r}; give a teacher trained on data that have it"
            )
    return torch.tensor([0, *theirs.encode(ours.symbols)])
