"""Hypotheses: output sequences that a search has found, and when their labels were emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.lattice.loss import Arrows, label_emissions
from transduce.lattice.operators import lattice_backend, wide

Labels = tuple[int, ...]
TAIL = 0.05  # probability outside [start, end] on either side: wider intervals against surer ones


class Timing(NamedTuple):
    """The time of a label's emission, in transcription vectors from 0, and its confidence."""

    frame: int  # on the most probable alignment
    start: int  # the 5 % quantile of the emission's posterior
    end: int  # the 95 % quantile
    confidence: float  # that a label emitted there is this one

    def shifted(self, vectors: int) -> Timing:
        """Return the timing so many vectors later."""
        return self._replace(
            frame=self.frame + vectors, start=self.start + vectors, end=self.end + vectors
        )


@dataclass(frozen=True)
class Hypothesis:
    """An output sequence with its score and timings."""

    labels: Labels  # ids, null excluded
    log_prob: float  # ln Pr(y) as the search found it; a greedy search's is its alignment's
    score: float  # the sort key: log_prob, divided by the length where asked for
    frames: tuple[int, ...]  # at which the most probable alignment emits each label, from 0
    timings: tuple[Timing, ...] = ()  # one a label, where asked for

    def reversed(self, num_vectors: int) -> Hypothesis:
        """Map a hypothesis that was decoded on reversed input back to forward time."""
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


def join_hypotheses(
    earlier: Sequence[Hypothesis],
    later: Sequence[Hypothesis],
    offset: int,  # vectors before the later part
    number: int,
    length_normalised: bool,
) -> tuple[Hypothesis, ...]:
    """Return the best combinations of the hypotheses of two parts of an input, best first.

    Of a part's n-th hypothesis, only those combinations are looked at in which the product of both
    ranks is at most `number`: by log Pr(y) the best are among them. Ties keep the order of ranks.
    """
    joined: dict[Labels, Hypothesis] = {}
    for rank, before in enumerate(earlier, 1):
        for after in later[: number // rank]:
            labels, log_prob = before.labels + after.labels, before.log_prob + after.log_prob
            if labels in joined and joined[labels].log_prob >= log_prob:
                continue
            joined[labels] = Hypothesis(
                labels,
                log_prob,
                log_prob / max(1, len(labels)) if length_normalised else log_prob,
                before.frames + tuple(frame + offset for frame in after.frames),
                before.timings + tuple(timing.shifted(offset) for timing in after.timings),
            )
    return tuple(sorted(joined.values(), key=lambda h: -h.score)[:number])


class Found(NamedTuple):
    """The beam B after the last frame, in any order, and the work it took."""

    log_prob: np.ndarray  # [n], float64
    num_labels: np.ndarray  # [n]
    labels: Callable[[int], Labels]  # returns the labels of the i-th hypothesis
    num_bounded: int  # frames in which `max_labels_per_frame` was met
    num_expanded: int  # hypotheses expanded
    num_prefixes: int  # prefixes that the prediction network was stepped to


class Greedy(NamedTuple):
    """One utterance's greedy alignment."""

    labels: Labels
    frames: tuple[int, ...]  # at which each label is emitted
    log_prob: float
    num_bounded: int  # frames in which `max_labels_per_frame` was met


def path_labels(node: int, parent: np.ndarray | Tensor, label: np.ndarray | Tensor) -> Labels:
    """Return the labels on the path from a trie's root, node 0, to `node`."""
    reversed_labels = []
    while node > 0:
        reversed_labels.append(int(label[node]))
        node = int(parent[node])
    return tuple(reversed_labels[::-1])


def check_prediction(largest: float) -> None:
    """Raise ValueError if the largest number in the prediction vectors is NaN or +inf.

    -inf is an impossible output, and allowed.
    """
    if not largest < np.inf:
        raise ValueError(
            "the prediction network gave NaN or +inf; check its weights, or train it again"
        )


def label_timings(log_null: Tensor, log_label: Tensor) -> list[Timing]:
    """Return the timing of each label of y, from its lattice as `lattice_transitions` returns it.

    Given y, label u is emitted at frame t with probability α(t,u-1) y(t,u-1) β(t,u) / Pr(y|x).
    This posterior sums to one over t; `start` and `end` are its 5 % and 95 % quantiles. The
    confidence is its mean of Pr(y_u|t,u-1) / (1 - Pr(∅|t,u-1)): the probability that a label
    emitted at t is this one.
    """
    null, label = log_null.detach().cpu(), log_label.detach().cpu()
    return timings_from(lambda first, last: (null[first:last], label[first:last]), *label.shape)


def lattice_timings(transcription: Tensor, prediction: Tensor, labels: Labels) -> list[Timing]:
    """Return the timing of each label from f [T, K+1] and g [U+1, K+1], which are finite."""
    if not labels:
        return []
    kind = wide(transcription.dtype)
    f, g = transcription.to("cpu", kind), prediction.to("cpu", kind)
    y, lattice = torch.tensor(labels), lattice_backend("cpu")

    def arrows(first: int, last: int) -> tuple[Tensor, Tensor]:
        return lattice.lattice_transitions(f[first:last], g, y)

    return timings_from(arrows, len(f), len(labels))


def timings_from(arrows: Arrows, num_frames: int, num_labels: int) -> list[Timing]:
    """Return the timing of each label from a function that returns some rows of the lattice.

    The lattice is never in memory as a whole.
    """
    columns = label_emissions(arrows, num_frames, num_labels, TAIL)
    if columns is None:
        raise ValueError("the labels cannot be emitted, so they have no timings")
    return [Timing(*row) for row in zip(*columns, strict=True)]


def n_best(found: Found, number: int, length_normalised: bool) -> list[tuple[Labels, float, float]]:
    """Return labels, log_prob and score of the best hypotheses; ties are in the labels' order.

    Departure: the paper's log Pr(y) / |y| does not exist for the empty sequence; here the empty
    sequence counts as one label long.
    """
    lengths = np.maximum(found.num_labels, 1) if length_normalised else 1
    scores = found.log_prob / lengths
    if len(scores) > number:
        chosen = np.nonzero(scores >= np.partition(scores, -number)[-number])[0]
    else:
        chosen = np.arange(len(scores))
    best = [(found.labels(i), float(found.log_prob[i]), float(scores[i])) for i in chosen.tolist()]
    return sorted(best, key=lambda one: (-one[2], one[0]))[:number]
