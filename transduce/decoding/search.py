"""The doors to the search: `search` and `beam_search`, which are Algorithm 1, and `greedy_search`.

`search` takes transcription vectors and any prediction network; `beam_search` and `greedy_search`
take a model with both networks and run its transcription network first. Each checks its arguments,
chooses a backend by looking at them, and calls it.

In the compiled kernels of the CPU our `TranscriptionNetwork` computes each utterance as if it were
alone, so that the result is the same, to the last bit, whatever else is in the batch. On a GPU, and
in a greedy search by the backend "eager", the last bits of f may depend on the batch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.hypothesis import (
    Greedy,
    Hypothesis,
    Labels,
    Timing,
    lattice_timings,
    n_best,
    timings_from,
)
from transduce.decoding.options import SearchKeywords, SearchOptions
from transduce.decoding.problem import EagerPrediction, Problem, SearchBackend
from transduce.decoding.protocols import Joint, Predictor, TransducerModel, log_probs
from transduce.kernels.backends import INTEGERS, Backend, check_tensors, load, resolve
from transduce.networks import PredictionNetwork, TranscriptionNetwork
from transduce.sequences import reverse_padded

BACKENDS = ("reference", "eager", "cpu", "cuda")
# Utterances go through the transcription network together, because its weights are read once for
# all of them: as many as have FRAMES frames, or as FEW long ones if they have at most MOST_FRAMES.
# More utterances save no more time, and take more memory.
FRAMES, FEW, MOST_FRAMES = 4096, 4, 50_000
JOINT_ROWS = 1 << 16  # nodes whose logits are in memory at once: memory against calls of the joint


@torch.no_grad()
def search(
    transcription: Tensor,  # [B, T, ...], f
    num_vectors: Tensor,  # [B]
    prediction_network: Predictor,
    *,
    joint: Joint | None = None,
    backend: Backend = "auto",
    **options: Unpack[SearchKeywords],
) -> list[list[Hypothesis]]:
    """Return the n most probable output sequences of each utterance, best first (Algorithm 1).

    The joint takes rows of f and rows of g and returns logits [N, K+1], null first; by default it
    is the sum f + g (Eq. 12). The options are the fields of `SearchOptions`. Hypotheses are sorted
    by log Pr(y) / |y|, or with length_normalised=False by log Pr(y); no two are equal, and there
    are fewer than n_best if fewer are possible. A warning says where `max_labels_per_frame` has
    cut off hypotheses. With `fusion`, log_prob is a score, not a probability.

    Our own `PredictionNetwork` with the sum runs in compiled kernels; everything else runs in
    batches of hypotheses through PyTorch.
    """
    asked = SearchOptions(**options)
    check_tensors(transcription=transcription)
    if transcription.ndim < 3:
        raise ValueError(f"transcription must be [B, T, ...], not {list(transcription.shape)}")
    lengths = check_lengths("num_vectors", num_vectors, *transcription.shape[:2])
    transcription = transcription.detach()
    transcriptions = [transcription[b, :length] for b, length in enumerate(lengths)]
    with eval_mode(prediction_network, joint, asked.fusion):
        return run_search(transcriptions, prediction_network, joint, asked, backend)


def beam_search(
    model: TransducerModel,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    *,
    backend: Backend = "auto",
    **options: Unpack[SearchKeywords],
) -> list[list[Hypothesis]]:
    """Return the n most probable output sequences of each utterance, best first (Algorithm 1).

    The short way to `search`, which says what the options are, for a model with both networks.
    """
    return search_model(model, frames, num_frames, SearchOptions(**options), backend)


@torch.no_grad()
def search_model(
    model: TransducerModel,
    frames: Tensor,
    num_frames: Tensor,
    options: SearchOptions,
    backend: Backend = "auto",
    names: Sequence[str] | None = None,  # of the utterances, in warnings
) -> list[list[Hypothesis]]:
    """Run `beam_search` with its options in a record."""
    with eval_mode(model, options.fusion):
        transcriptions = transcribe(model, frames, num_frames, backend)
        found = run_search(
            transcriptions, model.prediction_network, joint_of(model), options, backend, names
        )
    if not reads_backwards(model):
        return found
    return [
        [hypothesis.reversed(len(f)) for hypothesis in hypotheses]
        for f, hypotheses in zip(transcriptions, found, strict=True)
    ]


@torch.no_grad()
def greedy_search(
    model: TransducerModel,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    max_labels_per_frame: int = 20,
    *,
    null_bias: float = 0.0,
    backend: Backend = "auto",
    names: Sequence[str] | None = None,  # of the utterances, in warnings
) -> list[Hypothesis]:
    """Return the alignment that takes the most probable output at every node, for each utterance.

    Where a frame has `max_labels_per_frame` labels and null is still not the most probable output,
    it goes back to the most probable way to leave the frame; a warning says where.
    """
    options = SearchOptions(max_labels_per_frame=max_labels_per_frame, null_bias=null_bias)
    lengths = check_frames(frames, num_frames)
    if max(lengths, default=0) == 0:
        return [Hypothesis((), 0.0, 0.0, ()) for _ in lengths]
    with eval_mode(model):
        if backend == "eager":
            f, num_vectors = _transcribe_batch(model, frames, num_frames, backend)
            transcriptions = [f[b, :length] for b, length in enumerate(num_vectors.tolist())]
        else:
            transcriptions = transcribe(model, frames, num_frames, backend)
        network, joint = model.prediction_network, joint_of(model)
        hypotheses = run_greedy_search(transcriptions, network, joint, options, backend, names)
    if not reads_backwards(model):
        return hypotheses
    return [h.reversed(len(f)) for h, f in zip(hypotheses, transcriptions, strict=True)]


def _alignment(found: Greedy) -> Hypothesis:
    score = found.log_prob / max(1, len(found.labels))
    return Hypothesis(found.labels, found.log_prob, score, found.frames)


# --- Before and after the search ----------------------------------------------------------------


def run_search(
    transcriptions: list[Tensor],  # f [T, ...] of each utterance
    network: Predictor,
    joint: Joint | None,
    options: SearchOptions,
    backend: Backend,
    names: Sequence[str] | None = None,
) -> list[list[Hypothesis]]:
    """Search each utterance, and compute the timings that are asked for."""
    if not any(len(f) for f in transcriptions):
        return [[Hypothesis((), 0.0, 0.0, ())] for _ in transcriptions]
    _check_all_numbers(transcriptions)
    problem = _problem(transcriptions, network, joint, options, backend)
    found = _backend(problem, backend).beam_searches(problem)
    num_bounded = [one.num_bounded for one in found]
    lengths = [len(f) for f in transcriptions]
    warn_of_bounds(num_bounded, lengths, options.max_labels_per_frame, names)
    best = [n_best(beam, options.n_best, options.length_normalised) for beam in found]
    timings = iter(_timings(problem, best) if options.with_timings else [])
    return [[_hypothesis(*one, next(timings, [])) for one in hypotheses] for hypotheses in best]


def run_greedy_search(
    transcriptions: list[Tensor],  # f [T, ...] of each utterance
    network: Predictor,
    joint: Joint | None,
    options: SearchOptions,
    backend: Backend,
    names: Sequence[str] | None = None,
) -> list[Hypothesis]:
    """Return each utterance's greedy alignment."""
    _check_all_numbers(transcriptions)
    problem = _problem(transcriptions, network, joint, options, backend)
    found = _backend(problem, backend).greedy_searches(problem)
    num_bounded, lengths = [one.num_bounded for one in found], list(map(len, transcriptions))
    warn_of_bounds(num_bounded, lengths, options.max_labels_per_frame, names)
    return [_alignment(one) for one in found]


def _problem(
    transcriptions: list[Tensor],
    network: Predictor,
    joint: Joint | None,
    options: SearchOptions,
    backend: Backend,
) -> Problem:
    """Put together what a backend is given; null's bias becomes part of f, or of the joint."""
    if backend == "eager" and isinstance(network, PredictionNetwork):
        network = EagerPrediction(network)
    if joint is None:
        num_outputs = transcriptions[0].shape[-1]
        transcriptions = [with_null_bias(f, options.null_bias) for f in transcriptions]
    else:
        if options.null_bias:
            joint = _joint_with_null_bias(joint, options.null_bias)
        first = next(f[:1] for f in transcriptions if len(f))
        null = torch.tensor([NULL], device=first.device)
        num_outputs = joint(first, network.step(null, network.start(1))[0]).shape[-1]
    return Problem(transcriptions, network, joint, num_outputs, options)


def with_null_bias(f: Tensor, null_bias: float) -> Tensor:
    """Return transcription vectors [T, K+1] with a number added to null's logit."""
    if not null_bias:
        return f
    bias = f.new_zeros(f.shape[-1])
    bias[NULL] = null_bias
    return f + bias


def _joint_with_null_bias(joint: Joint, bias: float) -> Joint:
    def biased(f: Tensor, g: Tensor) -> Tensor:
        logits = joint(f, g).clone()
        logits[:, NULL] += bias
        return logits

    return biased


def _hypothesis(labels: Labels, log_prob: float, score: float, timings: list[Timing]) -> Hypothesis:
    frames = tuple(timing.frame for timing in timings)
    return Hypothesis(labels, log_prob, score, frames, tuple(timings))


def _timings(problem: Problem, best: list[list[tuple[Labels, float, float]]]) -> list[list[Timing]]:
    """Return the timings of all hypotheses, those of the first utterance first."""
    chosen = [(b, labels) for b, hypotheses in enumerate(best) for labels, *_ in hypotheses]
    found: list[list[Timing] | None] = [None] * len(chosen)
    network = problem.peephole_network()
    if network is not None and _has_cuda_kernels(network):
        found = load("decoding", "cuda").timings(problem, chosen)
    return [
        timings_of(problem, problem.transcriptions[b], labels) if timings is None else timings
        for (b, labels), timings in zip(chosen, found, strict=True)
    ]


def _has_cuda_kernels(network: PredictionNetwork) -> bool:
    weight = network.output.weight
    return weight.is_cuda and weight.dtype == torch.float32


def timings_of(problem: Problem, transcription: Tensor, labels: Labels) -> list[Timing]:
    """Return when each of the labels is emitted, given f [T, ...]."""
    if not labels:
        return []
    y = torch.tensor(labels, device=transcription.device)
    if (network := problem.peephole_network()) is not None:
        return lattice_timings(transcription, network(y[None])[0], labels)
    predictions = _predictions(problem.network, y)

    def joint_arrows(first: int, last: int) -> tuple[Tensor, Tensor]:
        return _joint_transitions(problem, transcription[first:last], predictions, y)

    return timings_from(joint_arrows, len(transcription), len(labels))


def _predictions(network: Predictor, labels: Tensor) -> Tensor:
    """Return g [U+1, ...] of any prediction network."""
    rows, state = [], network.start(1)
    for label in (labels.new_zeros(1), *labels[:, None]):
        g, state = network.step(label, state)
        rows.append(g)
    return torch.cat(rows)


def _joint_transitions(
    problem: Problem, f: Tensor, predictions: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] of any joint, on the CPU."""
    T, U = len(f), len(labels)
    log_null, log_label = [], []
    for first in range(0, T, step := max(1, JOINT_ROWS // (U + 1))):
        part = f[first : first + step]
        f_rows = part.repeat_interleave(U + 1, 0)
        g_rows = predictions.repeat(len(part), *[1] * (predictions.ndim - 1))
        log_pr = log_probs(f_rows, g_rows, problem.joint).view(len(part), U + 1, -1)
        log_null.append(log_pr[..., NULL])
        at = labels.expand(len(part), U)[..., None]
        log_label.append(log_pr[:, :-1].gather(2, at)[..., 0])
    return torch.cat(log_null).cpu(), torch.cat(log_label).cpu()


@contextmanager
def eval_mode(*models: object) -> Iterator[None]:
    """Put the modules in eval mode; restore their modes on exit."""
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def joint_of(model: TransducerModel) -> Joint | None:
    """Return the model's joint; None, the sum, if it has none."""
    return getattr(model, "joint", None)


def reads_backwards(model: TransducerModel) -> bool:
    """Return whether the model reads its input, and writes its output, from the end."""
    return getattr(model, "backwards", False)


def transcribe(
    model: TransducerModel, frames: Tensor, num_frames: Tensor, backend: Backend = "auto"
) -> list[Tensor]:
    """Return f [T, ...] of each utterance, in the direction in which the model reads.

    On the CPU our `TranscriptionNetwork` computes an utterance as if it were alone.
    """
    lengths = check_frames(frames, num_frames)
    network = model.transcription_network
    if max(lengths, default=0) == 0:
        return [torch.empty(0, 1)] * len(lengths)
    if not isinstance(network, TranscriptionNetwork) or frames.is_cuda:
        f, num_vectors = _transcribe_batch(model, frames, num_frames, backend)
        return [f[b, :length] for b, length in enumerate(num_vectors.tolist())]
    if reads_backwards(model):
        frames = reverse_padded(frames, num_frames)
    weight = network.output.weight
    transcriptions = [weight.new_empty(0, len(weight))] * len(lengths)
    by_length = sorted((b for b, T in enumerate(lengths) if T > 0), key=lengths.__getitem__)
    while by_length:
        T = lengths[by_length[-1]]
        rows = by_length[-max(1, FRAMES // T, min(FEW, MOST_FRAMES // T)) :]
        del by_length[-len(rows) :]
        found = network.forward_one_by_one(
            frames[rows, :T], num_frames[rows], backend=_network_backend(backend)
        )
        for b, f in zip(rows, found, strict=True):
            transcriptions[b] = f
    return transcriptions


def _transcribe_batch(
    model: TransducerModel, frames: Tensor, num_frames: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Return f [B, T, ...] and the numbers of vectors [B] of all utterances at once."""
    if reads_backwards(model):
        frames = reverse_padded(frames, num_frames)
    network = model.transcription_network
    if isinstance(network, TranscriptionNetwork):
        found = network(frames, num_frames, backend=_network_backend(backend))
    else:
        found = network(frames, num_frames)
    return cast(tuple[Tensor, Tensor], found)


def _network_backend(backend: Backend) -> Backend:
    """Return the backend of our networks: any search but the eager one takes the fastest."""
    return "eager" if backend == "eager" else "auto"


def warn_of_bounds(
    num_bounded: list[int], lengths: list[int], bound: int, names: Sequence[str] | None
) -> None:
    """Warn of searches that met `max_labels_per_frame`, of so many vectors each."""
    bounded = [b for b, count in enumerate(num_bounded) if count > 0]
    if bounded:
        b = bounded[0]
        name = f"item {b}" if names is None else names[b]
        others = f" and in {len(bounded) - 1} other items" if len(bounded) > 1 else ""
        warnings.warn(
            f"max_labels_per_frame = {bound} was met in {num_bounded[b]} of the "
            f"{lengths[b]} frames of {name}{others}; hypotheses with more labels in "
            "a frame were not looked at",
            stacklevel=_caller_level(),
        )


def _caller_level() -> int:
    """Return the `stacklevel` of the nearest caller outside this package and PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("transduce", "torch"):
        level, frame = level + 1, frame.f_back
    return level


# --- Choosing and checking ----------------------------------------------------------------------


def _backend(problem: Problem, backend: Backend) -> SearchBackend:
    """Return the backend's module: the one asked for, or the fastest that can do it."""
    device = problem.transcriptions[0].device
    network = problem.peephole_network()
    fits = {"cpu": network is not None}
    fits["cuda"] = network is not None and network.output.weight.dtype == torch.float32
    name = resolve(backend, device, BACKENDS)
    if not fits.get(name, True):
        if backend != "auto":
            kind = "PredictionNetwork" if name == "cpu" else "PredictionNetwork in float32"
            raise ValueError(
                f"backend {name!r} searches with a {kind} and the sum as joint alone; leave it to "
                "'auto'"
            )
        name = "eager"
    module: Any = load("decoding", name)
    return cast(SearchBackend, module)


def check_frames(frames: Tensor, num_frames: Tensor) -> list[int]:
    """Return the numbers of frames; raise ValueError unless they go with the frames."""
    check_tensors(frames=frames)
    if frames.ndim not in (2, 3):
        raise ValueError(f"frames must be [B, T, D], or ids [B, T], not {list(frames.shape)}")
    return check_lengths("num_frames", num_frames, *frames.shape[:2])


def check_lengths(name: str, lengths: Tensor, B: int, T: int) -> list[int]:
    """Return the lengths [B] as numbers; raise ValueError unless each is from 0 to T."""
    check_tensors(**{name: lengths})
    if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be integers [B] = [{B}], not {lengths.dtype} {list(lengths.shape)}"
        )
    numbers: list[int] = lengths.tolist()
    for b, length in enumerate(numbers):
        if not 0 <= length <= T:
            raise ValueError(f"{name}[{b}] must be between 0 and {T}, not {length}")
    return numbers


def _check_all_numbers(transcriptions: Sequence[Tensor]) -> None:
    """Raise ValueError if any transcription vector has NaN or +inf."""
    if not bool((torch.cat([f.flatten() for f in transcriptions]) < torch.inf).all()):
        for b, f in enumerate(transcriptions):
            check_numbers(b, f)


def check_numbers(b: int, f: Tensor) -> None:
    """Raise ValueError if item b's transcription vectors have NaN or +inf."""
    bad = (f.isnan() | f.isposinf()).flatten(1).any(1).nonzero()
    if len(bad):
        raise ValueError(
            f"the transcription network gave NaN or +inf for item {b} at {int(bad[0])}"
        )
