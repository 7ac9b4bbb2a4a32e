"""Searches whose transcription vectors come in pieces, for hours, in bounded memory.

The pieces change nothing: labels, log-probabilities and timings are those of one call with all
vectors, to the last bit. `BeamStream` is Algorithm 1, `GreedyStream` the greedy search.

**Memory.** The timings of labels need their lattice (Eqs. 16-18), and so all vectors from their
first to their last. When the lattice has `most_vectors` vectors and one more comes, `BeamStream`
settles a part of it: it takes the best alignment of the best hypothesis, and in its third quarter
the longest time without a label. It puts an anchor in the middle of that time: from now on all
alignments pass it. The labels before the anchor get their timings from the lattice before it. The
vectors and prefixes before it are given up, and with them the hypotheses that begin with other
labels, up to the first one after the anchor, if the beam still has any. The anchor depends on the
vectors alone, not on the pieces. So a stream keeps at most `most_vectors` vectors, the prefixes of
their labels, of which at most `most_vectors` are left at an anchor, and its output. An input of at
most `most_vectors` vectors never settles, and has the timings of its whole lattice
(docs/derivations.md, 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from transduce.decoding.hypothesis import Hypothesis, Labels, Timing, lattice_timings, n_best
from transduce.decoding.options import SearchOptions
from transduce.decoding.problem import Problem
from transduce.decoding.search import eval_mode, with_null_bias
from transduce.networks import PredictionNetwork

MOST_VECTORS = 12_000  # of a lattice: two minutes of frames every 10 ms
# Prefixes in a stream's trie before any is removed: memory against steps that are taken again.
SPARE_PREFIXES = 1024
# Labels whose time is found together with that of a new one: surer times against work.
TRACKED = 8


@dataclass
class Track:
    """The labels that never change any more, in the order in which they became so."""

    labels: list[int]
    timings: list[Timing]


@dataclass(frozen=True)
class Progress:
    """The labels of a stream so far."""

    track: Track  # the stream's own, which grows
    num_stable: int  # labels of it that are stable now
    unstable: Labels  # those of the best hypothesis after them
    find_timings: Callable[[], tuple[Timing, ...]]  # of the unstable labels
    num_vectors: int  # searched so far

    @cached_property
    def unstable_timings(self) -> tuple[Timing, ...]:
        """The timings of the unstable labels; computed when they are first read."""
        return self.find_timings()


class GreedyStream:
    """The greedy search of one input whose transcription vectors come in pieces."""

    def __init__(self, network: PredictionNetwork, options: SearchOptions) -> None:
        from transduce.decoding.cpu.greedy import GreedySearch
        from transduce.decoding.cpu.prediction import packed_weights

        self.options = options
        weights = packed_weights(network)
        outputs = network.num_labels + 1
        self._search = GreedySearch(weights, outputs, options.max_labels_per_frame)
        self._track = Track([], [])

    def accept(self, vectors: Tensor) -> None:
        """Search further transcription vectors [T, K+1]."""
        if len(vectors):
            self._search.advance(_checked(vectors, self.options))

    def progress(self) -> Progress:
        """Return the labels so far: all of them are stable."""
        search, track = self._search, self._track
        for i in range(len(track.labels), len(search.labels)):
            track.labels.append(search.labels[i])
            frame = search.frames[i]
            track.timings.append(Timing(frame, frame, frame, 1.0))
        return Progress(track, len(track.labels), (), tuple, search.num_vectors)

    @property
    def num_bounded(self) -> int:
        """The frames in which `max_labels_per_frame` was met."""
        return self._search.num_bounded

    def finish(self) -> list[Hypothesis]:
        """Return the alignment that takes the most probable output at every node."""
        search = self._search
        labels, frames = tuple(search.labels), tuple(search.frames)
        score = search.log_prob / max(1, len(labels))
        return [Hypothesis(labels, search.log_prob, score, frames)]


class BeamStream:
    """Algorithm 1 on one input whose transcription vectors come in pieces.

    With `follow`, find the times of labels as soon as they are stable, for `progress`.
    """

    def __init__(
        self,
        network: PredictionNetwork,
        options: SearchOptions,
        most_vectors: int = MOST_VECTORS,
        *,
        follow: bool = True,
    ) -> None:
        from transduce.decoding.cpu.beam import BeamSearch, limits_of
        from transduce.decoding.cpu.prediction import packed_weights

        self.network, self.options = network, options
        self.most_vectors, self.follow = max(4, most_vectors), follow
        outputs = network.num_labels + 1
        problem = Problem([], network, None, outputs, options)
        spare = max(SPARE_PREFIXES, 32 * options.beam_width)
        limits = limits_of(problem)._replace(spare_prefixes=spare)
        self._search = BeamSearch(
            packed_weights(network), outputs, problem.fused_scores(), limits, 1
        )
        self.num_vectors = 0
        self._f = torch.empty(0, outputs)  # from the anchor on, with room for more
        self._anchor = 0  # the number of vectors before it
        self._settled = Track([], [])  # the labels before the anchor
        self._track = Track([], [])
        # The times of stable labels are those in the lattice from here on.
        self._followed, self._followed_vector = 0, 0

    @property
    def num_bounded(self) -> int:
        """The frames in which `max_labels_per_frame` was met."""
        return self._search.found().num_bounded

    def accept(self, vectors: Tensor) -> None:
        """Search further transcription vectors [T, K+1]."""
        if len(vectors) == 0:
            return
        vectors = _checked(vectors, self.options)
        done = 0
        while done < len(vectors):
            if self.num_vectors - self._anchor == self.most_vectors:
                self._settle()
            room = self.most_vectors - (self.num_vectors - self._anchor)
            piece = vectors[done : done + room]
            # A label's time is found after the vector that makes it stable, whatever the pieces.
            stable = len(self._track.labels) if self.follow else None
            searched = self._search.advance(piece, stable)
            self._keep(piece[:searched])
            self.num_vectors += searched
            done += searched
            if self.follow:
                self._follow()

    def progress(self) -> Progress:
        """Return the labels so far, with their times as the vectors so far suggest them."""
        track = self._track
        stable = len(track.labels)
        labels = self._best()
        unstable = labels[stable - len(self._settled.labels) :]
        if not unstable:
            return Progress(track, stable, (), tuple, self.num_vectors)
        find, skipped = self._recent_timings(labels), stable - self._followed
        return Progress(track, stable, unstable, lambda: tuple(find()[skipped:]), self.num_vectors)

    def finish(self) -> list[Hypothesis]:
        """Return the most probable output sequences, best first."""
        if self.num_vectors == 0:
            return [Hypothesis((), 0.0, 0.0, ())]
        options, settled = self.options, self._settled
        best = n_best(self._search.found(), options.n_best, options.length_normalised)
        hypotheses = []
        for labels, log_prob, score in best:
            whole = (*settled.labels, *labels)
            timings: tuple[Timing, ...] = ()
            if options.with_timings:
                timings = (*settled.timings, *self._timings_at_end(labels))
            frames = tuple(timing.frame for timing in timings)
            hypotheses.append(Hypothesis(whole, log_prob, score, frames, timings))
        return hypotheses

    def _timings_at_end(self, labels: Labels) -> list[Timing]:
        """Return the timings of a hypothesis's labels after the anchor."""
        if self._anchor > 0:
            return self._timings(self._anchor, self.num_vectors, labels, 0)()
        # The same call as of a search of whole inputs.
        f = self._vectors(0, self.num_vectors).clone()
        with torch.no_grad(), eval_mode(self.network):
            g = self.network(torch.tensor([labels], dtype=torch.int64))[0]
        return lattice_timings(f, g, labels)

    # --- The lattice ---

    def _keep(self, piece: Tensor) -> None:
        """Append vectors to those that are kept."""
        first = self.num_vectors - self._anchor
        needed = first + len(piece)
        if needed > len(self._f) or self._f.dtype != piece.dtype:
            room = min(self.most_vectors, max(needed, 2 * len(self._f), 64))
            grown = piece.new_empty(room, piece.shape[1])
            grown[:first] = self._f[:first]
            self._f = grown
        self._f[first:needed] = piece

    def _vectors(self, first: int, last: int) -> Tensor:
        """Return the vectors first to last - 1, counted from the first of the input."""
        return self._f[first - self._anchor : last - self._anchor]

    def _best(self) -> Labels:
        """Return the labels of the best hypothesis after the anchor; none if there is none."""
        best = n_best(self._search.found(), 1, self.options.length_normalised)
        return best[0][0] if best else ()

    def _timings(
        self, first: int, last: int, labels: Labels, skipped: int
    ) -> Callable[[], list[Timing]]:
        """Return a function that finds the timings of labels[skipped:], now or later.

        They are those in the lattice of vectors first to last - 1. The labels before them are
        emitted before `first`.
        """
        # Later vectors are written behind these, or into other memory.
        f, g = self._vectors(first, last), self._search.predictions(labels, skipped)

        def find() -> list[Timing]:
            found = lattice_timings(f, torch.from_numpy(g), labels[skipped:])
            return [timing.shifted(first) for timing in found]

        return find

    def _settle(self) -> None:
        """Move the anchor; module docstring."""
        labels, settled = self._best(), self._settled
        timings = self._timings(self._anchor, self.num_vectors, labels, 0)()
        frames = [timing.frame for timing in timings]
        anchor = self._anchor + self._quietest([frame - self._anchor for frame in frames])
        number = sum(frame < anchor for frame in frames)
        # A network whose labels may come at any time could leave all of them for later.
        number = max(number, len(labels) - self.most_vectors)
        settled.timings += self._timings(self._anchor, anchor, labels[:number], 0)()
        settled.labels += labels[:number]
        if self._search.num_hypotheses:
            self._search.settle(labels, number)
        rest = self._vectors(anchor, self.num_vectors).clone()
        self._f, self._anchor = rest, anchor
        self._followed = max(self._followed, len(settled.labels))
        self._followed_vector = max(self._followed_vector, anchor)
        if self.follow:  # the hypotheses that are left may agree on more labels
            stable = len(self._track.labels)
            self._add_stable(settled.labels[stable:], settled.timings[stable:])
            self._follow()

    def _quietest(self, frames: list[int]) -> int:
        """Return the middle of the longest time without a label in the third quarter."""
        first, last = self.most_vectors // 2, self.most_vectors * 3 // 4
        edges = [first, *(frame for frame in frames if first <= frame < last), last]
        gaps = [(later - earlier, -earlier) for earlier, later in pairwise(edges)]
        gap, start = max(gaps)
        return -start + (gap + 1) // 2

    # --- Stable labels ---

    def _follow(self) -> None:
        """Find the times of labels that have become stable."""
        track = self._track
        stable, number = len(track.labels), self._search.num_common()
        if number <= stable:
            return
        labels, before = self._best(), len(self._settled.labels)
        new = slice(stable - self._followed, number - self._followed)
        self._add_stable(
            labels[stable - before : number - before], self._recent_timings(labels)()[new]
        )
        if number - self._followed > 2 * TRACKED:
            self._followed = number - TRACKED
            self._followed_vector = track.timings[self._followed - 1].frame

    def _add_stable(self, labels: Sequence[int], timings: Sequence[Timing]) -> None:
        """Append stable labels; none is emitted before the one that precedes it."""
        track = self._track
        for label, timing in zip(labels, timings, strict=True):
            earliest = track.timings[-1].frame if track.timings else 0
            frame = max(earliest, timing.frame)
            track.labels.append(label)
            track.timings.append(timing._replace(frame=frame, end=max(frame, timing.end)))

    def _recent_timings(self, labels: Labels) -> Callable[[], list[Timing]]:
        """Return a function that finds the timings of labels from the followed ones on."""
        skipped = self._followed - len(self._settled.labels)
        if self.num_vectors == self._followed_vector or len(labels) == skipped:
            return list
        return self._timings(self._followed_vector, self.num_vectors, labels, skipped)


def _checked(vectors: Tensor, options: SearchOptions) -> Tensor:
    """Return the vectors with null's bias; raise ValueError for NaN or +inf."""
    if not vectors.numpy().max() < torch.inf:  # the maximum is NaN if any is
        raise ValueError("the transcription network gave NaN or +inf; check its weights")
    return with_null_bias(vectors, options.null_bias)
