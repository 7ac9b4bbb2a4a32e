"""Shallow fusion: language models of the labels in the search."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from transduce.alphabet import NULL
from transduce.networks import PredictionNetwork


class LanguageModel(Protocol):
    """A model of label sequences that reads them from left to right."""

    def start(self) -> Any:
        """Return the state before the first label."""

    def advance(self, state: Any, label: int) -> Any:
        """Return the state after one more label."""

    def log_probs(self, state: Any) -> Sequence[float] | np.ndarray:
        """Return ln Pr(k|y) of every label; that of label k is at k-1."""


Fusion = LanguageModel | PredictionNetwork  # a network must have `with_null=False`


class NGram:
    """An n-gram model of label sequences with Witten-Bell smoothing.

    A context that was followed by c labels, d of them distinct, gives its own counts the weight
    c / (c + d) and the context one label shorter the rest. Below the empty context all labels are
    equally probable.
    """

    def __init__(self, order: int, num_labels: int, sequences: Iterable[Sequence[int]]) -> None:
        if order < 1:
            raise ValueError(f"order must be at least 1, not {order}")
        if num_labels < 1:
            raise ValueError(f"num_labels must be at least 1, not {num_labels}")
        self.order, self.num_labels = order, num_labels
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._known: dict[tuple[int, ...], list[float]] = {}
        for i, sequence in enumerate(sequences):
            labels = [self._checked(label, i) for label in sequence]
            for u, label in enumerate(labels):
                for n in range(min(order - 1, u) + 1):
                    self._counts[tuple(labels[u - n : u])][label] += 1

    def _checked(self, label: Any, i: int) -> int:
        """Return a label of sequence i as an int; it may be a tensor."""
        try:
            k = operator.index(label)
        except TypeError:
            k = NULL
        if not 1 <= k <= self.num_labels:
            raise ValueError(
                f"sequence {i} has {label!r}, which is no id from 1 to {self.num_labels}; encode "
                "the symbols with the alphabet, without null"
            )
        return k

    def start(self) -> tuple[int, ...]:
        """Return the empty context."""
        return ()

    def advance(self, state: tuple[int, ...], label: int) -> tuple[int, ...]:
        """Return the context of at most order - 1 labels that ends with `label`."""
        return (*state, label)[max(0, len(state) + 2 - self.order) :]

    def log_probs(self, state: tuple[int, ...]) -> list[float]:
        """Return ln Pr(k|context) of every label."""
        if state not in self._known:
            self._known[state] = [math.log(p) for p in self._probs(state)]
        return self._known[state]

    def _probs(self, context: tuple[int, ...] | None) -> list[float]:
        if context is None:
            return [1 / self.num_labels] * self.num_labels
        shorter = self._probs(context[1:] if context else None)
        counts = self._counts.get(context, Counter())
        total = counts.total() + len(counts)
        if total == 0:
            return shorter
        return [(counts[k + 1] + len(counts) * p) / total for k, p in enumerate(shorter)]


class FusedScores:
    """weight x ln Pr(k|y) of prefixes y, which are numbered as they come, the empty one first."""

    def __init__(self, model: Fusion, weight: float, num_labels: int) -> None:
        self.weight, self.num_labels = weight, num_labels
        self._model = _Network(model) if isinstance(model, PredictionNetwork) else model
        self._states: list[Any] = []

    def extend(self, parents: Iterable[int], labels: Iterable[int]) -> np.ndarray:
        """Add n prefixes, each its parent's number and a label; return their scores [n, K+1].

        Null's score is 0. The empty sequence has the label null.
        """
        first = len(self._states)
        for parent, label in zip(parents, labels, strict=True):
            self._states.append(
                self._model.start()
                if label == NULL
                else self._model.advance(self._states[parent], label)
            )
        rows = np.zeros((len(self._states) - first, self.num_labels + 1))
        for row, state in zip(rows, self._states[first:], strict=True):
            log_probs = np.asarray(self._model.log_probs(state), np.float64)
            if log_probs.shape != (self.num_labels,):
                raise ValueError(
                    f"fusion must give the {self.num_labels} labels' log-probabilities, not an "
                    f"array of shape {list(log_probs.shape)}"
                )
            if not (log_probs <= 1e-6).all():
                raise ValueError("fusion gave a log-probability that is more than 0")
            row[1:] = self.weight * np.minimum(log_probs, 0)
        return rows

    def keep(self, numbers: Sequence[int]) -> None:
        """Forget all prefixes but these, which are numbered anew in this order."""
        self._states = [self._states[number] for number in numbers]


class _Network:
    """A standalone prediction network as a `LanguageModel`; its states are (log_probs, state)."""

    def __init__(self, network: PredictionNetwork) -> None:
        if network.with_null:
            raise ValueError("fusion must be a PredictionNetwork(with_null=False)")
        self._network = network

    def start(self) -> Any:
        return self._step(NULL, self._network.start(1))

    def advance(self, state: Any, label: int) -> Any:
        return self._step(label, state[1])

    def log_probs(self, state: Any) -> Any:
        return state[0]

    @torch.no_grad()
    def _step(self, label: int, state: Any) -> tuple[np.ndarray, Any]:
        device = self._network.output.weight.device
        g, state = self._network.step(torch.tensor([label], device=device), state)
        return g[0].double().log_softmax(0).cpu().numpy(), state
