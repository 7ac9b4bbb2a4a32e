"""Teachers: trained transducers whose expectations of the next label another network learns.

What a teacher expects after each prefix of a target does not depend on frames. So it is computed
once, on the input without augmentation, and serves in every epoch and for every architecture.

A teacher that reads in the other direction does not know the prefixes. Where there is one, all
teachers together score some candidates: the target, and the output of each teacher's greedy search.
What follows a prefix is then what follows it in the candidates (docs/derivations.md, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import Transducer
from transduce.data.batches import Batch, Batches, Example
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.checkpoint import load_model
from transduce.model.model import FOLDER, model_names
from transduce.model.signature import Signature
from transduce.model.tensors import CheckpointError
from transduce.training.checks import TrainingError

MOST_SEQUENCES = 256  # at once
CELLS = {"cpu": 200_000, "cuda": 5_000_000}  # of padded lattice at once; each takes 100 bytes


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
    def log_likelihoods(self, batch: Batch) -> Tensor:
        """Return ln Pr(y|x) of each sequence, [B]."""
        return -self.network.losses(self._translated(batch))

    @torch.no_grad()
    def outputs(self, batch: Batch) -> list[Labels]:
        """Return what the greedy search finds for each input, in our labels."""
        ours = self.labels.argsort().tolist()
        found = self.network.search(self._translated(batch), SearchOptions(with_timings=False))
        return [tuple(ours[label] for label in best.labels) for best, *_ in found]

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


def load_teachers(paths: Sequence[Path], signature: Signature) -> list[Teacher]:
    """Load the teachers of a network with a signature; raise TrainingError if one does not fit."""
    return [_load_teacher(path, signature) for path in paths]


def label_examples(
    teachers: Sequence[Teacher], examples: Sequence[Example], device: torch.device
) -> list[Example]:
    """Return the examples with the labels that the teachers together find most probable.

    The labels are one of the outputs of their greedy searches. Examples that would have no labels
    are left out.
    """
    labelled: list[Example] = []
    with _on_device(teachers, device):
        for ids, batch in _loaded(examples, device):
            for i, candidates in zip(ids, _candidates(teachers, batch), strict=True):
                if best := max(candidates, key=lambda labels: (candidates[labels], labels)):
                    labelled.append(replace(examples[i], labels=torch.tensor(best)))
    return labelled


def teacher_targets(
    teachers: Sequence[Teacher],
    examples: Sequence[Example],
    shares: Sequence[float],  # of each example
    backwards: bool,  # whether the network that learns reads so
    device: torch.device,
) -> list[Tensor]:
    """Return the targets of each example: a float16 distribution for each prefix, [U+1, K+1].

    They are the label that follows, and with the weight of its share what the teachers expect: the
    normalised geometric mean of their distributions, if all read in the network's direction, and
    otherwise what follows in the candidates. Null is the end.
    """
    targets: list[Tensor] = [torch.empty(0)] * len(examples)
    with _on_device(teachers, device):
        for ids, batch in _loaded(examples, device):
            read = batch.reversed() if backwards else batch
            following = nn.functional.pad(read.labels, (0, 1))  # padding is null
            if all(teacher.backwards == backwards for teacher in teachers):
                each = torch.stack([teacher.log_probs(batch) for teacher in teachers])
                expected = each.mean(0).softmax(-1).float()
            else:
                size = len(teachers[0].labels)
                expected = _followed(_candidates(teachers, batch), batch, size, backwards)
            certain = nn.functional.one_hot(following, expected.shape[2])
            share = torch.tensor([shares[i] for i in ids], device=device)[:, None, None]
            mixed = (share * expected + (1 - share) * certain).half().cpu()
            for i, target in zip(ids, mixed, strict=True):
                targets[i] = target[: examples[i].num_labels + 1].clone()
                if not targets[i].isfinite().all():
                    raise TrainingError(
                        f"the teacher's distributions for {examples[i].pair.name} are not finite; "
                        "check its weights"
                    )
    return targets


@contextmanager
def _on_device(teachers: Sequence[Teacher], device: torch.device) -> Iterator[None]:
    """Move the teachers to a device; move them back on exit."""
    networks = nn.ModuleList(teacher.network for teacher in teachers).to(device)
    yield
    networks.cpu()


def _loaded(examples: Sequence[Example], device: torch.device) -> Iterator[tuple[list[int], Batch]]:
    """Yield all examples in batches on a device, with their indices."""
    sizes = [example.num_frames * (example.num_labels + 1) for example in examples]
    batches = Batches(
        examples, max(CELLS[device.type], *sizes), seed=0, max_sequences=MOST_SEQUENCES
    )
    for ids in batches.by_length():
        yield ids, next(batches.load([ids])).to(device)


def _candidates(teachers: Sequence[Teacher], batch: Batch) -> list[dict[Labels, float]]:
    """Return the candidates of each input, with the teachers' mean ln Pr(y|x).

    They are the batch's labels, if there are any, and the teachers' outputs.
    """
    found: list[dict[Labels, float]] = [{} for _ in batch.pairs]
    rows, num_labels = batch.labels.tolist(), batch.num_labels.tolist()
    for candidates, row, length in zip(found, rows, num_labels, strict=True):
        if length:
            candidates[tuple(row[:length])] = 0.0
    for teacher in teachers:
        for candidates, labels in zip(found, teacher.outputs(batch), strict=True):
            candidates[labels] = 0.0
    flat = [(b, labels) for b, candidates in enumerate(found) for labels in candidates]
    device = batch.labels.device
    inputs = torch.tensor([b for b, _ in flat], device=device)
    sequences = [torch.tensor(labels, dtype=torch.int64) for _, labels in flat]
    scored = Batch(
        (),
        batch.frames[inputs],
        batch.num_frames[inputs],
        pad_sequence(sequences, batch_first=True).to(device),
        torch.tensor([len(labels) for _, labels in flat], device=device),
    )
    log_likelihoods = torch.stack(
        [teacher.log_likelihoods(scored).double() for teacher in teachers]
    )
    for (b, labels), value in zip(flat, log_likelihoods.mean(0).tolist(), strict=True):
        found[b][labels] = value
    return found


def _followed(
    candidates: Sequence[dict[Labels, float]], batch: Batch, size: int, backwards: bool
) -> Tensor:
    """Return the distribution of what follows each prefix in the candidates, [B, U+1, K+1].

    The weight of a candidate is its likelihood. The prefixes are those of the batch's labels.
    """
    B, U = batch.labels.shape
    expected = torch.zeros(B, U + 1, size)
    order = -1 if backwards else 1
    rows, num_labels = batch.labels.tolist(), batch.num_labels.tolist()
    for b, (row, length) in enumerate(zip(rows, num_labels, strict=True)):
        labels = tuple(row[:length])[::order]
        open_ones = [(one[::order], value) for one, value in candidates[b].items()]
        for u in range(length + 1):
            open_ones = [(one, value) for one, value in open_ones if one[:u] == labels[:u]]
            top = max(value for _, value in open_ones)
            for one, value in open_ones:
                expected[b, u, one[u] if u < len(one) else NULL] += math.exp(value - top)
    return (expected / expected.sum(-1, keepdim=True).clamp(min=1e-30)).to(batch.labels.device)


def _load_teacher(path: Path, ours: Signature) -> Teacher:
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
