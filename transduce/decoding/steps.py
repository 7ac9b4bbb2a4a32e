"""Algorithm 1 frame by frame: the hypotheses in B, and where their probability came from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.decoding.problem import Problem
from transduce.decoding.protocols import TransducerModel
from transduce.decoding.reference import Outputs, beam_steps
from transduce.decoding.search import check_numbers, eval_mode, joint_of, transcribe


class Flow(NamedTuple):
    """The probability that one hypothesis of B gave to another within a frame."""

    source: int  # the giver's position in B after the frame before
    emitted: Labels  # the labels it emitted before null; empty if it stayed as it was
    log_prob: float


class Survivor(NamedTuple):
    """A hypothesis that is in B after a frame."""

    labels: Labels
    log_prob: float  # the logarithm of the sum of its flows
    flows: tuple[Flow, ...]  # from the longest prefix to the shortest


@torch.no_grad()
def beam_search_steps(
    model: TransducerModel,
    frames: Tensor,  # [T, D], or ids [T]
    beam_width: int,
    max_labels_per_frame: int = 20,
) -> Iterator[list[Survivor]]:
    """Yield B before the first frame and after each, best first; the last is `beam_search`'s.

    Pr(y) after a frame is the sum over y and its prefixes ŷ that were in B before it. Each flow is
    Pr(ŷ) Pr(y|ŷ,t) Pr(∅|y,t): the terms that Algorithm 1 adds at the start of a frame, or gets by
    extending ŷ. A model that reads backwards is stepped through in its own direction. Each step is
    computed when it is asked for.
    """
    options = SearchOptions(beam_width, max_labels_per_frame=max_labels_per_frame)
    with eval_mode(model):
        [f] = transcribe(model, frames[None], torch.tensor([len(frames)]))
        check_numbers(0, f)
        problem = Problem([f], model.prediction_network, joint_of(model), f.shape[-1], options)
        log_pr = Outputs(problem, f)
        yield [Survivor((), 0.0, ())]
        states = beam_steps(log_pr, beam_width, max_labels_per_frame)
        for t, (before, after) in enumerate(pairwise(state.beam for state in states)):
            yield [Survivor(y, float(p), _flows(y, before, log_pr, t)) for y, p in after.items()]


def _flows(y: Labels, before: dict[Labels, float], log_pr: Outputs, t: int) -> tuple[Flow, ...]:
    """Return the flows into y at frame t, from the hypotheses that were in B before it."""
    positions = {prefix: i for i, prefix in enumerate(before)}
    flows = []
    log_way = log_pr(y, t)[NULL]  # from a prefix to y, and on to the next frame
    for u in reversed(range(len(y) + 1)):
        if y[:u] in before and log_way > -np.inf:
            flows.append(Flow(positions[y[:u]], y[u:], float(before[y[:u]] + log_way)))
        if u > 0:
            log_way += log_pr(y[: u - 1], t)[y[u - 1]]
    return tuple(flows)
