"""Minimum-risk training: the expected label errors over candidates.

The candidates of an input are its targets and the best outputs of the initial network. They are
found once, without augmentation, and serve in every epoch; Pr(y|x) of each is computed anew in
every step (docs/derivations.md, section 12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from transduce.architectures import Transducer
from transduce.data.batches import Batch, Example
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.training.loading import load_by_length

# The share of -ln Pr(y|x) of the target in the objective. The expected errors depend on the ratios
# of the candidates' probabilities alone, and all of these together could go to other outputs: more
# keeps the log-loss, less leaves more to the errors.
LIKELIHOOD = 0.05


class CandidateRows(NamedTuple):
    """The candidates of a batch, C in all. The first one of each input is its own target."""

    labels: Tensor  # [C, U]
    num_labels: Tensor  # [C]
    inputs: Tensor  # [C], the input of each, in ascending order
    places: Tensor  # [C], the place of each among the candidates of its input
    errors: Tensor  # [B, W], label errors; 0 where an input has fewer than W candidates

    def to(self, device: torch.device | str) -> CandidateRows:
        """Copy the tensors to a device."""
        return CandidateRows(*(tensor.to(device) for tensor in self))


class CandidateErrors:
    """The candidates of all examples, in a few flat arrays."""

    def __init__(self, errors: Sequence[Mapping[Labels, int]]) -> None:
        """Take the label errors of each example's candidates; the first one is its target."""
        lengths = [len(labels) for candidates in errors for labels in candidates]
        self._labels = np.fromiter(
            (label for candidates in errors for labels in candidates for label in labels), np.int64
        )
        self._num_labels = np.array(lengths, np.int64)
        self._starts = np.cumsum(self._num_labels) - self._num_labels  # in the labels
        self._errors = np.array([e for candidates in errors for e in candidates.values()])
        self._counts = np.array([len(candidates) for candidates in errors], np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts  # in the candidates

    def rows(self, ids: Sequence[int]) -> CandidateRows:
        """Return the candidates of some examples, as the inputs 0, 1, ... of a batch."""
        counts = self._counts[ids]
        inputs = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(inputs)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.repeat(self._firsts[ids], counts) + places
        num_labels = self._num_labels[chosen]
        labels = np.zeros((len(chosen), num_labels.max()), np.int64)
        row, u = np.nonzero(np.arange(labels.shape[1]) < num_labels[:, None])
        labels[row, u] = self._labels[self._starts[chosen][row] + u]
        errors = np.zeros((len(counts), counts.max()), np.float32)
        errors[inputs, places] = self._errors[chosen]
        return CandidateRows(*map(torch.from_numpy, (labels, num_labels, inputs, places, errors)))


def find_candidate_errors(
    network: Transducer, examples: Sequence[Example], num_best: int, device: torch.device
) -> CandidateErrors:
    """Return the candidates of each example: its target, and the best outputs of the network.

    All targets of one source are correct: each is a candidate, and the errors of a candidate are
    its edit distance from the nearest of them.
    """
    targets: dict[object, list[Labels]] = {}
    for example in examples:
        targets.setdefault(example.pair.source, []).append(_labels(example))
    unique = list({example.pair.source: example for example in examples}.values())
    options = SearchOptions(beam_width=num_best, n_best=num_best, with_timings=False)
    errors: dict[object, dict[Labels, int]] = {}
    network.to(device).eval()
    for ids, batch in load_by_length(unique, device):
        for i, hypotheses in zip(ids, network.search(batch, options), strict=True):
            correct = targets[unique[i].pair.source]
            outputs = [hypothesis.labels for hypothesis in hypotheses]
            errors[unique[i].pair.source] = {
                labels: min(Levenshtein.distance(labels, target) for target in correct)
                for labels in (*correct, *outputs)
            }
    # The first key of a union stays first.
    return CandidateErrors([{_labels(one): 0} | errors[one.pair.source] for one in examples])


def candidate_losses(network: Transducer, batch: Batch, candidates: CandidateRows) -> Tensor:
    """Return -ln Pr(y|x) of the candidates of each input, [B, W], and inf in padding."""
    labels, num_labels, inputs, places, errors = candidates
    losses = network.candidate_losses(batch, inputs, labels, num_labels)
    padded = losses.new_full(errors.shape, torch.inf)
    return padded.index_put((inputs, places), losses)


def expected_errors(losses: Tensor, errors: Tensor) -> Tensor:
    """Return the risk R = Σ q(y) e(y) of each input, [B], where q is Pr(y|x) over the candidates.

    The arguments are -ln Pr(y|x) and e(y), [B, W]; a loss of inf makes a place count nothing.
    """
    return ((-losses).softmax(1) * errors).sum(1)


def risk_losses(
    network: Transducer, batch: Batch, candidates: CandidateRows
) -> tuple[Tensor, Tensor]:
    """Return -ln Pr(y|x) of each target and what training minimises, both [B]."""
    losses = candidate_losses(network, batch, candidates)
    target = losses[:, 0]
    return target, expected_errors(losses, candidates.errors) + LIKELIHOOD * target


def _labels(example: Example) -> Labels:
    return tuple(example.labels.tolist())
