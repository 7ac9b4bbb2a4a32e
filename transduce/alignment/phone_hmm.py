"""A hidden Markov model of phones, which finds their boundaries more precisely than a transducer.

Each phone has three states, and silence has one. A state is two mixtures of Gaussians with diagonal
covariances, over cepstra of every 5 ms: one depends on the phone alone, the other also on the class
of the phone beside it, before the first state and after the last. Their log-likelihoods are
averaged. Each state of a sequence takes one frame or more, so the ways to divide T frames among
U + 1 states are the alignments of an output lattice: its node (t', u) stands for the first t = t' +
u frames, and both arrows that leave it take frame t in state u. Null stays in the state; label u
moves to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.audio.features import Features, FeatureSettings, append_deltas
from transduce.lattice.loss import best_alignment, lattice_loss
from transduce.model.tensors import CheckpointError, read_tensors, write_tensors

if TYPE_CHECKING:  # it needs Numba
    from transduce.alignment.bands import Densities, Heard

SHIPPED = Path(__file__).parent / "weights" / "english-aligner.safetensors"
KIND = "phone HMM"  # in the header of its files
STATES = 3  # of a phone
MIXTURE = ("means", "variances", "log_weights")  # in its files
CEPSTRA = 13  # from c0 to c12
# The scale of log-likelihoods: frames are far from independent, and the posterior of a boundary
# would be too narrow otherwise. The usual scale is 0.1 for frames of every 10 ms.
ACOUSTIC_SCALE = 0.05
TAIL = 0.05  # the bounds of a boundary are the quantiles TAIL and 1 - TAIL of its posterior
PAUSE = 2  # frames: silence that the most probable path leaves sooner is no pause
# A closure is silent too: before these phones, silence of fewer frames is a part of the phone.
STOPS = frozenset(("B", "CH", "D", "G", "JH", "K", "P", "T"))
LONGEST_CLOSURE = 30
REACH = 60  # frames: how far from its approximate span a phone may lie
FAR = 1000.0  # subtracted from the log-likelihood of each frame beyond
# Sound is divided in the middle of pauses of CUT seconds, if a piece then has PIECE seconds: the
# lattice grows with the square of a piece, but a state beyond its ends is never considered.
CUT, PIECE = 0.3, 5.0

Spans = Sequence[tuple[float, float]]  # the start and end of each phone, in seconds or frames


class Edge(NamedTuple):
    """The start or end of a phone, in seconds."""

    time: float
    earliest: float  # the 5 % quantile of its posterior
    latest: float  # the 95 % quantile

    def moved(self, time: float) -> Edge:
        """Return the edge at another time, with bounds that include it."""
        return Edge(time, min(self.earliest, time), max(self.latest, time))

    def shifted(self, seconds: float) -> Edge:
        """Return the edge so many seconds later."""
        return Edge(self.time + seconds, self.earliest + seconds, self.latest + seconds)


class StateSequence(NamedTuple):
    """The states of phones that follow each other, with silence before, after and in pauses."""

    alone: list[int]  # in the mixtures that depend on the phone alone
    beside: list[int]  # in those that depend on the phone beside it too
    first: list[int]  # the index of the first state of each phone


class Piece(NamedTuple):
    """Phones, and the frames in which they are said."""

    phones: slice
    frames: slice


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Mixtures of M Gaussians over frames of D numbers, one for each of S states."""

    means: Tensor  # [S, M, D]
    variances: Tensor  # [S, M, D]
    log_weights: Tensor  # [S, M]

    def log_likelihoods(self, frames: Tensor, states: Sequence[int]) -> Tensor:
        """Return the log-likelihood [T, N] of each frame [T, D] in each of N states."""
        wanted, places = torch.unique(torch.tensor(states), return_inverse=True)
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


@dataclass(frozen=True, eq=False)
class PhoneHMM:
    """The states of phones and of silence; frames have D numbers."""

    symbols: tuple[str, ...]
    classes: tuple[int, ...]  # the class of each phone, from 0 on
    settings: FeatureSettings  # of log mel spectrograms, whose cepstra the frames are
    scales: Tensor  # [D], by which frames are divided
    alone: Mixtures  # phone i has the states 3 i to 3 i + 2, silence the last
    beside: (
        Mixtures  # of a phone: first states by the class before, middle, last by the class after
    )

    @property
    def silence(self) -> int:
        """Return the state of silence among those that depend on the phone alone."""
        return STATES * len(self.symbols)

    @property
    def num_neighbours(self) -> int:
        """Return the number of classes of neighbours; the last is silence."""
        return max(self.classes) + 2

    @property
    def num_beside(self) -> int:
        """Return the number of states that depend on the phone beside theirs; silence is last."""
        return (2 * self.num_neighbours + 1) * len(self.symbols) + 1

    @property
    def size(self) -> int:
        """Return D, the numbers in a frame."""
        return CEPSTRA * (1 + self.settings.num_deltas)

    @cached_property
    def _features(self) -> Features:
        return Features(self.settings)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @cached_property
    def _cosines(self) -> Tensor:
        """Return the cosine transform [num_channels, CEPSTRA]."""
        C = self.settings.num_channels
        angles = torch.outer(torch.arange(C) + 0.5, torch.arange(CEPSTRA)) * (math.pi / C)
        return angles.cos() * math.sqrt(2 / C)

    @torch.no_grad()
    def frames_and_levels(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames [T, D] and levels [T], the mean of the log mel spectrogram, of samples [N].

        The cepstra of a sound have mean 0 and variance 1 before their deltas are appended; then
        the frames are scaled.
        """
        if len(samples) < self.settings.window_samples:
            return samples.new_zeros(0, self.size), samples.new_zeros(0)
        log_mel = self._features.static(samples[None])[0]
        cepstra = log_mel @ self._cosines
        deviations = cepstra.std(0, correction=0).clamp(min=1e-3)
        cepstra = (cepstra - cepstra.mean(0)) / deviations
        frames = append_deltas(cepstra[None], torch.tensor([len(cepstra)]), self.settings)[0]
        return frames / self.scales, log_mel.mean(1)

    def time(self, frame: float) -> float:
        """Return the time, in seconds, at which a state starts whose first frame this is."""
        return frame * self.settings.shift + self.settings.margin

    def frame(self, time: float) -> float:
        """Return the first frame of a state that starts at this time: the inverse of `time`."""
        return (time - self.settings.margin) / self.settings.shift

    def log_likelihoods(self, frames: Tensor, states: StateSequence) -> Tensor:
        """Return the log-likelihood [T, U+1] of each frame in each state of a sequence."""
        alone = self.alone.log_likelihoods(frames, states.alone)
        return (alone + self.beside.log_likelihoods(frames, states.beside)) / 2

    def state_sequence(self, phones: Sequence[str], pauses: Sequence[bool]) -> StateSequence:
        """Return the states of phones; silence stands at both ends and in pauses.

        `pauses[i]` tells whether there is a pause before phone i; that of the first is ignored.
        """
        N = len(phones)
        paused = [True, *pauses[1:N], True]
        ids = [self._ids[phone] for phone in phones]
        K = self.num_neighbours
        before = [K - 1, *(self.classes[i] for i in ids)]  # the class before each phone
        after = [*(self.classes[i] for i in ids), K - 1][1:]
        states = StateSequence([], [], [])
        for n, i in enumerate(ids):
            if paused[n]:
                states.alone.append(self.silence)
                states.beside.append(self.num_beside - 1)
            states.first.append(len(states.alone))
            states.alone.extend(range(STATES * i, STATES * (i + 1)))
            left = K - 1 if paused[n] else before[n]
            right = K - 1 if paused[n + 1] else after[n]
            own = i * (2 * K + 1)
            states.beside.extend((own + left, own + K, own + K + 1 + right))
        states.alone.append(self.silence)
        states.beside.append(self.num_beside - 1)
        return states

    def pauses(
        self,
        frames: Tensor,
        phones: Sequence[str],
        word_starts: Collection[int],
        spans: Spans | None = None,
    ) -> list[bool]:
        """Return whether there is a pause before each phone; only words start after pauses.

        Silence stands before each word, and takes PAUSE frames or more of the most probable path
        where there is a pause. Spans, in frames, are approximate; without them, a phone may lie
        anywhere.
        """
        none = [False] * len(phones)
        states = self.state_sequence(phones, [i in word_starts for i in range(len(phones))])
        if len(states.alone) > len(frames):
            return none
        ends = self._ends(frames, states, spans)
        for i, u in enumerate(states.first):
            if i > 0 and states.alone[u - 1] == self.silence:
                least = LONGEST_CLOSURE if phones[i] in STOPS else PAUSE
                none[i] = ends[u - 1] - ends[u - 2] >= least
        return none

    def _ends(self, frames: Tensor, states: StateSequence, spans: Spans | None) -> list[int]:
        """Return the end of each state but the last on the best path, by phones alone."""
        from transduce.alignment.bands import state_ends

        if spans is None:
            log_likelihoods = self.alone.log_likelihoods(frames, states.alone)
            last, _ = best_alignment(*state_lattice(log_likelihoods.double()))
            return [t + u + 1 for u, t in enumerate(last)]
        heard = self._heard(states, spans, len(frames))
        alone = [(self.alone.densities, np.array(states.alone))]
        ends: list[int] = state_ends(frames.numpy(), alone, heard).tolist()
        return ends

    def _heard(self, states: StateSequence, spans: Spans, T: int) -> Heard:
        """Return where each state of T frames was heard, given the spans of phones in frames.

        A phone's states have its span, and silence the time between those of its neighbours.
        """
        from transduce.alignment.bands import Heard

        edges, first = np.array(spans), np.array(states.first)
        ends, starts = np.array([0.0, *edges[:, 1]]), np.array([*edges[:, 0], T])
        # Each state of silence comes after so many phones.
        number = np.searchsorted(first, np.arange(len(states.alone)), side="right")
        found = np.stack([ends[number], starts[number]], 1)
        reach = np.full(len(states.alone), np.inf)
        for i in range(STATES):
            found[first + i], reach[first + i] = edges, REACH
        return Heard(found, reach)

    def boundaries(
        self, samples: Tensor, phones: Sequence[str], spans: Spans, word_starts: Collection[int]
    ) -> list[tuple[Edge, Edge]] | None:
        """Return the start and end of each phone, given their approximate spans.

        `samples` are [N], at the sample rate of the settings. A pause may come before the phones
        `word_starts`. Return None if there are fewer frames than states.
        """
        from transduce.alignment.bands import boundary_statistics

        frames, levels = self.frames_and_levels(samples)
        seconds = len(samples) / self.settings.sample_rate
        found = list[tuple[Edge, Edge]]()
        for piece in self._pieces(spans, len(frames)):
            part, own = frames[piece.frames], phones[piece.phones]
            starts = {i - piece.phones.start for i in word_starts}
            origin = piece.frames.start
            near = [
                (self.frame(start) - origin, self.frame(end) - origin)
                for start, end in spans[piece.phones]
            ]
            states = self.state_sequence(own, self.pauses(part, own, starts, near))
            if len(part) < len(states.alone):
                return None
            mixtures = [
                (self.alone.densities, np.array(states.alone)),
                (self.beside.densities, np.array(states.beside)),
            ]
            heard = self._heard(states, near, len(part))
            statistics = boundary_statistics(part.numpy(), mixtures, heard, ACOUSTIC_SCALE, TAIL)
            edges = [Edge(*numbers) for numbers in statistics.T.tolist()]
            # Edge u lies between the states u and u + 1.
            intervals = [(edges[u - 1], edges[u + STATES - 1]) for u in states.first]
            for pair in at_half_level(intervals, own, levels[piece.frames]):
                start, end = (
                    Edge(*(min(seconds, self.time(piece.frames.start + t)) for t in edge))
                    for edge in pair
                )
                found.append((start, end))
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
        tensors = {"scales": self.scales}
        for name, mixtures in (("alone", self.alone), ("beside", self.beside)):
            for part in MIXTURE:
                tensors[f"{name}.{part}"] = getattr(mixtures, part).half()
        header = {
            "symbols": self.symbols,
            "classes": self.classes,
            "features": asdict(self.settings),
        }
        write_tensors(path, tensors, header, KIND)

    @classmethod
    def load(cls, path: Path) -> PhoneHMM:
        """Read a file of `save`; raise CheckpointError if it is another file."""
        tensors, header = read_tensors(path, KIND)
        try:
            symbols, classes = tuple(header["symbols"]), tuple(header["classes"])
            settings, scales = FeatureSettings(**header["features"]), tensors["scales"]
            alone, beside = (
                Mixtures(*(tensors[f"{name}.{part}"].float() for part in MIXTURE))
                for name in ("alone", "beside")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is incomplete ({error}); give another file") from None
        hmm = cls(symbols, classes, settings, scales, alone, beside)
        D = hmm.size
        wanted: list[tuple[int, ...]] = [(len(symbols),), (D,)]
        found: list[tuple[int, ...]] = [(len(classes),), tuple(scales.shape)]
        for mixtures, S in ((alone, hmm.silence + 1), (beside, hmm.num_beside)):
            M = mixtures.log_weights.shape[-1]
            wanted += [(S, M, D), (S, M, D), (S, M)]
            found += [tuple(getattr(mixtures, part).shape) for part in MIXTURE]
        if found != wanted:
            raise CheckpointError(f"{path} has tensors of other shapes than {wanted}; train again")
        return hmm


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

    With `far_from_spans` and `median_and_quantiles` this is the reference of bands.py.
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


def far_from_spans(states: StateSequence, spans: Spans, T: int) -> Tensor:
    """Return [T, U+1]: FAR where a phone would be REACH frames or more from its span, else 0.

    Otherwise a phone could be taken for one beyond a long pause. Spans are in frames.
    """
    penalties = torch.zeros(T, len(states.alone))
    for u, (start, end) in zip(states.first, spans, strict=True):
        own = penalties[:, u : u + STATES]
        own[: max(0, round(start) - REACH)] = FAR
        own[max(0, round(end) + REACH) :] = FAR
    return penalties


def median_and_quantiles(posterior: Tensor) -> tuple[list[float], list[int], list[int]]:
    """Return the median of each boundary and its two quantiles, in frames.

    For the median, the probability of a boundary before frame t is spread evenly from t - 1/2 to
    t + 1/2.
    """
    cumulative = posterior.cumsum(0).T.contiguous()  # [U, T]
    probabilities = cumulative.new_tensor([TAIL, 0.5, 1 - TAIL]).expand(len(cumulative), 3)
    low, middle, high = torch.searchsorted(cumulative, probabilities.contiguous()).unbind(1)
    here = posterior.T.gather(1, middle[:, None])[:, 0]
    reached = cumulative.gather(1, middle[:, None])[:, 0]
    median = middle + 0.5 - (reached - 0.5) / here
    return median.clamp(low, high).tolist(), low.tolist(), high.tolist()


def at_half_level(
    intervals: Sequence[tuple[Edge, Edge]], phones: Sequence[str], levels: Tensor
) -> list[tuple[Edge, Edge]]:
    """Move the edges of phones beside pauses to where the level is halfway to that of the pause.

    Edges are in frames, levels [T] are logarithms. Sound fades into silence, and the states of
    phones take a part of it; so an edge lies where the level passes the mean of the phone's loudest
    frame and the pause's quietest one. Two kinds of edges stay: those of pauses that are louder
    than that in the mean, and the end of a stop, because its closure may part its loudest frame
    from its release. Bounds are widened to include the edge.
    """
    level = levels.tolist()
    T = len(level)
    moved = list[tuple[Edge, Edge]]()
    for i, (start, end) in enumerate(intervals):
        first = min(round(start.time), T - 1)
        last = min(max(first, round(end.time) - 1), T - 1)
        loudest = max(range(first, last + 1), key=level.__getitem__)
        before = intervals[i - 1][1].time if i > 0 else 0.0
        half = _half_level(level[loudest], level[round(before) : first])
        if before < start.time and half is not None:
            t = loudest
            while level[t - 1] >= half:
                t -= 1
            start = start.moved(t)
        after = intervals[i + 1][0].time if i + 1 < len(intervals) else T
        half = _half_level(level[loudest], level[last + 1 : round(after)])
        if end.time < after and half is not None and phones[i] not in STOPS:
            t = loudest + 1
            while level[t] >= half:
                t += 1
            end = end.moved(t)
        moved.append((start, end))
    return moved


def _half_level(loudest: float, pause: Sequence[float]) -> float | None:
    """Return the mean of a phone's loudest level and a pause's quietest; None if it is no pause."""
    if not pause:
        return None
    half = (loudest + min(pause)) / 2
    return half if sum(pause) / len(pause) < half else None
