"""Algorithm 1, frame by frame: which hypotheses are in B, and where their probability came from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.reference import Labels, Outputs, beam_steps
from transduce.decoding.search import check_width, evaluating, transcribe
from transduce.networks import Transducer


class Flow(NamedTuple):
    """What one hypothesis of B gave to another within a frame."""

    source: int  # its position in B after the frame before
    emitted: Labels  # the labels it emitted before null; without any it stayed what it was
    log_prob: float


class Survivor(NamedTuple):
    """A hypothesis that is in B after a frame."""

    labels: Labels
    log_prob: float  # the logarithm of the sum of its flows
    flows: tuple[Flow, ...]  # from the longest prefix to the shortest


@torch.no_grad()
def beam_search_steps(
    model: Transducer,
    frames: Tensor,  # [T, D], or ids [T]
    beam_width: int,
    max_labels_per_frame: int = 20,
) -> list[list[Survivor]]:
    """B before the first frame and after each, best first: the last is `beam_search`'s.

    Pr(y) after a frame is the sum over y and its prefixes ŷ in B before it, each flow being Pr(ŷ)
    Pr(y|ŷ,t) Pr(∅|y,t): what Algorithm 1 adds up when it begins a frame, or reaches y by labels.
    """
    check_width(beam_width, 1, max_labels_per_frame)
    with evaluating(model):
        [transcription] = transcribe(model, frames[None], torch.tensor([len(frames)]))
        log_pr = Outputs(model.prediction_network, transcription, None)
        steps = list(beam_steps(log_pr, beam_width, max_labels_per_frame))
        trace = [[Survivor((), 0.0, ())]]
        for t in range(len(transcription)):
            before, after = steps[t].beam, steps[t + 1].beam
            trace.append(
                [Survivor(y, float(p), _flows(y, before, log_pr, t)) for y, p in after.items()]
            )
    return trace


def _flows(y: Labels, before: dict[Labels, float], log_pr: Outputs, t: int) -> tuple[Flow, ...]:
    positions = {prefix: i for i, prefix in enumerate(before)}
    flows = []
    log_way = log_pr(y, t)[NULL]  # from a prefix to y, and on to the next frame
    for u in reversed(range(len(y) + 1)):
        if y[:u] in before and log_way > -np.inf:
            flows.append(Flow(positions[y[:u]], y[u:], float(before[y[:u]] + log_way)))
        if u > 0:
            log_way += log_pr(y[: u - 1], t)[y[u - 1]]
    return tuple(flows)
