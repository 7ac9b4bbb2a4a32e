"""A trained network at work: what it outputs for examples, and how good that is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transduce.alphabet import Alphabet
from transduce.data.batches import Batch, Batches, Example
from transduce.data.pairs import DataError, Frames, Pair
from transduce.decoding import Hypothesis, beam_search, greedy_search
from transduce.decoding.ctc import ctc_best_path, ctc_prefix_search
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.search import Backend
from transduce.evaluation import (
    Evaluation,
    bits_per_label,
    error_rate,
    misclassified,
    nearest_error_rate,
)
from transduce.model.checkpoint import TrainedModel
from transduce.model.losses import ctc_can_align, sequence_losses
from transduce.model.transcripts import Transcript
from transduce.networks import PredictionNetwork, TranscriptionNetwork

CELLS = 1_000_000  # of padded lattice that are taken at once
FRAMES = {"cpu": 4096, "cuda": 200_000}  # that are searched at once: caches like few, GPUs many
Done = Callable[[int], None]  # is told how many examples more are done
NAMES = {"transducer": "transducer", "ctc": "CTC", "prediction": "prediction"}


def recognise(
    model: TrainedModel,
    examples: Sequence[Example],
    *,
    beam_width: int = 1,
    n_best: int = 1,
    with_timings: bool = False,
    backend: Backend = "auto",
    done: Done | None = None,
) -> list[tuple[Hypothesis, ...]]:
    """The hypotheses of each example, best first.

    A transducer's width of 1 is the greedy search, any other Algorithm 1, by the `backend`; an
    ensemble has its own search. CTC takes its best path, or with any other width the prefix
    search, which has one hypothesis and no timings.
    """
    network = model.network
    if isinstance(network, PredictionNetwork):
        raise ValueError("a prediction network alone has no input to recognise")
    if isinstance(network, TranscriptionNetwork) and (n_best > 1 or with_timings):
        raise ValueError("CTC's searches have one output and no timings; ask for just the output")
    found: list[tuple[Hypothesis, ...]] = [()] * len(examples)
    unlabelled = [
        replace(example, labels=torch.empty(0)) if example.num_labels else example
        for example in examples
    ]
    at_once = FRAMES[_device(model).type]
    if isinstance(network, Ensemble):  # which has a lattice's column for each of either beam
        at_once //= beam_width * len(set(network.backwards))
    for indices, batch in _batches(model, unlabelled, at_once):
        if model.config.backwards:
            batch = batch.reversed()
        if isinstance(network, TranscriptionNetwork):
            hypotheses = _ctc(network, batch, beam_width)
        elif isinstance(network, Ensemble):
            hypotheses = [
                tuple(best)
                for best in network.search(
                    batch.frames, batch.num_frames,
                    beam_width=beam_width, n_best=n_best, with_timings=with_timings,
                )
            ]  # fmt: skip
        elif beam_width == 1 and n_best == 1 and not with_timings:
            hypotheses = [(h,) for h in greedy_search(network, batch.frames, batch.num_frames)]
        else:
            searched = beam_search(
                network, batch.frames, batch.num_frames,
                beam_width=beam_width, n_best=n_best, with_timings=with_timings, backend=backend,
            )  # fmt: skip
            hypotheses = [tuple(best) for best in searched]
        for i, best in zip(indices, hypotheses, strict=True):
            if model.config.backwards:
                num_vectors = examples[i].num_vectors(model.config.pooling)
                best = tuple(hypothesis.from_the_end(num_vectors) for hypothesis in best)
            found[i] = best
        if done:
            done(len(indices))
    return found


@torch.no_grad()
def _ctc(
    network: TranscriptionNetwork, batch: Batch, beam_width: int
) -> list[tuple[Hypothesis, ...]]:
    transcription, num_vectors = network.eval()(batch.frames, batch.num_frames)
    search = ctc_best_path if beam_width == 1 else ctc_prefix_search
    return [
        (Hypothesis(one.labels, one.log_prob, one.log_prob / max(1, len(one.labels)), ()),)
        for one in search(transcription, num_vectors)
    ]


def transcript(
    model: TrainedModel, example: Example, hypotheses: Sequence[Hypothesis]
) -> Transcript:
    """What was recognised in an example, in symbols, and in seconds if it is sound."""
    signature = model.signature
    shift = seconds = None
    if signature.features is not None and not isinstance(example.pair.source, Frames):
        shift = signature.features.shift * model.config.pooling
        seconds = example.num_frames * signature.features.shift
    return Transcript(
        *(example.pair.name, tuple(hypotheses), signature.targets, signature.separator),
        *(shift, seconds),
    )


def validation_error(model: TrainedModel, examples: Sequence[Example]) -> float:
    """The error rate of a network's likeliest outputs, for `training.fit`."""
    if isinstance(model.network, PredictionNetwork):
        return _misclassification_rate(model, examples)
    with warnings.catch_warnings():  # what is not trained yet may emit without end
        warnings.filterwarnings("ignore", "max_labels_per_frame")
        outputs = [[str(k) for k in best[0].labels] for best in recognise(model, examples)]
    targets = [[str(k) for k in example.labels.tolist()] for example in examples]
    return error_rate(outputs, targets, num_resamples=0).rate


def evaluate(
    model: TrainedModel,
    pairs: Sequence[Pair],
    *,
    beam_width: int = 1,
    cache: Path | None = None,
    skipped: list[DataError] | None = None,
    done: Done | None = None,
) -> Evaluation:
    """A network's log-loss and error rate on pairs that have targets.

    Outputs are compared as symbols, so that a target may have some which were never seen in
    training; the log-loss is of the pairs that have none and, of a CTC network, that it can align.
    """
    name, epochs = NAMES[model.config.network], model.standing.epoch or None
    if isinstance(model.network, PredictionNetwork):
        unseen: list[DataError] = []
        labelled = model.signature.examples(pairs, skipped=unseen)
        error = _misclassification_rate(model, labelled)
        return Evaluation(name, _bits(model, labelled), error, epochs=epochs)
    examples = model.signature.examples(pairs, with_labels=False, cache=cache, skipped=skipped)
    bits = _bits(model, _labelled(examples, model.signature.targets))
    found = recognise(model, examples, beam_width=beam_width, done=done)
    decode = model.signature.targets.decode
    detail = nearest_error_rate(
        [tuple(decode(best[0].labels)) for best in found],
        [example.pair.references for example in examples],
    )
    return Evaluation(name, bits, detail.rate, detail, epochs)


def _labelled(examples: Sequence[Example], targets: Alphabet) -> list[Example]:
    """Those whose targets have no symbol unseen in training, with their labels."""
    known = set(targets.symbols)
    return [
        replace(example, labels=torch.tensor(targets.encode(example.pair.target)))
        for example in examples
        if known.issuperset(example.pair.target)
    ]


@torch.no_grad()
def _bits(model: TrainedModel, examples: Sequence[Example]) -> float:
    model.network.eval()
    if model.config.network == "ctc":  # what it cannot align has no loss
        examples = [e for e in examples if ctc_can_align(e, model.config.pooling)]
    nats = sum(
        float(sequence_losses(model.network, model.config, batch).double().sum())
        for _, batch in _batches(model, examples)
    )
    return bits_per_label(nats, sum(e.num_labels for e in examples))


@torch.no_grad()
def _misclassification_rate(model: TrainedModel, examples: Sequence[Example]) -> float:
    network = model.network.eval()
    wrong = sum(
        misclassified(network(batch.labels), batch.labels, batch.num_labels, with_null=False)
        for _, batch in _batches(model, examples)
    )
    return wrong / sum(e.num_labels for e in examples)


def _batches(
    model: TrainedModel, examples: Sequence[Example], max_cells: int = CELLS
) -> Iterator[tuple[list[int], Batch]]:
    """Batches on the model's device, and which examples each has."""
    batches = Batches(examples, max(max_cells, _largest(examples)), 0)
    for indices in batches.by_length():
        [batch] = batches.load([indices])
        yield indices, batch.to(_device(model))


def _device(model: TrainedModel) -> torch.device:
    return next(model.network.parameters()).device


def _largest(examples: Sequence[Example]) -> int:
    return max((max(1, e.num_frames) * (e.num_labels + 1) for e in examples), default=1)
