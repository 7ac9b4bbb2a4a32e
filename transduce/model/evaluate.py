"""Evaluate a trained network: its log-loss and error rate on pairs with targets."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from transduce.alphabet import Alphabet
from transduce.data.batches import Example
from transduce.data.pairs import DataError, Pair, Symbols, check_some_left, skipping
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.options import SearchOptions
from transduce.evaluation import (
    Evaluation,
    bits_per_label,
    error_rate,
    misclassified,
    nearest_error_rate,
)
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import Model, batches_of, group_sizes, search_examples
from transduce.model.reading import GroupSizes, Reader, Ready, in_groups

GREEDY = SearchOptions(with_timings=False)
Done = Callable[[int], None]  # called with the number of examples since the last call


def evaluate(
    model: TrainedModel,
    pairs: Sequence[Pair],
    options: SearchOptions = GREEDY,
    *,
    convert: bool = False,
    skipped: list[DataError] | None = None,
    done: Done = lambda count: None,
) -> Evaluation:
    """Return a network's log-loss and error rate on pairs.

    Refuse sounds of another rate or with several channels, as training does, unless `convert`.
    Outputs and targets are compared as symbols, so a target may have symbols that the network does
    not know. The log-loss is over the pairs whose targets the network knows and can align. The
    outputs of a continuous transducer have no error rate; its bits are those of an output.
    """
    model = Model.of(model)
    name, epochs = model.network.kind, model.status.epoch or None
    if isinstance(model.network, Ensemble):
        name = f"{len(model.network.members) + len(model.network.scorers)} models"
    if not model.network.reads_input:
        unseen: list[DataError] = []
        labelled = model.signature.examples(pairs, skipped=unseen)
        error = _misclassification_rate(model, labelled)
        return Evaluation(name, bits_per_label(*_nats(model, labelled)), error, epochs=epochs)
    if not model.network.has_labels:
        labelled = model.signature.examples(
            pairs, unknown="refuse", convert=convert, skipped=skipped
        )
        check_some_left(labelled, skipped)
        done(len(labelled))
        bits = bits_per_label(*_nats(model, labelled))
        return Evaluation(name, bits, math.nan, epochs=epochs)
    targets, nats, num_labels = model.signature.targets, 0.0, 0
    outputs: list[list[str]] = []
    references: list[tuple[Symbols, ...]] = []
    for group in _groups(model, pairs, convert, skipped):
        loss, count = _nats(model, _labelled(_examples(group), targets))
        nats, num_labels = nats + loss, num_labels + count
        for held in in_groups(group, group_sizes(model.device)):
            examples = _examples(held)
            found = search_examples(model, examples, options)
            outputs += [targets.decode(hypotheses[0].labels) for hypotheses in found]
            references += [example.pair.references for example in examples]
            done(len(examples))
    bits = bits_per_label(nats, num_labels)
    detail = nearest_error_rate(outputs, references)
    return Evaluation(name, bits, detail.rate, detail, epochs)


def _groups(
    model: Model, pairs: Sequence[Pair], convert: bool, skipped: list[DataError] | None
) -> Iterator[list[Ready]]:
    """Yield the pairs, read: all of them at once, or for a GPU a group while the next is read.

    Raise a DataError for a bad pair, or append it to `skipped` and leave the pair out.
    """
    sizes = group_sizes(model.device)
    if model.device.type == "cpu":
        sizes = GroupSizes(*[sys.maxsize] * 3)
    num_left = 0
    reader = Reader(model.signature, model.device, unknown="null", convert=convert)
    for parts in reader.groups(pairs, sizes):
        for part in parts:
            with skipping(skipped):
                if isinstance(part.read, DataError):
                    raise part.read
        group = [part for part in parts if isinstance(part.read, Example)]
        num_left += len(group)
        yield group
    check_some_left(range(num_left), skipped)


def _examples(parts: Sequence[Ready]) -> list[Example]:
    return [part.read for part in parts if isinstance(part.read, Example)]


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
def _nats(model: TrainedModel, examples: Sequence[Example]) -> tuple[float, int]:
    """Return the summed log-loss and number of labels of what the network can align."""
    network = model.network.eval()
    examples = [example for example in examples if network.can_align(example)]
    nats = sum(
        float(network.losses(batch).double().sum()) for _, batch in batches_of(model, examples)
    )
    return nats, sum(e.num_labels for e in examples)


@torch.no_grad()
def _misclassification_rate(model: TrainedModel, examples: Sequence[Example]) -> float:
    """Return the share of labels that are not the most probable after the labels before them."""
    network = model.network.eval()
    wrong = sum(
        misclassified(network(batch.labels), batch.labels, batch.num_labels, with_null=False)
        for _, batch in batches_of(model, examples)
    )
    return wrong / sum(e.num_labels for e in examples)
