"""The doors to the search: `beam_search`, which is Algorithm 1, and `greedy_search`.

Each checks its arguments, runs the transcription network, chooses a backend by looking, and calls
it. For the beam search an utterance's vectors are those that it has alone, so that they, and all
that follows from them, are the same whatever else is decoded with it; the greedy search takes all
at once, which is faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from numbers import Integral
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from transduce.decoding.fusion import FusedScores, LanguageModel
from transduce.decoding.hypothesis import (
    Found,
    Hypothesis,
    Timing,
    best_of,
    label_timings,
)
from transduce.kernels.backends import INTEGERS
from transduce.lattice.loss import lattice_transitions
from transduce.networks import PredictionNetwork, Transducer

Backend = Literal["auto", "reference", "cpu", "eager"]
FRAMES = 2048  # that go through the transcription network at once: what they need fits the caches


@torch.no_grad()
def beam_search(
    model: Transducer,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    *,
    beam_width: int,
    n_best: int = 1,
    length_normalised: bool = True,
    max_labels_per_frame: int = 20,
    fusion: LanguageModel | PredictionNetwork | None = None,
    fusion_weight: float | None = None,
    with_timings: bool = True,
    backend: Backend = "auto",
) -> list[list[Hypothesis]]:
    """The n most probable output sequences of each utterance, best first (Algorithm 1).

    They are sorted by log Pr(y) / |y|, or without `length_normalised` by log Pr(y). No two are
    equal. There may be fewer than n_best if fewer were found possible. A hypothesis emits at most
    `max_labels_per_frame` labels in a frame, and a warning says if that has cut something off.

    `fusion`, a `PredictionNetwork(with_null=False)` or any `LanguageModel`, adds fusion_weight
    times ln Pr(k|y) to the log-probability of every label k, and nothing to null's; log_prob is
    then a score and not a probability. The weight is to be chosen, so there is none by default.

    `with_timings=False` leaves out `frames` and `timings`, which take a lattice for each
    hypothesis.
    """
    check_width(beam_width, n_best, max_labels_per_frame)
    weight = check_fusion(fusion, fusion_weight)
    network = model.prediction_network
    with evaluating(model, fusion):
        transcriptions = transcribe(model, frames, num_frames)
        fused = partial(_fused, fusion, weight, network.num_labels)
        module = load(backend, transcriptions)
        arguments = (beam_width, max_labels_per_frame, fused)
        found: list[Found] = module.beam_searches(network, transcriptions, *arguments)
        num_bounded, lengths = [one.num_bounded for one in found], list(map(len, transcriptions))
        _warn_of_bounds(num_bounded, lengths, max_labels_per_frame)
        return [
            [
                _hypothesis(network, f, labels, log_prob, score, with_timings)
                for labels, log_prob, score in best_of(one, n_best, length_normalised)
            ]
            for f, one in zip(transcriptions, found, strict=True)
        ]


@torch.no_grad()
def greedy_search(
    model: Transducer,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    max_labels_per_frame: int = 20,
) -> list[Hypothesis]:
    """The alignment that takes the most probable output at every node, for each utterance.

    After `max_labels_per_frame` labels in a frame it takes null, and a warning says if that was not
    the most probable.
    """
    check_width(1, 1, max_labels_per_frame)
    lengths = check_frames(frames, num_frames)
    if max(lengths, default=0) == 0:
        return [Hypothesis((), 0.0, 0.0, ()) for _ in lengths]
    with evaluating(model):
        f, num_vectors = model.transcription_network(frames, num_frames)
        inside = torch.arange(f.shape[1], device=f.device) < num_vectors[:, None]
        bad = (f.isnan() | f.isposinf()).any(2) & inside
        if bad.any():
            b = int(bad.nonzero()[0, 0])
            check_numbers(b, f[b])
        network = model.prediction_network
        module = import_module(f"transduce.decoding.{'cpu' if f.device.type == 'cpu' else 'eager'}")
        arguments = (network, f, num_vectors, max_labels_per_frame)
        labels, times, log_prob, num_bounded = module.greedy_searches(*arguments)
    _warn_of_bounds(num_bounded, num_vectors.tolist(), max_labels_per_frame)
    return [
        Hypothesis(tuple(y), log_p, log_p / max(1, len(y)), tuple(when))
        for y, when, log_p in zip(labels, times, log_prob, strict=True)
    ]


# --- Before the search, and after ---------------------------------------------------------------


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Those of the models that are modules without dropout, put back as they were."""
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def transcribe(model: Transducer, frames: Tensor, num_frames: Tensor) -> list[Tensor]:
    """f [T, K+1] of each utterance; those without frames have none."""
    lengths = check_frames(frames, num_frames)
    weight = model.prediction_network.output.weight
    transcriptions = [weight.new_empty(0, len(weight))] * len(lengths)
    by_length = sorted((b for b, T in enumerate(lengths) if T > 0), key=lengths.__getitem__)
    while by_length:
        T = lengths[by_length[-1]]
        rows = by_length[-max(1, FRAMES // T) :]
        del by_length[-len(rows) :]
        found = model.transcription_network.forward_one_by_one(frames[rows, :T], num_frames[rows])
        for b, f in zip(rows, found, strict=True):
            transcriptions[b] = f
    for b, f in enumerate(transcriptions):
        check_numbers(b, f)
    return transcriptions


def _fused(
    fusion: LanguageModel | PredictionNetwork | None, weight: float, num_labels: int
) -> FusedScores | None:
    return None if fusion is None or weight == 0 else FusedScores(fusion, weight, num_labels)


def _hypothesis(
    network: PredictionNetwork,
    transcription: Tensor,
    labels: tuple[int, ...],
    log_prob: float,
    score: float,
    with_timings: bool,
) -> Hypothesis:
    timings = timings_of(network, transcription, labels) if with_timings else []
    frames = tuple(timing.frame for timing in timings)
    return Hypothesis(labels, log_prob, score, frames, tuple(timings))


def timings_of(
    network: PredictionNetwork, transcription: Tensor, labels: tuple[int, ...]
) -> list[Timing]:
    """When each of the labels is emitted, given f [T, K+1]."""
    if not labels:
        return []
    y = torch.tensor([labels], device=transcription.device)
    f, g = transcription.double().cpu(), network(y)[0].double().cpu()
    return label_timings(*lattice_transitions(f, g, y[0].cpu()))


def _warn_of_bounds(num_bounded: list[int], num_vectors: list[int], bound: int) -> None:
    bounded = [b for b, count in enumerate(num_bounded) if count > 0]
    if bounded:
        b = bounded[0]
        others = f" and in {len(bounded) - 1} other items" if len(bounded) > 1 else ""
        warnings.warn(
            f"max_labels_per_frame = {bound} was met in {num_bounded[b]} of the "
            f"{num_vectors[b]} frames of item {b}{others}; hypotheses with more labels in "
            "a frame were not looked at",
            stacklevel=4,
        )


# --- Choosing and checking ----------------------------------------------------------------------


def load(backend: Backend, transcriptions: list[Tensor]) -> ModuleType:
    """The backend's module: the one asked for, or the one for the tensors' device."""
    on_cpu = all(f.device.type == "cpu" for f in transcriptions)
    if backend == "auto":
        backend = "cpu" if on_cpu else "eager"
    if backend == "cpu" and not on_cpu:
        raise ValueError(
            f"backend 'cpu' needs a model on the CPU; this is on {transcriptions[0].device}"
        )
    if backend not in ("reference", "cpu", "eager"):
        raise ValueError(f"backend must be auto, reference, cpu or eager, not {backend!r}")
    return import_module(f"transduce.decoding.{backend}")


def check_width(beam_width: int, n_best: int, max_labels_per_frame: int) -> None:
    """Raise ValueError unless the numbers make sense together."""
    numbers = dict(beam_width=beam_width, n_best=n_best, max_labels_per_frame=max_labels_per_frame)
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise ValueError(f"{name} must be a whole number, not {number!r}")
    if beam_width < 1:
        raise ValueError(f"beam_width must be at least 1, not {beam_width}")
    if not 1 <= n_best <= beam_width:
        raise ValueError(f"n_best must be between 1 and the beam_width, {beam_width}, not {n_best}")
    if max_labels_per_frame < 1:
        raise ValueError(f"max_labels_per_frame must be at least 1, not {max_labels_per_frame}")


def check_fusion(fusion: object, fusion_weight: float | None) -> float:
    """The weight, 0 without fusion; ValueError unless both are given, or neither."""
    if fusion is not None and fusion_weight is None:
        raise ValueError("there is a fusion but no fusion_weight; give it, such as 0.3")
    weight = fusion_weight or 0.0
    if not 0 <= weight < math.inf:
        raise ValueError(f"fusion_weight must be a number that is not negative, not {weight}")
    if fusion is None and weight > 0:
        raise ValueError(f"fusion_weight is {weight}, but there is no fusion")
    return weight


def check_frames(frames: Tensor, num_frames: Tensor) -> list[int]:
    """The numbers of frames; ValueError unless they go with the frames."""
    if frames.ndim not in (2, 3):
        raise ValueError(f"frames must be [B, T, D], or ids [B, T], not {list(frames.shape)}")
    B, T = frames.shape[:2]
    if num_frames.shape != (B,) or num_frames.dtype not in INTEGERS:
        raise ValueError(
            f"num_frames must be integers [B] = [{B}], not {num_frames.dtype} "
            f"{list(num_frames.shape)}"
        )
    lengths: list[int] = num_frames.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= T:
            raise ValueError(f"num_frames[{b}] must be between 0 and {T}, not {length}")
    return lengths


def check_numbers(b: int, f: Tensor) -> None:
    """Raise ValueError if item b's transcription vectors are not numbers to search with."""
    bad = (f.isnan() | f.isposinf()).any(1).nonzero()
    if len(bad):
        raise ValueError(
            f"the transcription network gave NaN or +inf for item {b} at {int(bad[0])}"
        )
