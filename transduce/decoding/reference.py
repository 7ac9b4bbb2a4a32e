"""Algorithm 1 as the paper writes it: one hypothesis at a time, one utterance at a time.

Every other backend is tested against this one, so it is kept plain. A hypothesis is the tuple of
its labels; probabilities are logarithms in float64. Impossible hypotheses are never kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, Greedy, Labels, check_prediction
from transduce.decoding.problem import Problem
from transduce.decoding.protocols import State, log_probs


class Outputs:
    """ln Pr(k|y,t) of one utterance; the prediction network is stepped once for each prefix y."""

    def __init__(
        self, problem: Problem, transcription: Tensor, fused: FusedScores | None = None
    ) -> None:
        self.network, self.joint, self.fused = problem.network, problem.joint, fused
        self.f, self.f_array = transcription, transcription.double().cpu().numpy()
        self.number: dict[Labels, int] = {}  # prefixes, numbered as they come
        self.g: list[Tensor] = []
        self.g_arrays: list[np.ndarray] = []
        self.states: list[State] = []
        self.log_fused: list[np.ndarray] = []

    @torch.no_grad()
    def __call__(self, y: Labels, t: int) -> np.ndarray:
        i = self.number[y] if y in self.number else self._step(y)
        if self.joint is None:
            log_prob = normalise(self.f_array[t] + self.g_arrays[i])  # Eqs. 12-13
        else:
            log_prob = log_probs(self.f[t : t + 1], self.g[i], self.joint)[0].cpu().numpy()
        return log_prob + self.log_fused[i] if self.fused else log_prob

    def _step(self, y: Labels) -> int:
        label, parent = (y[-1], self.number[y[:-1]]) if y else (NULL, -1)
        before = self.states[parent] if y else self.network.start(1)
        g, state = self.network.step(torch.tensor([label], device=self.f.device), before)
        check_prediction(float(g.amax()))
        self.g.append(g)
        self.g_arrays.append(g[0].double().cpu().numpy())
        self.states.append(state)
        if self.fused:
            self.log_fused.extend(self.fused.extend([parent], [label]))
        self.number[y] = len(self.number)
        return self.number[y]


def normalise(log_density: np.ndarray) -> np.ndarray:
    """Return ln Pr(k) from ln h(k) (Eq. 13); where every density is 0, so is every probability."""
    largest = log_density.max()
    if largest > -np.inf:
        log_density = log_density - largest - np.log(np.exp(log_density - largest).sum())
    return log_density


def beam_searches(problem: Problem) -> list[Found]:
    """Return the beam B after the last frame of each utterance."""
    return [_beam_search(problem, f) for f in problem.transcriptions]


def _beam_search(problem: Problem, transcription: Tensor) -> Found:
    log_pr = Outputs(problem, transcription, problem.fused_scores())
    num_bounded = num_expanded = 0
    for step in beam_steps(log_pr, problem.beam_width, problem.max_labels_per_frame):
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


def greedy_searches(problem: Problem) -> list[Greedy]:
    """Return each utterance's greedy alignment."""
    return [_greedy_search(problem, f) for f in problem.transcriptions]


def _greedy_search(problem: Problem, transcription: Tensor) -> Greedy:
    log_pr = Outputs(problem, transcription)
    labels: list[int] = []
    frames: list[int] = []
    log_prob, num_bounded = 0.0, 0
    for t in range(len(transcription)):
        leaving: list[float] = []  # ln Pr of null after each number of labels in this frame
        for emitted in range(problem.max_labels_per_frame + 1):
            outputs = log_pr(tuple(labels), t)
            k = int(outputs.argmax())
            leaving.append(log_prob + float(outputs[NULL]))
            if k != NULL and emitted == problem.max_labels_per_frame:
                # Departure: the most probable way to leave the frame, of those on the path.
                num_bounded += 1
                log_prob = max(leaving)
                kept = len(labels) - emitted + leaving.index(log_prob)
                del labels[kept:], frames[kept:]
                break
            log_prob += float(outputs[k])
            if k == NULL:
                break
            labels.append(k)
            frames.append(t)
    return Greedy(tuple(labels), tuple(frames), log_prob, num_bounded)


class Step(NamedTuple):
    """The state of the search after a frame."""

    beam: dict[Labels, float]  # B, with ln Pr(y) of each y in it, best first
    bounded: bool = False  # whether `max_labels_per_frame` was met
    num_expanded: int = 0  # hypotheses


def beam_steps(log_pr: Outputs, beam_width: int, max_labels_per_frame: int) -> Iterator[Step]:
    """Run Algorithm 1; yield its initial state, and the state after each frame."""
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
            # the one whose labels come first in lexicographic order counts as the better.
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
                # Departure: an extension that was in A when the frame began keeps its sum, which
                # already includes Pr(y*) Pr(k|y*,t).
                if y + (k,) not in begun and outputs[k] > -np.inf:
                    # Departure: Pr(y*) is its value before the product with Pr(∅|y*,t).
                    heappush(open_hypotheses, (-(log_prob + outputs[k]), y + (k,), emitted + 1))
        worst = best[0] if len(best) == beam_width else -np.inf
        beam = dict(sorted(beam.items(), key=lambda one: (-one[1], one[0]))[:beam_width])
        yield Step(beam, bool(-np.inf < bounded >= worst), num_expanded)


def add_prefixes(beam: dict[Labels, float], log_pr: Outputs, t: int) -> dict[Labels, float]:
    """Return A: Pr(y) += Σ Pr(ŷ) Pr(y|ŷ,t) over the proper prefixes ŷ of y in the beam."""
    sums = {}
    for y, log_prob in beam.items():
        total, between = log_prob, 0.0
        for u in reversed(range(len(y))):
            between += log_pr(y[:u], t)[y[u]]  # Pr(y|ŷ,t), of ŷ = y[:u]
            # Departure: Pr(ŷ) is its value before its own sum, or paths would count twice.
            if y[:u] in beam:
                total = np.logaddexp(total, beam[y[:u]] + between)
        sums[y] = total
    return sums
