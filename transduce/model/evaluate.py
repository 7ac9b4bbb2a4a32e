"""Evaluate a trained network: its log-loss and error rate on pairs with targets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transduce.alphabet import Alphabet
from transduce.data.batches import Example
from transduce.data.pairs import DataError, Pair, check_some_left
from transduce.decoding.options import SearchOptions
from transduce.evaluation import (
    Evaluation,
    bits_per_label,
    error_rate,
    misclassified,
    nearest_error_rate,
)
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import Model, batches_of, search_examples

GREEDY = SearchOptions(with_timings=False)
Done = Callable[[int], None]  # called with the number of examples since the last call


def evaluate(
    model: TrainedModel,
    pairs: Sequence[Pair],
    options: SearchOptions = GREEDY,
    *,
    cache: Path | None = None,
    skipped: list[DataError] | None = None,
    done: Done = lambda count: None,
) -> Evaluation:
    """Return a network's log-loss and error rate on pairs.

    Outputs and targets are compared as symbols, so a target may have symbols that the network does
    not know. The log-loss is over the pairs whose targets the network knows and can align.
    """
    model = Model.of(model)
    name, epochs = model.network.kind, model.status.epoch or None
    if not model.network.reads_input:
        unseen: list[DataError] = []
        labelled = model.signature.examples(pairs, skipped=unseen)
        error = _misclassification_rate(model, labelled)
        return Evaluation(name, _bits(model, labelled), error, epochs=epochs)
    examples = model.signature.examples(pairs, with_labels=False, cache=cache, skipped=skipped)
    check_some_left(examples, skipped)
    bits = _bits(model, _labelled(examples, model.signature.targets))
    outputs = []
    for transcript in model.transcripts(examples, options):
        outputs.append(transcript.symbols)
        done(1)
    detail = nearest_error_rate(outputs, [example.pair.references for example in examples])
    return Evaluation(name, bits, detail.rate, detail, epochs)


def validation_error(model: TrainedModel, examples: Sequence[Example]) -> float:
    """Return the error rate of the greedy search, as `training.fit` needs it."""
    if not model.network.reads_input:
        return _misclassification_rate(model, examples)
    with warnings.catch_warnings():  # an untrained network may emit labels endlessly
        warnings.filterwarnings("ignore", "max_labels_per_frame")
        found = search_examples(model, examples, GREEDY)
    outputs = [[str(k) for k in best[0].labels] for best in found]
    targets = [[str(k) for k in example.labels.tolist()] for example in examples]
    return error_rate(outputs, targets, num_resamples=0).rate


def _labelled(examples: Sequence[Example], targets: Alphabet) -> list[Example]:
    """Return the examples whose target symbols are all known, with their labels."""
    known = set(targets.symbols)
    return [
        replace(example, labels=torch.tensor(targets.encode(example.pair.target)))
        for example in examples
        if known.issuperset(example.pair.target)
    ]


@torch.no_grad()
def _bits(model: TrainedModel, examples: Sequence[Example]) -> float:
    """Return the log-loss in bits per label of the examples that the network can align."""
    network = model.network.eval()
    examples = [example for example in examples if network.can_align(example)]
    nats = sum(
        float(network.losses(batch).double().sum()) for _, batch in batches_of(model, examples)
    )
    return bits_per_label(nats, sum(e.num_labels for e in examples))


@torch.no_grad()
def _misclassification_rate(model: TrainedModel, examples: Sequence[Example]) -> float:
    """Return the share of labels that are not the most probable after the labels before them."""
    network = model.network.eval()
    wrong = sum(
        misclassified(network(batch.labels), batch.labels, batch.num_labels, with_null=False)
        for _, batch in batches_of(model, examples)
    )
    return wrong / sum(e.num_labels for e in examples)
