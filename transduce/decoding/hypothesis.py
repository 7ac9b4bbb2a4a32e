"""What a search finds: hypotheses, and when each of their labels was emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.lattice.loss import backward_variables, best_alignment, forward_variables

TAIL = 0.05  # of the emission's posterior, left out before `start` and after `end`


class Timing(NamedTuple):
    """When a label was emitted, in transcription vectors from 0, and how sure it is."""

    frame: int  # on the most probable alignment
    start: int  # the label has been emitted by this frame with probability 5 %
    end: int  # and by this one with 95 %
    confidence: float  # that a label emitted there is this one


@dataclass(frozen=True)
class Hypothesis:
    """An output sequence, and how it was found."""

    labels: tuple[int, ...]  # ids, null excluded
    log_prob: float  # ln Pr(y) as the search found it; a greedy search's is its alignment's
    score: float  # what hypotheses are sorted by
    frames: tuple[int, ...]  # at which the most probable alignment emits each label, from 0
    timings: tuple[Timing, ...] = ()  # of each label, where asked for

    def from_the_end(self, num_vectors: int) -> Hypothesis:
        """What was found from the last of so many vectors to the first, from the first on."""
        last = num_vectors - 1
        return replace(
            self,
            labels=self.labels[::-1],
            frames=tuple(last - frame for frame in reversed(self.frames)),
            timings=tuple(
                Timing(last - t.frame, last - t.end, last - t.start, t.confidence)
                for t in reversed(self.timings)
            ),
        )


class Found(NamedTuple):
    """What is in B after the last frame, in any order, and what it took."""

    log_prob: np.ndarray  # [n], float64
    num_labels: np.ndarray  # [n]
    labels: Callable[[int], tuple[int, ...]]  # of the i-th
    num_bounded: int  # frames in which the bound on labels was met
    num_expanded: int  # hypotheses
    num_prefixes: int  # that the prediction network was stepped to


def check_prediction(largest: float) -> None:
    """Raise ValueError if the largest number in the prediction vectors is none to search with.

    NaN anywhere makes the largest NaN; -inf is an impossible output.
    """
    if not largest < np.inf:
        raise ValueError(
            "the prediction network gave NaN or +inf; check its weights, or train it again"
        )


def label_timings(log_null: Tensor, log_label: Tensor) -> list[Timing]:
    """The timing of each label of y, from the lattice that `lattice_transitions` returns.

    Given y, label u is emitted at frame t with probability α(t,u-1) y(t,u-1) β(t,u) / Pr(y|x), so
    these sum to one over t: start and end are their 5 % and 95 % quantiles. The confidence is
    Pr(y_u|t,u-1) / (1 - Pr(∅|t,u-1)), the probability that a label is this one if there is one,
    averaged over t with those weights.
    """
    null, label = log_null.detach().double(), log_label.detach().double()
    frames, log_prob = best_alignment(null, label)
    if log_prob == -torch.inf:
        raise ValueError("the labels cannot be emitted, so they have no timings")
    log_alpha, log_beta = forward_variables(null, label), backward_variables(null, label)
    log_emitted = log_alpha[:, :-1] + label + log_beta[:, 1:] - log_beta[0, 0]
    emitted = log_emitted.exp()  # [T, U]
    emitted_by = emitted.cumsum(0)
    starts = (emitted_by < TAIL).sum(0)
    ends = (emitted_by < 1 - TAIL).sum(0).clamp(max=len(null) - 1)
    if_any = (label - torch.log(-torch.expm1(null[:, :-1]))).exp().clamp(max=1)
    confidences = torch.where(emitted > 0, emitted * if_any, 0.0).sum(0).clamp(max=1)
    columns = (frames, starts.tolist(), ends.tolist(), confidences.tolist())
    return [Timing(*row) for row in zip(*columns, strict=True)]


def best_of(
    found: Found, n_best: int, length_normalised: bool
) -> list[tuple[tuple[int, ...], float, float]]:
    """The labels, log_prob and score of the n best; equals in the order of their labels.

    Departure: the paper's log Pr(y) / |y| does not exist for the empty sequence: it counts as one
    label long.
    """
    lengths = np.maximum(found.num_labels, 1) if length_normalised else 1
    scores = found.log_prob / lengths
    if len(scores) > n_best:
        chosen = np.nonzero(scores >= np.partition(scores, -n_best)[-n_best])[0]
    else:
        chosen = np.arange(len(scores))
    best = [(found.labels(i), float(found.log_prob[i]), float(scores[i])) for i in chosen.tolist()]
    return sorted(best, key=lambda one: (-one[2], one[0]))[:n_best]
