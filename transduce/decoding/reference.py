"""Algorithm 1 as the paper writes it: one hypothesis at a time, one utterance at a time.

Every other backend is tested against this one, so it is kept plain. A hypothesis is the tuple of
its labels; probabilities are logarithms in float64. An impossible hypothesis is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, check_prediction
from transduce.lstm.layer import State
from transduce.networks import PredictionNetwork

Labels = tuple[int, ...]


class Outputs:
    """ln Pr(k|y,t) of one utterance, the prediction network stepped once for each prefix y."""

    def __init__(
        self, network: PredictionNetwork, transcription: Tensor, fused: FusedScores | None
    ) -> None:
        self.f = transcription.double().cpu().numpy()
        self.network, self.device, self.fused = network, transcription.device, fused
        self.number: dict[Labels, int] = {}  # of each prefix, as it came
        self.g: list[np.ndarray] = []
        self.states: list[State] = []
        self.log_fused: list[np.ndarray] = []

    def __call__(self, y: Labels, t: int) -> np.ndarray:
        i = self.number[y] if y in self.number else self._step(y)
        log_density: np.ndarray = self.f[t] + self.g[i]  # Eq. 12
        largest = log_density.max()
        if largest > -np.inf:
            log_density -= largest + np.log(np.exp(log_density - largest).sum())  # Eq. 13
        return log_density + self.log_fused[i] if self.fused else log_density

    @torch.no_grad()
    def _step(self, y: Labels) -> int:
        label, parent = (y[-1], self.number[y[:-1]]) if y else (NULL, -1)
        g, state = self.network.step(
            torch.tensor([label], device=self.device), self.states[parent] if y else None
        )
        self.g.append(g[0].double().cpu().numpy())
        check_prediction(float(self.g[-1].max()))
        self.states.append(state)
        if self.fused:
            self.log_fused.extend(self.fused.extend([parent], [label]))
        self.number[y] = len(self.number)
        return self.number[y]


def beam_searches(
    network: PredictionNetwork,
    transcriptions: list[Tensor],  # [T, K+1] each
    beam_width: int,
    max_labels_per_frame: int,
    fused: Callable[[], FusedScores | None],
) -> list[Found]:
    """B after the last frame, of each utterance."""
    return [
        _beam_search(Outputs(network, f, fused()), beam_width, max_labels_per_frame)
        for f in transcriptions
    ]


def _beam_search(log_pr: Outputs, beam_width: int, max_labels_per_frame: int) -> Found:
    num_bounded = num_expanded = 0
    for step in beam_steps(log_pr, beam_width, max_labels_per_frame):
        beam = step.beam
        num_bounded += step.bounded
        num_expanded += step.num_expanded
    labels = list(beam)
    return Found(
        np.array(list(beam.values())),
        np.array([len(y) for y in labels]),
        labels.__getitem__,
        num_bounded,
        num_expanded,
        len(log_pr.number),
    )


class Step(NamedTuple):
    """What a frame leaves of the search."""

    beam: dict[Labels, float]  # B, and ln Pr(y) of each y in it, best first
    bounded: bool = False  # whether the bound on labels was met
    num_expanded: int = 0  # hypotheses


def beam_steps(log_pr: Outputs, beam_width: int, max_labels_per_frame: int) -> Iterator[Step]:
    """Algorithm 1: how it begins, and then each frame."""
    beam: dict[Labels, float] = {(): 0.0}
    yield Step(beam)
    for t in range(len(log_pr.f)):
        begun = add_prefixes(beam, log_pr, t)  # A, with its sums
        open_hypotheses = [(-log_prob, y, 0) for y, log_prob in begun.items()]
        heapify(open_hypotheses)
        beam, bounded, num_expanded = {}, -np.inf, 0
        best: list[float] = []  # a heap of the W best probabilities in B
        while open_hypotheses and not (
            len(best) == beam_width and best[0] > -open_hypotheses[0][0]
        ):
            # y*, the most probable in A. Departure: of equally probable hypotheses, here and below,
            # that whose labels come first in lexicographic order counts as the better.
            negative, y, emitted = heappop(open_hypotheses)
            log_prob, outputs = -negative, log_pr(y, t)
            num_expanded += 1
            if outputs[NULL] > -np.inf:
                beam[y] = log_prob + outputs[NULL]
                heappush(best, beam[y])
                if len(best) > beam_width:
                    heappop(best)
            # Departure: the paper's loop has no bound, and need not end.
            if emitted == max_labels_per_frame:
                bounded = max(bounded, log_prob)
                continue
            for k in range(1, len(outputs)):
                # Departure: an extension in A from the last step keeps the sum that it was given,
                # which has Pr(y*) Pr(k|y*,t) in it.
                if y + (k,) not in begun and outputs[k] > -np.inf:
                    # Departure: Pr(y*) is the one from before its product with Pr(∅|y*,t).
                    heappush(open_hypotheses, (-(log_prob + outputs[k]), y + (k,), emitted + 1))
        worst = best[0] if len(best) == beam_width else -np.inf
        beam = dict(sorted(beam.items(), key=lambda one: (-one[1], one[0]))[:beam_width])
        yield Step(beam, bool(-np.inf < bounded >= worst), num_expanded)


def add_prefixes(beam: dict[Labels, float], log_pr: Outputs, t: int) -> dict[Labels, float]:
    """Pr(y) += Σ Pr(ŷ) Pr(y|ŷ,t) over the proper prefixes ŷ of y in A."""
    sums = {}
    for y, log_prob in beam.items():
        total, between = log_prob, 0.0
        for u in reversed(range(len(y))):
            between += log_pr(y[:u], t)[y[u]]  # Pr(y|ŷ,t), of ŷ = y[:u]
            # Departure: Pr(ŷ) is the one without its own sum, or paths would count twice.
            if y[:u] in beam:
                total = np.logaddexp(total, beam[y[:u]] + between)
        sums[y] = total
    return sums
