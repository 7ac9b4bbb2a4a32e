"""Other ways to say parts of a label sequence, and their likelihoods.

The prediction network depends on all labels so far, so that the sequences that differ from y in one
place share no nodes of the lattice after it. But it forgets: CONTEXT labels later, a sequence with
a detour is taken to continue as y does. `LabelPath.gains` thus scores hundreds of detours in the
time of a few lattices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.decoding.hypothesis import Labels
from transduce.kernels.sentinels import NEVER
from transduce.lattice.loss import lattice_transitions

if TYPE_CHECKING:  # what needs Numba is imported when it is used
    from transduce.decoding.cpu.prediction import PackedWeights

CONTEXT = 3  # labels after a detour whose prediction vectors it changes: accuracy against time
# A detour's alignments are summed over the vectors from where y emits the label so many labels
# before it to where y emits the label so many after it, and at least so many vectors around it.
MARGIN_LABELS, MARGIN_VECTORS = 3, 25


class Detour(NamedTuple):
    """The labels [start:end] of y replaced by others."""

    start: int
    end: int
    labels: Labels

    def applied_to(self, labels: Labels) -> Labels:
        """Return y with this detour."""
        return labels[: self.start] + self.labels + labels[self.end :]


@dataclass(frozen=True, eq=False)
class LabelPath:
    """The label sequence y in the lattice of an input."""

    vectors: np.ndarray  # [T, K+1], f
    weights: PackedWeights  # of the prediction network
    labels: Labels  # y

    @classmethod
    def of(cls, vectors: Tensor, weights: PackedWeights, labels: Labels) -> LabelPath:
        """Make a path through the lattice of transcription vectors."""
        return cls(np.ascontiguousarray(vectors.cpu().double().numpy()), weights, labels)

    def with_labels(self, labels: Labels) -> LabelPath:
        """Return another path through the same lattice."""
        return LabelPath(self.vectors, self.weights, labels)

    @cached_property
    def _variables(self) -> tuple[np.ndarray, np.ndarray]:
        """ln α(t,u) and ln β(t,u), [T, U+1]."""
        from transduce.lattice.cpu.detours import variables

        g = torch.from_numpy(_Steps(self.weights, self.labels).predictions())
        y = torch.tensor(self.labels, dtype=torch.int64)
        arrows = lattice_transitions(torch.from_numpy(self.vectors), g, y)
        found: tuple[np.ndarray, np.ndarray] = variables(*(one.numpy() for one in arrows))
        return found

    @cached_property
    def log_likelihood(self) -> float:
        """ln Pr(y|x) (Eq. 17); -inf if y cannot be emitted."""
        evidence = float(self._variables[1][0, 0])
        return evidence if evidence > NEVER else -np.inf

    @cached_property
    def frames(self) -> np.ndarray:
        """The vector at which each label is most probably emitted, [U]."""
        log_alpha, log_beta = self._variables
        # Label u is emitted before t with the probability that the alignment is above row u there.
        passed = np.logaddexp.accumulate(log_alpha + log_beta, axis=1)[:, :-1]
        before = passed > self.log_likelihood + np.log(0.5)  # whether it comes after t
        frames: np.ndarray = before.sum(0).clip(0, len(passed) - 1)
        return frames

    def gains(self, detours: Sequence[Detour]) -> np.ndarray:
        """Return ln of each detour's likelihood ratio against y, [N]."""
        from transduce.lattice.cpu.detours import detour_log_likelihoods

        if not detours:
            return np.empty(0)
        U, steps = len(self.labels), _Steps(self.weights, self.labels)
        ways = [self._way(detour) for detour in detours]
        longest = max(len(way) for _, _, way in ways)
        nodes = np.full((len(ways), longest + 1), -1, np.int64)
        labels = np.full((len(ways), longest), -1, np.int64)
        for i, (leave, _, way) in enumerate(ways):
            labels[i, : len(way)] = way
            nodes[i, : len(way) + 1] = steps.walk(leave, way)
        leaves, joins = (np.array([way[k] for way in ways]) for k in range(2))
        firsts, lasts = self._windows(leaves, joins)
        found = detour_log_likelihoods(
            self.vectors, steps.predictions(), nodes, labels, leaves, joins, firsts, lasts,
            *self._variables,
        )  # fmt: skip
        assert joins.max() <= U
        gains: np.ndarray = np.maximum(found, NEVER) - self.log_likelihood
        return gains

    def _way(self, detour: Detour) -> tuple[int, int, Labels]:
        """Return where a detour leaves y, where it joins it, and its labels between."""
        start, end, other = detour
        replaced = self.labels[start:end]
        same = 0  # labels with which both begin
        while same < min(len(replaced), len(other)) and replaced[same] == other[same]:
            same += 1
        join = min(end + CONTEXT, len(self.labels))
        return start + same, join, other[same:] + self.labels[end:join]

    def _windows(self, leaves: np.ndarray, joins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first vector of each detour, and the one after its last."""
        T, U = len(self.vectors), len(self.labels)
        frames = np.concatenate([[0], self.frames, [T - 1]])  # of label u at u
        before = frames[(leaves + 1 - MARGIN_LABELS).clip(0, U + 1)]
        after = frames[(joins + MARGIN_LABELS).clip(0, U + 1)]
        firsts = np.minimum(before, frames[(leaves + 1).clip(0, U + 1)] - MARGIN_VECTORS).clip(0)
        lasts = np.maximum(after, frames[joins] + MARGIN_VECTORS) + 1
        return firsts, lasts.clip(1, T)


class _Steps:
    """The nodes that label sequences lead to; y's own come first, node u after u labels."""

    def __init__(self, weights: PackedWeights, labels: Labels) -> None:
        self._weights, self._parents, self._labels = weights, [-1], [0]
        self._children = list[dict[int, int]]([{}])
        self._levels = list[int]([0])
        for node, label in enumerate(labels):
            self._child(node, label)

    def walk(self, node: int, labels: Labels) -> list[int]:
        """Return the nodes on the way from a node along some labels."""
        way = [node]
        for label in labels:
            after = self._children[way[-1]].get(label)
            way.append(self._child(way[-1], label) if after is None else after)
        return way

    def _child(self, parent: int, label: int) -> int:
        node = len(self._parents)
        self._parents.append(parent)
        self._labels.append(label)
        self._levels.append(self._levels[parent] + 1)
        self._children.append({})
        self._children[parent][label] = node
        return node

    def predictions(self) -> np.ndarray:
        """Return g of every node, [N, K+1], in float64."""
        from transduce.decoding.cpu.prediction import step_levels

        levels = np.array(self._levels)
        order = np.argsort(levels, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        parents, labels = np.array(self._parents)[order], np.array(self._labels)[order]
        parents[1:] = place[parents[1:]]
        starts = np.searchsorted(levels[order], np.arange(levels.max() + 2))
        g = step_levels(starts, self._weights, parents, labels)
        found: np.ndarray = g[place].astype(np.float64)
        return found
