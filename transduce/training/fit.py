"""The loop that trains any of the networks, on Lightning Fabric.

Each step draws its noise, masks and dropout from a seed of its own. So the number of steps is all
the random state of a run, and a run that is killed and resumed ends like one that is not.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from transduce.architectures import AnyNetwork, Transducer, build_network, network_sizes
from transduce.audio.augmentation import Augmenter
from transduce.data.batches import (
    Batch,
    Batches,
    Example,
    UnreadExamples,
    describe_step,
    predicted_bytes,
)
from transduce.data.pairs import DataError, skipped_report
from transduce.evaluation import bits_per_label, misclassified
from transduce.files import write_by_rename
from transduce.lstm.layer import INITIAL_RANGE
from transduce.model.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    TrainedModel,
    TrainingStatus,
    load_model,
    load_network_tensors,
    network_tensors,
    save_model,
)
from transduce.model.signature import Signature
from transduce.model.tensors import read_tensors, write_tensors
from transduce.settings import RecipeError, replace_settings
from transduce.training.card import CARD_FILE, model_card
from transduce.training.checks import (
    LAST_FILE,
    TrainingError,
    check_devices,
    check_memory,
    check_precision,
    open_folder,
)
from transduce.training.corpus import Corpus, read_corpus
from transduce.training.launch import launcher, settle_processes, start_fabric
from transduce.training.loading import Loaded, Loader
from transduce.training.lock import FolderLock
from transduce.training.peers import watch_peers
from transduce.training.pretraining import (
    PretrainingError,
    check_direction,
    copy_prediction,
    copy_transcription,
)
from transduce.training.progress import Progress
from transduce.training.recipe import Recipe, TrainConfig, recipe_toml
from transduce.training.regularisation import MovingAverage, spec_augment, weight_noise
from transduce.training.risk import (
    CandidateErrors,
    CandidateRows,
    find_candidate_errors,
    risk_losses,
)
from transduce.training.teachers import (
    Candidates,
    candidate_targets,
    exact_targets,
    find_candidates,
    label_examples,
    load_teachers,
    transducers,
)

METRICS_FILE = "metrics.jsonl"
MARGIN = 5  # frames by which the length of a sound that has not been read may be wrong
STATE = "the state of a run"
# In training: the weight, its gradient, two moments, the average, and the copy without noise.
BYTES_PER_WEIGHT = 24

# Returns the error rate of a model on the validation set, which takes a search.
Validate = Callable[[TrainedModel, Sequence[Example]], float]


class NonFiniteLoss(TrainingError):
    """The error of a loss that is not finite, with the names of its pairs."""


@dataclass(frozen=True)
class _Position:
    """The position of a run, which with weights and optimiser determines the rest of it."""

    epoch: int = 0  # complete epochs
    batch: int = 0  # steps of the current epoch
    step: int = 0  # steps in all
    nats: float = 0.0  # the summed loss of the current epoch so far
    labels: int = 0  # the number of labels in that sum
    best_epoch: int = 0  # the epoch with the best validation
    best: float | None = None  # the result of that validation
    best_bits: float | None = None  # the bits per label of that validation
    metrics_bytes: int = 0  # the size of metrics.jsonl

    def after(self, nats: float, labels: int) -> _Position:
        """Return the position after one more step."""
        nats, labels = self.nats + nats, self.labels + labels
        return replace(self, batch=self.batch + 1, step=self.step + 1, nats=nats, labels=labels)


def fit(
    recipe: Recipe,
    run_folder: Path,
    *,
    corpus: Corpus | None = None,  # read from recipe.data if not given
    resume: bool = False,
    validate: Validate | None = None,
    progress: Progress | None = None,
) -> TrainedModel:
    """Train the recipe's network, and return the best model, which is run/model.safetensors.

    With `resume`, continue the run in the folder to the result that it would have had without the
    stop; without it, the folder must not hold a run. `validate` is needed if the error rate decides
    when to stop. A prediction network needs none: its error rate is that of the next label.
    """
    config, reads_input = recipe.train, recipe.network.network != "prediction"
    if config.stop_at == "error_rate" and validate is None and reads_input:
        raise TrainingError("train.stop_at is error_rate, but there is no `validate`; give it")
    if config.consistency and not (recipe.network.dropout or config.spec_augment.num_masks):
        raise TrainingError(
            "train.consistency compares a network's outputs under two draws of dropout or masks, "
            "and there are none; set network.dropout, or train.consistency to 0"
        )
    if config.teacher and recipe.network.network != "transducer":
        raise TrainingError(
            f"train.teacher is for a transducer, not {recipe.network.network}; leave it out"
        )
    if recipe.data.unlabelled is not None and not config.teacher:
        raise TrainingError(
            "data.unlabelled has no targets; name a train.teacher that gives them, or leave it out"
        )
    if config.minimum_risk:
        _check_minimum_risk(recipe)
    spoken = recipe.network.network == "continuous"
    for setting, is_set, remedy in (
        ("train.stop_at error_rate", config.stop_at == "error_rate", 'set it to "log_loss"'),
        ("train.consistency", config.consistency, "set it to 0"),
        ("train.sound", config.sound.is_on, "leave it out"),
        ("train.init_prediction", config.init_prediction, "leave it out"),
        ("train.init_transcription", config.init_transcription, "leave it out"),
    ):
        if spoken and is_set:
            raise TrainingError(f"{setting} is not for a continuous transducer; {remedy}")
    settled = settle_processes(config, os.environ)
    check_devices(settled, is_launched=launcher(os.environ) is not None)
    fabric = start_fabric(settled)
    check_precision(config.precision, fabric.device)
    if progress is None or not fabric.is_global_zero:
        progress = Progress(Console(quiet=not fabric.is_global_zero))
    with watch_peers(fabric), open_folder(recipe, run_folder, resume, fabric) as lock:
        if corpus is None:
            corpus = read_corpus(recipe.data, targets_only=not reads_input, spoken=spoken)
            if corpus.skipped:
                progress.say(skipped_report(corpus.skipped, len(corpus.training)))
        run = _Run(
            recipe, run_folder, lock, corpus, fabric, settled.devices or 1, validate, progress
        )
        with progress:
            run.train(resume)
        # The other machines need not have the folder.
        model = load_model(run_folder) if fabric.is_global_zero else None
        return cast(TrainedModel, fabric.broadcast(model))


class _Run:
    """A run: the network, its optimiser, and their position."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        lock: FolderLock | None,  # None in all processes but the first
        corpus: Corpus,
        fabric: Fabric,
        num_processes: int,  # on this machine
        validate: Validate | None,
        progress: Progress,
    ) -> None:
        self.recipe, self.folder, self.lock, self.corpus = recipe, folder, lock, corpus
        self.fabric, self.validate, self.progress = fabric, validate, progress
        self.config = recipe.train
        self.copies = 2 if self.config.consistency else 1  # of each sequence in a step
        self.network = self._initial_network()
        self.teachers = load_teachers(self.config.teacher, corpus.signature)
        for is_on, kept in (
            (self.teachers, "train.teacher keeps its distributions"),
            (self.config.minimum_risk, "train.minimum_risk keeps its candidates"),
        ):
            if is_on and isinstance(corpus.training, UnreadExamples):
                raise TrainingError(
                    f"{kept} in memory, and the training set is too large for that; raise "
                    "data.memory, or set data.num_training"
                )
        seed, sound = self.config.seed, self.config.sound
        slowest, fastest = sound.speeds
        self.labelled = self._labelled()  # by the teachers
        training = self._alignable(corpus.training, 1 / fastest)
        if self.labelled:
            training = [*training, *(example for example, _ in self.labelled)]
        validation = self._alignable(corpus.validation)
        limits: Any = {"pooling": recipe.network.pooling, "max_cells": self.config.max_cells}
        self.batches = Batches(
            training,
            seed=seed,
            max_sequences=self.config.max_sequences,
            stretch=1 / slowest,
            **limits,
        )
        self.validation = Batches(validation, seed=seed, max_sequences=64, **limits)
        self.loader = Loader(
            training,
            corpus.signature,
            self._augmenter(),
            num_processes,
            skip_bad=recipe.data.skip_bad,
            convert=recipe.data.convert,
        )
        objective = _Objective(self.network, self.config.consistency)
        optimiser = _optimiser(self.network, self.config)
        self.objective, self.optimiser = fabric.setup(objective, optimiser)
        self.weights = list(self.network.parameters())
        self.average = MovingAverage(self.weights, self.config.averaging)
        self.generator = torch.Generator(fabric.device)
        self.position = _Position()
        self.targets: list[Tensor] = []  # of distillation, [U+1, K+1] for each training example
        self.candidates: CandidateErrors | None = None  # of minimum-risk training
        self.metrics = b""
        self.tensorboard = self._tensorboard_writer()

    def train(self, resume: bool) -> None:
        """Train until the run is finished: epochs of steps, each with a validation."""
        report = self._size_report()
        if self.fabric.broadcast(resume and (self.folder / LAST_FILE).is_file()):
            self._load()
            if not self._finished():
                self._write_config()
        else:
            self._write_config()
            self._save()
        self.progress.say(report)
        if self._finished():
            self.progress.say(
                f"the run is finished after epoch {self.position.epoch}; to go on, raise "
                "train.max_epochs or train.patience"
            )
        elif self.teachers:
            self.targets = self._teacher_targets()
        elif self.config.minimum_risk:
            self.candidates = self._candidates()
        while not self._finished():
            at = self.position
            order = self.batches.epoch(at.epoch)
            self.progress.start_epoch(at.epoch + 1, len(order), at.batch)
            start = time.monotonic()
            rest = order[at.batch :]
            with closing(self.loader.load(at.epoch, map(self._share, rest))) as batches:
                for ids, loaded in zip(rest, batches, strict=True):
                    nats, labels = self._step(ids, loaded, len(order))
                    at = self.position = at.after(nats, labels)
                    self.progress.step(len(ids), bits_per_label(at.nats, at.labels))
                    if self.config.save_every and at.step % self.config.save_every == 0:
                        self._save()
            if self.loader.skipped:
                kept = len(self.batches.examples) - len(self.loader.skipped)
                self.progress.say(skipped_report(self.loader.skipped, kept))
                self.loader.skipped.clear()
            with self.average.in_place():
                self._end_epoch(time.monotonic() - start)
            self._save()

    def _share(self, ids: Sequence[int]) -> list[int]:
        """Return the sequences of a step that this process computes.

        Every process must take part. One that has no sequence computes the first one.
        """
        return list(ids[self.fabric.global_rank :: self.fabric.world_size]) or list(ids[:1])

    def _step(self, ids: list[int], loaded: Loaded, num_steps: int) -> tuple[float, int]:
        """Update the weights once; return the summed loss of the sequences and their labels.

        The processes share the sequences; `loaded` has those of this one that could be read. The
        gradient is that of the mean loss over all of them.
        """
        config, fabric, batch = self.config, self.fabric, loaded.batch
        # A sequence of weight 0 changes nothing.
        share = 1.0 if fabric.global_rank < len(ids) and loaded.ids else 0.0
        if self.targets:
            targets = pad_sequence([self.targets[i] for i in loaded.ids], batch_first=True)
            batch = replace(batch, targets=targets)
        batch = batch.to(fabric.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate(self.position, num_steps)
        # All processes draw the same weight noise, and different masks and dropout.
        seed, step = config.seed, self.position.step
        self.generator.manual_seed(step_seed(seed, step, "noise"))
        torch.manual_seed(step_seed(seed, step, f"masks {fabric.global_rank}"))
        views = spec_augment(batch, config.spec_augment, copies=self.copies)
        candidates = None
        if self.candidates is not None:
            # A batch of weight 0 has one sequence, and any candidates do.
            candidates = self.candidates.rows(loaded.ids or [0]).to(fabric.device)
        self.objective.train()
        with weight_noise(self.weights, config.weight_noise, self.generator):
            losses, objective = self.objective(*views.tensors, candidates=candidates)
            sums = share * torch.stack([losses.detach().sum(), batch.num_labels.sum()])
            nats, labels = cast(Tensor, fabric.all_reduce(sums, reduce_op="sum")).tolist()
            if not math.isfinite(nats):
                raise self._non_finite(batch, losses)
            # Fabric averages the gradients of the processes.
            fabric.backward(objective.sum() * (share * fabric.world_size / len(ids)))
        if config.clip is not None:
            fabric.clip_gradients(self.objective, self.optimiser, max_norm=config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.average.update(self.position.step + 1)
        return nats, round(labels)

    @torch.no_grad()
    def _validation_results(self) -> tuple[float, float | None]:
        """Return the bits per label and the error rate on the validation set."""
        fabric = self.fabric
        self.network.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # nats, labels, mistakes
        mine = self.validation.by_length()[fabric.global_rank :: fabric.world_size]
        for batch in self.validation.load(mine):
            batch = batch.to(fabric.device)
            sums[0] += self.network.losses(batch).double().sum()
            sums[1] += batch.num_labels.sum()
            if not self.network.reads_input:
                found = self.network(batch.labels)
                sums[2] += misclassified(found, batch.labels, batch.num_labels, with_null=False)
        nats, labels, wrong = cast(Tensor, fabric.all_reduce(sums, reduce_op="sum")).tolist()
        error_rate = None if self.network.reads_input else wrong / labels
        has_labels = self.network.has_labels
        if self.validate is not None and has_labels and fabric.is_global_zero:
            error_rate = self.validate(self._model(), self.corpus.validation)
        return bits_per_label(nats, round(labels)), fabric.broadcast(error_rate)

    def _end_epoch(self, seconds: float) -> None:
        """Validate, save the model if it is the best so far, and write the metrics."""
        at, config = self.position, self.config
        last = at.epoch + 1 == config.max_epochs
        if (at.epoch + 1) % config.validate_every and not last:
            self.progress.end_epoch(bits_per_label(at.nats, at.labels), seconds)
            self.position = replace(at, epoch=at.epoch + 1, batch=0, nats=0.0, labels=0)
            return
        bits, error_rate = self._validation_results()
        value = error_rate if config.stop_at == "error_rate" else bits
        if value is None or not math.isfinite(value):
            raise NonFiniteLoss(
                f"the validation after epoch {at.epoch + 1} gives {value}; {self._advice()}"
            )
        training_bits = bits_per_label(at.nats, at.labels)
        status = TrainingStatus(at.epoch + 1, at.step, bits, error_rate)
        # Equal error rates, as in the first epochs of a small corpus, are decided by the log-loss.
        is_best = at.best is None or (value, bits) < (at.best, at.best_bits or 0.0)
        if is_best:
            at = replace(at, best=value, best_bits=bits, best_epoch=status.epoch)
            if self.lock is not None:
                self.lock.check()
                save_model(self._model(status), self.folder / MODEL_FILE)
                self._write(CARD_FILE, self._card(status, training_bits).encode())
        measured = asdict(status) | {"training_bits_per_label": training_bits}
        last_step = replace(at, batch=at.batch - 1, step=at.step - 1)
        measured |= {"learning_rate": self._learning_rate(last_step, at.batch), "seconds": seconds}
        self.metrics += json.dumps(measured).encode() + b"\n"
        self._write(METRICS_FILE, self.metrics)
        for name, number in measured.items():
            if self.tensorboard is not None and number is not None:
                self.tensorboard.add_scalar(name, number, status.step)
        self.progress.end_epoch(training_bits, seconds, bits, error_rate, is_best)
        self.position = replace(
            at, epoch=status.epoch, batch=0, nats=0.0, labels=0, metrics_bytes=len(self.metrics)
        )

    # --- The parts of a run ---

    def _finished(self) -> bool:
        """Return whether max_epochs or patience has run out."""
        at = self.position
        return at.epoch >= self.config.max_epochs or (
            at.epoch - at.best_epoch >= self.config.patience
        )

    def _learning_rate(self, at: _Position, num_steps: int) -> float:
        """Return the learning rate of the step at a position in an epoch of `num_steps`."""
        passed = (at.epoch + at.batch / num_steps) / self.config.max_epochs
        return learning_rate(self.config, at.step, passed)

    def _model(self, status: TrainingStatus | None = None) -> TrainedModel:
        """Return the network with its signature and status."""
        network, signature = self.recipe.network, self.corpus.signature
        return TrainedModel(self.network, network, signature, status or TrainingStatus())

    def _card(self, status: TrainingStatus, training_bits: float) -> str:
        """Return the card of the model that was saved."""
        device, processes = self.fabric.device.type, self.fabric.world_size
        where = device if processes == 1 else f"{device} in {processes} processes"
        name = self.folder.absolute().name
        return model_card(name, self._model(status), self.recipe, self.corpus, training_bits, where)

    def _size_report(self) -> str:
        """Report the sizes of the run and the predicted memory of its largest step.

        Raise TrainingError if the device has less memory than the step takes.
        """
        network, world = self.recipe.network, self.fabric.world_size
        signature = self.corpus.signature
        sizes = network_sizes(network, signature.input_size, signature.output_size)
        shapes = {self.batches.shape(ids) for ids in self.batches.epoch(0)}
        copies = self.copies
        shared = [(copies * -(-B // world), T, U) for B, T, U in shapes]
        candidates = 1 + self.config.minimum_risk
        options = (sizes, self.fabric.device.type, bool(self.teachers), candidates)
        largest = max(shared, key=lambda shape: predicted_bytes(shape, *options))
        needed = predicted_bytes(largest, *options)
        B, T, U = largest
        step = describe_step(B // copies, copies, T, U)
        each = f" with {candidates} candidates each" if candidates > 1 else ""
        check_memory(
            needed,
            self.fabric.device,
            f"a step of {step}{each}",
            f"train.max_sequences {self.config.max_sequences} or train.max_cells "
            f"{self.config.max_cells}",
        )
        weights = sum(weights.numel() for weights in self.network.parameters())
        return (
            f"{weights:,} weights; {len(self.batches.examples):,} training sequences; the largest "
            f"step has {step}{each}, and will take about {needed / 2**20:.1f} MB beside the weights"
        )

    def _augmenter(self) -> Augmenter | None:
        """Return what changes the sound of the training set; None if nothing does."""
        if not self.config.sound.is_on:
            return None
        features = self.corpus.signature.features
        if features is None:
            raise TrainingError(
                "train.sound changes sound, and the training data have none; leave it out"
            )
        return Augmenter(self.config.sound, features.sample_rate, self.config.seed)

    def _alignable(self, examples: Sequence[Example], shortened: float = 1.0) -> Sequence[Example]:
        """Return the examples that the network can align with their labels.

        Changes of sound may leave this share of an example's frames.
        """
        alignable: Sequence[Example]
        if isinstance(examples, UnreadExamples):
            alignable = examples.subset(self._alignable_unread(examples, shortened))
        else:
            alignable = [
                example
                for example in examples
                if self.network.can_align(_shortened(example, shortened, self.corpus.signature))
            ]
        name = self.network.kind
        if len(alignable) < len(examples):
            self.progress.say(
                f"{name} cannot align {len(examples) - len(alignable)} of {len(examples)} "
                "sequences, which have too few frames for their labels; the log-loss is without "
                "them"
            )
        if not alignable:
            raise TrainingError(f"{name} can align none of the sequences; lower network.pooling")
        return alignable

    def _alignable_unread(self, examples: UnreadExamples, shortened: float) -> np.ndarray:
        """Return the indices of the examples that the network can align, as far as it is known."""
        can_align = np.ones(len(examples), bool)
        # Even equal labels need no more than two frames each.
        most = 2 * self.recipe.network.pooling * examples.num_labels
        for i in np.flatnonzero(shortened * examples.num_frames - MARGIN < most):
            frames = torch.zeros(
                max(1, int(examples.num_frames[i]) - MARGIN), self.corpus.signature.input_size
            )
            with suppress(DataError):  # which is met again when the example is read
                example = self.corpus.signature.example(
                    examples.pair(int(i)), with_labels=True, frames=frames
                )
                short = _shortened(example, shortened, self.corpus.signature)
                can_align[i] = self.network.can_align(short)
        return np.flatnonzero(can_align)

    def _initial_network(self) -> AnyNetwork:
        """Build the network, and copy the pretrained parts that the recipe names into it."""
        signature, config = self.corpus.signature, self.recipe.network
        sizes = (signature.input_size, signature.output_size)
        with torch.device("meta"):  # without memory
            count = sum(weights.numel() for weights in build_network(config, *sizes).parameters())
        names = ("hidden_size", "prediction_size", "embedding_size")
        widest = max(names, key=lambda name: int(getattr(config, name)))
        check_memory(
            BYTES_PER_WEIGHT * count,
            self.fabric.device,
            f"training {count:,} weights",
            f"network.{widest} {getattr(config, widest)}",
        )
        torch.manual_seed(self.config.seed)
        network = build_network(config, *sizes)
        with torch.no_grad():
            for weights in network.parameters():
                weights.mul_(self.config.initial_range / INITIAL_RANGE)
        for name, copy in (
            ("init_transcription", copy_transcription),
            ("init_prediction", copy_prediction),
        ):
            path: Path | None = getattr(self.config, name)
            try:
                if path is not None:
                    pretrained = load_model(path)
                    check_direction(pretrained, self.recipe.network.backwards)
                    copy(pretrained, network, signature)
            except PretrainingError as error:
                raise TrainingError(f"train.{name}, {path}: {error}") from None
        return network

    def _labelled(self) -> list[tuple[Example, Candidates]]:
        """Return the inputs without targets, with the labels that the teachers find for them."""
        unlabelled, start = self.corpus.unlabelled, time.monotonic()
        if not unlabelled:
            return []
        device, cache = self.fabric.device, self.recipe.data.cache
        found = label_examples(
            unlabelled, find_candidates(self.teachers, unlabelled, device, cache)
        )
        self.progress.say(
            f"the teachers labelled {len(found):,} of {len(unlabelled):,} inputs without targets "
            f"in {time.monotonic() - start:.0f} s"
        )
        # All processes must have the same labels, also where rounding is different.
        return self.fabric.broadcast(found)

    def _teacher_targets(self) -> list[Tensor]:
        """Return the targets of the training examples: the labels, and the teachers' share."""
        examples, start = self.batches.examples, time.monotonic()
        device, backwards = self.fabric.device, self.recipe.network.backwards
        given = examples[: len(examples) - len(self.labelled)]
        shares = [self.config.distillation] * len(given) + [1.0] * len(self.labelled)
        names = " and ".join(map(str, self.config.teacher))
        self.progress.say(
            f"computing the next labels that {names} would expect in {len(examples):,} sequences"
        )
        exact = transducers(self.teachers)
        if exact == self.teachers and all(one.backwards == backwards for one in exact):
            targets = exact_targets(exact, examples, shares, device)
        else:
            candidates = find_candidates(self.teachers, given, device, self.recipe.data.cache)
            candidates += [found for _, found in self.labelled]
            size = self.corpus.signature.output_size + 1
            targets = candidate_targets(examples, candidates, shares, size, backwards)
        self.progress.say(f"computed them in {time.monotonic() - start:.0f} s")
        return targets

    def _candidates(self) -> CandidateErrors:
        """Return the candidates that the initial network finds, also if the run is resumed."""
        examples, start = self.batches.examples, time.monotonic()
        network = self._initial_network()
        assert isinstance(network, Transducer)
        found = find_candidate_errors(
            network, examples, self.config.minimum_risk, self.fabric.device
        )
        self.progress.say(
            f"found the candidates of {len(examples):,} sequences in "
            f"{time.monotonic() - start:.0f} s"
        )
        return found

    def _non_finite(self, batch: Batch, losses: Tensor) -> NonFiniteLoss:
        """Return the error that names the pairs whose losses are not finite."""
        bad = [
            pair.name
            for pair, finite in zip(batch.pairs, losses.isfinite().tolist(), strict=True)
            if not finite
        ]
        where = f"step {self.position.step + 1}, in epoch {self.position.epoch + 1}"
        names = ", ".join(bad) or "sequences in another process"
        return NonFiniteLoss(f"the loss of {names} is not finite at {where}; {self._advice()}")

    def _advice(self) -> str:
        """Return the remedy of a loss that is not finite."""
        return (
            f"the last good state is in {self.folder / LAST_FILE}; lower train.learning_rate, or "
            "set train.clip"
        )

    # --- The folder ---

    def _write(self, name: str, content: bytes) -> None:
        """Write a file of the run's folder, in the first process alone."""
        if self.lock is not None:
            self.lock.check()
            write_by_rename(self.folder / name, content)

    def _write_config(self) -> None:
        """Write the settings, which may have changed if the run is resumed."""
        self._write(CONFIG_FILE, recipe_toml(self.recipe).encode())

    def _save(self) -> None:
        """Write the state in one file; a kill leaves this state or the one before."""
        if self.lock is None:
            return
        self.lock.check()
        tensors = network_tensors(self.network)
        if not all(bool(weights.isfinite().all()) for weights in tensors.values()):
            raise NonFiniteLoss(
                f"a weight is not finite after step {self.position.step}; {self._advice()}"
            )
        for i, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{key}": t for key, t in state.items() if t is not None}
        tensors |= {f"average.{i}": tensor for i, tensor in enumerate(self.average.tensors)}
        write_tensors(self.folder / LAST_FILE, tensors, {"position": asdict(self.position)}, STATE)

    def _load(self) -> None:
        """Read the state, and cut the metrics to their size at that time.

        The first process reads it for all, so that all begin with the same.
        """
        path, is_first = self.folder / LAST_FILE, self.fabric.is_global_zero
        state = read_tensors(path, STATE) if is_first else None
        tensors, header = cast(tuple[Any, Any], self.fabric.broadcast(state))
        again = "train again in another folder"
        try:
            self.position = replace_settings(_Position(), header["position"])
        except (KeyError, AttributeError, RecipeError):
            raise TrainingError(f"{path} has no position of the run; {again}") from None
        shapes = self._state_shapes()
        for name, shape in shapes.items():
            if name not in tensors or tensors[name].shape != shape:
                raise TrainingError(f"{path} has no tensor {name} of shape {list(shape)}; {again}")
        load_network_tensors(self.network, {name: tensors[name] for name in shapes})
        moments: dict[int, dict[str, Tensor]] = {}
        for name in shapes:
            if name.startswith("optimiser."):
                _, i, key = name.split(".")
                moments.setdefault(int(i), {})[key] = tensors[name]
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        for number, average in enumerate(self.average.tensors):
            average.copy_(tensors[f"average.{number}"])
        metrics = self.folder / METRICS_FILE
        written = metrics.read_bytes() if metrics.is_file() else b""
        self.metrics = written[: self.position.metrics_bytes]
        self._write(METRICS_FILE, self.metrics)

    def _state_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the tensors of a state at the current position, by name."""
        shapes = {name: weights.shape for name, weights in network_tensors(self.network).items()}
        shapes |= {f"average.{i}": weights.shape for i, weights in enumerate(self.weights)}
        if self.position.step == 0:  # the optimiser has no state yet
            return shapes
        for i, weights in enumerate(self.weights):
            if self.config.optimiser == "adamw":
                shapes[f"optimiser.{i}.step"] = torch.Size()
                shapes[f"optimiser.{i}.exp_avg"] = weights.shape
                shapes[f"optimiser.{i}.exp_avg_sq"] = weights.shape
            elif self.config.momentum:
                shapes[f"optimiser.{i}.momentum_buffer"] = weights.shape
        return shapes

    def _tensorboard_writer(self) -> Any:
        """Return a writer of TensorBoard events; None if TensorBoard is not installed."""
        if find_spec("tensorboard") is None or not self.fabric.is_global_zero:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.folder)


class _Objective(nn.Module):
    """The objective of training as a module, because Fabric wraps the forward of a module."""

    def __init__(self, network: AnyNetwork, consistency: float) -> None:
        super().__init__()
        self.network, self.consistency = network, consistency

    def forward(
        self, *tensors: Tensor, candidates: CandidateRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the log-losses [B] and the objectives [B] of a batch's tensors."""
        batch = Batch((), *tensors)
        if candidates is not None:
            return risk_losses(cast(Transducer, self.network), batch, candidates)
        if not self.consistency:
            return self.network.training_losses(batch)
        losses, minimised, divergence = self.network.consistency_losses(batch)
        return losses, minimised + self.consistency * divergence


def _check_minimum_risk(recipe: Recipe) -> None:
    """Raise TrainingError if the recipe's other settings do not go with train.minimum_risk."""
    config, kind = recipe.train, recipe.network.network
    if kind != "transducer":
        raise TrainingError(f"train.minimum_risk is for a transducer, not {kind}; leave it out")
    for name in ("consistency", "teacher"):
        if getattr(config, name):
            raise TrainingError(
                f"train.minimum_risk and train.{name} do not go together; leave one of them out"
            )
    for name in ("init_transcription", "init_prediction"):
        if getattr(config, name) is None:
            raise TrainingError(
                "train.minimum_risk takes its candidates from the initial network, which knows "
                f"nothing without train.{name}; name a trained transducer there"
            )


def _shortened(example: Example, share: float, signature: Signature) -> Example:
    """Return an example of sound with the fewest frames that it has at `share` of its duration."""
    if share == 1 or signature.features is None:
        return example
    # A window that no longer fits takes its frame with it.
    lost = -(-signature.features.window_samples // signature.features.shift_samples)
    fewest = max(1, math.floor(share * example.num_frames) - lost)
    return replace(example, frames=example.frames[:fewest])


def step_seed(seed: int, step: int, purpose: str) -> int:
    """Return the seed of one random draw at `step`, which counts from 0."""
    return random.Random(f"{seed} {step} {purpose}").getrandbits(63)


def learning_rate(config: TrainConfig, step: int, passed: float) -> float:
    """Return the learning rate of `step`, from 0, when the share `passed` of the run is over."""
    rate = config.learning_rate
    if step < config.warm_up:
        rate *= (step + 1) / config.warm_up
    if config.decay == "cosine":
        rate *= (1 + math.cos(math.pi * passed)) / 2
    return rate


def _optimiser(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Make the optimiser of a network's weights."""
    if config.optimiser == "adamw":
        return torch.optim.AdamW(
            network.parameters(), config.learning_rate, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(network.parameters(), config.learning_rate, config.momentum)
