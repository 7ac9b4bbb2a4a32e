"""A hidden Markov model of phones, which finds their boundaries more precisely than a transducer.

Each phone has three states, and silence has one. A state is a mixture of Gaussians with diagonal
covariances, over cepstra of every 5 ms. Each state of a sequence takes one frame or more, so the
ways to divide T frames among U + 1 states are the alignments of an output lattice: its node
(t', u) stands for the first t = t' + u frames, and both arrows that leave it take frame t in state
u. Null stays in the state; label u moves to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.audio.features import Features, FeatureSettings
from transduce.lattice.loss import lattice_loss
from transduce.model.tensors import CheckpointError, read_tensors, write_tensors

if TYPE_CHECKING:  # it needs Numba
    from transduce.alignment.bands import Densities

SHIPPED = Path(__file__).parent / "weights" / "english-aligner.safetensors"
KIND = "phone HMM"  # in the header of its files
STATES = 3  # of a phone
# The scale of log-likelihoods: frames of every 5 ms are far from independent, and the posterior of
# a boundary would be too narrow otherwise.
ACOUSTIC_SCALE = 0.1
TAIL = 0.05  # the bounds of a boundary are the quantiles TAIL and 1 - TAIL of its posterior
PAUSE = 0.03  # seconds between the spans of two phones: a longer gap has a state of silence
# Sound is divided in the middle of pauses of CUT seconds, if a piece then has PIECE seconds: the
# lattice grows with the square of a piece, but a state beyond its ends is never considered.
CUT, PIECE = 0.3, 5.0

Spans = Sequence[tuple[float, float]]  # the start and end of each phone, in seconds


class Edge(NamedTuple):
    """The start or end of a phone, in seconds."""

    time: float
    earliest: float  # the 5 % quantile of its posterior
    latest: float  # the 95 % quantile

    def shifted(self, seconds: float) -> Edge:
        """Return the edge so many seconds later."""
        return Edge(self.time + seconds, self.earliest + seconds, self.latest + seconds)


class StateSequence(NamedTuple):
    """The states of phones that follow each other, with silence before, after and in pauses."""

    states: list[int]
    first: list[int]  # the index of the first state of each phone


class Piece(NamedTuple):
    """Phones, and the frames in which they are said."""

    phones: slice
    frames: slice


@dataclass(frozen=True, eq=False)
class PhoneHMM:
    """S states, of phones and then of silence: mixtures of M Gaussians over frames of D numbers."""

    symbols: tuple[str, ...]  # phone i has the states 3 i to 3 i + 2
    settings: FeatureSettings
    scales: Tensor  # [D], by which frames are divided
    means: Tensor  # [S, M, D]
    variances: Tensor  # [S, M, D]
    log_weights: Tensor  # [S, M]

    @property
    def silence(self) -> int:
        """Return the state of silence."""
        return STATES * len(self.symbols)

    @cached_property
    def _features(self) -> Features:
        return Features(self.settings)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @torch.no_grad()
    def frames(self, samples: Tensor) -> Tensor:
        """Return the frames [T, D] of samples [N], without their mean, and scaled."""
        frames: Tensor = self._features(samples[None])[0][0]
        return (frames - frames.mean(0)) / self.scales

    def time(self, frame: float) -> float:
        """Return the time, in seconds, at which a state starts whose first frame this is."""
        return frame * self.settings.shift + self.settings.margin

    def frame(self, time: float) -> float:
        """Return the first frame of a state that starts at this time: the inverse of `time`."""
        return (time - self.settings.margin) / self.settings.shift

    def log_likelihoods(self, frames: Tensor, states: Tensor) -> Tensor:
        """Return the log-likelihood [T, N] of each frame [T, D] in each of N states."""
        wanted, places = torch.unique(states, return_inverse=True)
        means, variances = self.means[wanted], self.variances[wanted]  # [N', M, D]
        precisions = variances.reciprocal()
        constants = (means.square() * precisions + variances.log()).sum(-1)
        constants += means.shape[2] * math.log(2 * math.pi)
        log_densities: Tensor = (
            frames @ (means * precisions).flatten(0, 1).T
            - 0.5 * frames.square() @ precisions.flatten(0, 1).T
            + (self.log_weights[wanted] - 0.5 * constants).flatten()
        )
        return log_densities.view(len(frames), *means.shape[:2]).logsumexp(-1)[:, places]

    @cached_property
    def densities(self) -> Densities:
        """The mixtures in the form of the kernels."""
        from transduce.alignment.bands import Densities

        precisions = self.variances.reciprocal()
        constants = (self.means.square() * precisions + self.variances.log()).sum(-1)
        constants += self.means.shape[2] * math.log(2 * math.pi)
        weights = torch.cat([self.means * precisions, -0.5 * precisions], -1)
        return Densities(weights.numpy(), (self.log_weights - 0.5 * constants).numpy())

    def state_sequence(self, phones: Sequence[str], spans: Spans) -> StateSequence:
        """Return the states of phones; silence stands at both ends and where the spans pause."""
        states, first = [self.silence], list[int]()
        for i, phone in enumerate(phones):
            first.append(len(states))
            states += range(STATES * self._ids[phone], STATES * (self._ids[phone] + 1))
            if i + 1 == len(phones) or spans[i + 1][0] - spans[i][1] > PAUSE:
                states.append(self.silence)
        return StateSequence(states, first)

    def boundaries(
        self, samples: Tensor, phones: Sequence[str], spans: Spans
    ) -> list[tuple[Edge, Edge]] | None:
        """Return the start and end of each phone, given their approximate spans.

        `samples` are [N], at the sample rate of the settings. Return None if there are fewer
        frames than states.
        """
        from transduce.alignment.bands import boundary_statistics

        frames, seconds = self.frames(samples), len(samples) / self.settings.sample_rate
        found = list[tuple[Edge, Edge]]()
        for piece in self._pieces(spans, len(frames)):
            states, first = self.state_sequence(phones[piece.phones], spans[piece.phones])
            part = frames[piece.frames]
            if len(part) < len(states):
                return None
            heard = self._state_spans(spans[piece.phones], first, len(states), piece.frames)
            statistics = boundary_statistics(
                part.numpy(), self.densities, np.array(states), heard, ACOUSTIC_SCALE, TAIL
            )
            edges = [
                Edge(*(min(seconds, self.time(piece.frames.start + float(t))) for t in numbers))
                for numbers in zip(*statistics, strict=True)
            ]
            # Edge u lies between the states u and u + 1.
            found += [(edges[u - 1], edges[u + STATES - 1]) for u in first]
        return found

    def _state_spans(
        self, spans: Spans, first: Sequence[int], num_states: int, frames: slice
    ) -> np.ndarray:
        """Return the frames [N, 2] between which each state of a piece was heard.

        A phone's states have its span, and silence the time between those of its neighbours.
        """
        edges = np.array([[self.frame(t) - frames.start for t in span] for span in spans])
        ends = np.array([0.0, *edges[:, 1]])
        starts = np.array([*edges[:, 0], frames.stop - frames.start])
        # Each state of silence comes after so many phones.
        number = np.searchsorted(first, np.arange(num_states), side="right")
        found = np.stack([ends[number], starts[number]], 1)
        for i in range(STATES):
            found[np.array(first) + i] = edges
        return found

    def _pieces(self, spans: Spans, num_frames: int) -> Iterator[Piece]:
        """Divide phones and frames in long pauses."""
        phone, frame, start = 0, 0, 0.0
        for i, ((_, end), (following, _)) in enumerate(pairwise(spans), start=1):
            middle = (end + following) / 2
            if following - end >= CUT and middle - start >= PIECE:
                cut = round(self.frame(middle))
                yield Piece(slice(phone, i), slice(frame, cut))
                phone, frame, start = i, cut, middle
        yield Piece(slice(phone, len(spans)), slice(frame, num_frames))

    def save(self, path: Path) -> None:
        """Write a safetensors file; the numbers of the states are stored in float16."""
        tensors = {
            "scales": self.scales,
            "means": self.means.half(),
            "variances": self.variances.half(),
            "log_weights": self.log_weights.half(),
        }
        header = {"symbols": self.symbols, "features": asdict(self.settings)}
        write_tensors(path, tensors, header, KIND)

    @classmethod
    def load(cls, path: Path) -> PhoneHMM:
        """Read a file of `save`; raise CheckpointError if it is another file."""
        tensors, header = read_tensors(path, KIND)
        try:
            symbols, settings = tuple(header["symbols"]), FeatureSettings(**header["features"])
            names = ("scales", "means", "variances", "log_weights")
            scales, means, variances, log_weights = (tensors[name].float() for name in names)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is incomplete ({error}); give another file") from None
        S, M, D = STATES * len(symbols) + 1, means.shape[1], settings.size
        shapes = [(D,), (S, M, D), (S, M, D), (S, M)]
        if [tuple(one.shape) for one in (scales, means, variances, log_weights)] != shapes:
            raise CheckpointError(f"{path} has tensors of other shapes than {shapes}; train again")
        return cls(symbols, settings, scales, means, variances, log_weights)


@cache
def shipped_hmm() -> PhoneHMM:
    """Return the model of the 39 ARPAbet phones of English that ships with the package."""
    return PhoneHMM.load(SHIPPED)


def state_lattice(log_likelihoods: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_null [T', U+1] and log_label [T', U] of the log-likelihoods of states [T, U+1].

    T' = T - U must be positive.
    """
    T, N = log_likelihoods.shape
    # Row t', column u of the lattice is row t' + u, column u here.
    taken = log_likelihoods.contiguous().as_strided((T - N + 1, N), (N, N + 1)).contiguous()
    return taken, taken[:, :-1].contiguous()


def boundary_posterior(log_likelihoods: Tensor) -> Tensor:
    """Return [T, U], the posterior that frame t is the first one of state u + 1.

    The log-likelihoods of the frames in the states are [T, U+1].
    """
    T, U = log_likelihoods.shape[0], log_likelihoods.shape[1] - 1
    log_null, log_label = state_lattice(ACOUSTIC_SCALE * log_likelihoods.double())
    sizes = torch.tensor([T - U]), torch.tensor([U])
    _, occupancies = lattice_loss(log_null[None], log_label[None], *sizes, with_occupancies=True)
    # Label u of row t' takes frame t' + u, the last one of its state.
    posterior = occupancies.label.new_zeros(T, U)
    posterior.as_strided((T - U, U), (U, U + 1), U).copy_(occupancies.label[0])
    return posterior


def _mean_and_quantiles(posterior: Tensor) -> tuple[list[float], list[int], list[int]]:
    """Return the mean of each boundary within its bounds, and its two quantiles, in frames."""
    cumulative = posterior.cumsum(0).T.contiguous()  # [U, T]
    probabilities = cumulative.new_tensor([TAIL, 1 - TAIL]).expand(len(cumulative), 2)
    low, high = torch.searchsorted(cumulative, probabilities.contiguous()).unbind(1)
    mean = torch.arange(len(posterior), dtype=posterior.dtype) @ posterior
    # A few improbable alignments far away may put the mean beyond a quantile.
    return mean.clamp(low, high).tolist(), low.tolist(), high.tolist()
