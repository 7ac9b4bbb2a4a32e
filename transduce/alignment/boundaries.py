"""When each phone begins and ends: the one place where boundaries come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.alignment.phone_hmm import Edge, PhoneHMM, shipped_hmm
from transduce.architectures import Transducer
from transduce.decoding.hypothesis import Hypothesis, Labels, Timing, lattice_timings
from transduce.model.model import Model
from transduce.model.stream import vector_times
from transduce.model.transcripts import Span, Transcript


@dataclass(frozen=True, eq=False)
class Heard:
    """A stretch of sound as a model hears it. Times count from its start, in seconds."""

    read: Callable[[], Tensor]  # returns the samples [N], at the model's rate
    vectors: Tensor  # [T, K+1], f
    seconds: float


class Boundaries(NamedTuple):
    """The interval of a phone; where it ends before the next one starts, there is a pause."""

    start: Edge
    end: Edge
    confidence: float  # from 0 to 1


def boundaries(
    model: Model, heard: Heard, labels: Labels, word_starts: Collection[int]
) -> list[Boundaries]:
    """Return the interval of each phone, given the phones of a stretch of sound.

    `word_starts` are the indices of the phones before which there may be a pause. If the model's
    phones are those of the shipped hidden Markov model, and its sound has the same sample rate,
    that model finds the boundaries; the emissions are its approximate spans.
    """
    emitted = emission_boundaries(model, heard, labels)
    if (hmm := hmm_of(model)) is None:
        return emitted
    spans = [(one.start.time, one.end.time) for one in emitted]
    phones = model.signature.targets.decode(labels)
    refined = hmm.boundaries(heard.read(), phones, spans, word_starts)
    if refined is None:
        return emitted
    return [Boundaries(*edges, one.confidence) for edges, one in zip(refined, emitted, strict=True)]


def hmm_of(model: Model) -> PhoneHMM | None:
    """Return the hidden Markov model that ships, if it is of a model's phones and sample rate."""
    hmm, features = shipped_hmm(), model.signature.features
    same_phones = set(model.signature.targets.symbols) == set(hmm.symbols)
    same_rate = features is not None and features.sample_rate == hmm.settings.sample_rate
    return hmm if same_phones and same_rate else None


def emission_boundaries(model: Model, heard: Heard, labels: Labels) -> list[Boundaries]:
    """Return the interval of each phone from the model's own emissions.

    The lattice of the phones gives the posterior of each emission. `Transcript.spans` turns the
    most probable alignment into starts and ends. An edge that follows from an emission is as
    uncertain as that emission: its bounds are as far from it as the emission's are.
    """
    network = model.network
    assert isinstance(network, Transducer)
    with torch.no_grad():
        prediction = network.prediction_network(torch.tensor([labels], device=model.device))[0]
    timings = lattice_timings(heard.vectors, prediction, labels)
    times = vector_times(model)
    assert times is not None
    frames = tuple(timing.frame for timing in timings)
    hypothesis = Hypothesis(labels, 0.0, 0.0, frames, tuple(timings))
    signature = model.signature
    transcript = Transcript(
        "", (hypothesis,), signature.targets, signature.separator, times[0], heard.seconds, times[1]
    )
    return list(_with_bounds(transcript.spans(hypothesis), timings, times[0], heard.seconds))


def _with_bounds(
    spans: Sequence[Span], timings: Sequence[Timing], step: float, seconds: float
) -> list[Boundaries]:
    """Add the uncertainty of the emissions to the spans of phones."""
    spread = [((t.frame - t.start + 0.5) * step, (t.end - t.frame + 0.5) * step) for t in timings]

    def edge(time: float, i: int) -> Edge:
        before, after = spread[i]
        return Edge(time, max(0.0, time - before), min(seconds, time + after))

    starts = [edge(span.start, i) for i, span in enumerate(spans)]
    # A phone ends where the next one starts, or a fixed time after its own emission.
    joined = [a.end >= b.start for a, b in pairwise(spans)]
    ends = [
        starts[i + 1] if i < len(joined) and joined[i] else edge(span.end, i)
        for i, span in enumerate(spans)
    ]
    return [
        Boundaries(start, end, timing.confidence)
        for start, end, timing in zip(starts, ends, timings, strict=True)
    ]
