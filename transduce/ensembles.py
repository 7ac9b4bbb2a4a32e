"""Several transducers as one: label by label, the average of what each expects next.

Transducers that were trained apart emit the same labels at different frames, so that an average at
the nodes of the lattice is of things that do not belong together. What they agree about is the next
label. A transducer knows Pr(k|y,x), the probability that label k follows y, whatever the alignment,
and that nothing does (docs/derivations.md, section 6); these are averaged, and searched through.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.decoding.hypothesis import Hypothesis, Timing
from transduce.decoding.search import (
    check_frames,
    check_numbers,
    check_width,
    evaluating,
    timings_of,
)
from transduce.lstm.layer import State
from transduce.networks import Transducer

# An impossible null has e to this power, so that a sum of logarithms has a difference.
LEAST_LOG_NULL = -1e5


class Ensemble(nn.Module):
    """The geometric mean of what its members expect next, normalised: a distribution over y.

    Members may differ in everything but what goes in and what comes out. An ensemble is made to be
    used, not trained.
    """

    def __init__(self, members: Sequence[Transducer]) -> None:
        super().__init__()
        if not members:
            raise ValueError("an ensemble needs a member; give at least one")
        if not all(isinstance(member, Transducer) for member in members):
            raise ValueError("the members of an ensemble must be transducers")
        _check_same("input_size", [m.transcription_network.lstm.input_size for m in members])
        _check_same("num_labels", [m.prediction_network.num_labels for m in members])
        self.members = nn.ModuleList(members)
        self.eval()

    @torch.no_grad()
    def losses(
        self, frames: Tensor, num_frames: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """-ln Pr(y|x) of each sequence in nats, [B], of the labels [B, U]."""
        rows = torch.arange(len(labels), device=labels.device)
        losses = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
        with evaluating(self):
            columns = self._columns(frames, num_frames)
            for u in range(labels.shape[1] + 1):
                # After the last label, and ever after, null: the end.
                following = labels[:, u] if u < labels.shape[1] else torch.zeros_like(rows)
                following = following.where(u < num_labels, NULL)
                expected = _mean([column.expected() for column in columns])
                losses -= expected[rows, following].where(u <= num_labels, 0.0)
                for column in columns:
                    column.follow(rows, following)
        return losses

    @torch.no_grad()
    def search(
        self,
        frames: Tensor,  # [B, T, D], or ids [B, T]
        num_frames: Tensor,  # [B]
        *,
        beam_width: int,
        n_best: int = 1,
        max_labels_per_frame: int = 20,
        with_timings: bool = True,
    ) -> list[list[Hypothesis]]:
        """The n most probable output sequences of each utterance, best first, by ln Pr(y|x).

        All live sequences of the beam have the same number of labels. One that has ended waits for
        the others, until no live one is more probable than the n best that have ended. The timings
        are the first member's, with the mean of all members' confidences.
        """
        check_width(beam_width, n_best, max_labels_per_frame)
        lengths = check_frames(frames, num_frames)
        beam = _Beam(lengths, beam_width, n_best, max_labels_per_frame)
        with evaluating(self):
            heard = torch.tensor([prefix.utterance for prefix in beam.live], device=frames.device)
            columns = self._columns(frames[heard], num_frames[heard]) if beam.live else []
            while beam.live:
                rows, labels = beam.follow(_mean([column.expected() for column in columns]))
                for column in columns:
                    column.follow(rows, labels)
            if beam.bounded:
                warnings.warn(
                    f"item {min(beam.bounded)} had not ended after {max_labels_per_frame} labels "
                    "for each of its frames; longer sequences were not looked at",
                    stacklevel=2,
                )
            places = {b: i for i, b in enumerate(heard.tolist())}
            return [
                [_hypothesis(columns, places.get(b), one, with_timings) for one in ended]
                for b, ended in enumerate(beam.ended)
            ]

    def _columns(self, frames: Tensor, num_frames: Tensor) -> list[_Column]:
        members = cast(Iterable[Transducer], self.members)
        return [_Column(member, frames, num_frames) for member in members]


class _Prefix(NamedTuple):
    """Labels that an utterance may begin with; or, if they have ended, all of its labels."""

    utterance: int
    log_prob: float
    labels: tuple[int, ...]


class _Column:
    """One member's lattices for some prefixes, of which it has the last column: all t, one u."""

    def __init__(self, member: Transducer, frames: Tensor, num_frames: Tensor) -> None:
        self.network = member.prediction_network
        f, num_vectors = member.transcription_network(frames, num_frames)
        self.inside = torch.arange(f.shape[1], device=f.device) < num_vectors[:, None]
        for b, length in enumerate(num_vectors.tolist()):
            check_numbers(b, f[b, :length])
        self.f, self.last = f.double(), num_vectors.long() - 1
        self.rows = torch.arange(len(f), device=f.device)  # the utterance of each prefix
        self.labels = torch.full_like(self.rows, NULL)  # the last of each
        self.state: State | None = None  # before it
        # ln of the probability that the last label is emitted at t: that column u is entered there.
        self.log_entered = torch.full(f.shape[:2], -torch.inf, dtype=torch.float64, device=f.device)
        self.log_entered[:, 0] = 0.0

    def expected(self) -> Tensor:
        """ln Pr(k|y,x) for every prefix y and what may follow it, null being the end, [R, K+1]."""
        g, self.state = self.network.step(self.labels, self.state)
        self.log_pr = (self.f[self.rows] + g.double()[:, None]).log_softmax(-1)  # [R, T, K+1]
        log_null = self.log_pr[..., NULL].clamp(min=LEAST_LOG_NULL)
        # α(t,u) sums over where the column was entered; from there to t all outputs are null.
        before = nn.functional.pad(log_null.cumsum(1), (1, 0))[:, :-1]
        log_alpha = before + torch.logcumsumexp(self.log_entered - before, 1)
        self.log_alpha = log_alpha.masked_fill(~self.inside[self.rows], -torch.inf)
        joint = torch.logsumexp(self.log_alpha[..., None] + self.log_pr, 1)
        ends = (self.log_alpha + log_null).gather(1, self.last[self.rows, None])
        joint = torch.cat((ends, joint[:, NULL + 1 :]), 1)
        return joint - joint.logsumexp(1, keepdim=True)

    def follow(self, prefixes: Tensor, labels: Tensor) -> None:
        """Go on with some prefixes, each with one more label."""
        log_label = self.log_pr[prefixes, :, labels]
        self.log_entered = self.log_alpha[prefixes] + log_label
        self.rows, self.labels = self.rows[prefixes], labels
        assert self.state is not None
        h, s = self.state
        self.state = h[:, prefixes], s[:, prefixes]

    def timings(self, place: int, labels: tuple[int, ...]) -> list[Timing]:
        """When this member emits the labels of an utterance."""
        return timings_of(self.network, self.f[place, : self.last[place] + 1], labels)


def _hypothesis(
    columns: Sequence[_Column], place: int | None, found: _Prefix, with_timings: bool
) -> Hypothesis:
    """What was found; `place` is the utterance's in the columns, None if it has no frames."""
    timings: list[Timing] = []
    if with_timings and place is not None:
        members = [column.timings(place, found.labels) for column in columns]
        timings = [
            same[0]._replace(confidence=sum(t.confidence for t in same) / len(same))
            for same in zip(*members, strict=True)
        ]
    emitted = tuple(timing.frame for timing in timings)
    return Hypothesis(found.labels, found.log_prob, found.log_prob, emitted, tuple(timings))


def _mean(expected: Sequence[Tensor]) -> Tensor:
    """The geometric mean of distributions, normalised."""
    return torch.stack(tuple(expected)).mean(0).log_softmax(-1)


class _Beam:
    """The most probable prefixes of each utterance, all with as many labels, and those that ended.

    An utterance without frames has ended before it begins.
    """

    def __init__(
        self, lengths: Sequence[int], beam_width: int, n_best: int, max_labels_per_frame: int
    ) -> None:
        self.beam_width, self.n_best = beam_width, n_best
        self.most_labels = [max_labels_per_frame * T for T in lengths]
        self.bounded: set[int] = set()  # utterances in which that was met
        nothing = [_Prefix(b, 0.0, ()) for b in range(len(lengths))]
        self.ended = [[] if T > 0 else [nothing[b]] for b, T in enumerate(lengths)]
        self.live = [prefix for prefix, T in zip(nothing, lengths, strict=True) if T > 0]

    def follow(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Take the next labels, given ln Pr(k|y,x) [R, K+1]: which prefixes go on, with which."""
        device, live = expected.device, self.live
        so_far = torch.tensor([prefix.log_prob for prefix in live], dtype=torch.float64)
        log_prob = so_far[:, None] + expected.cpu()
        self.live, rows, labels = [], list[int](), list[int]()
        for b, group in groupby(range(len(live)), key=lambda r: live[r].utterance):
            here = list(group)
            ends = [live[r]._replace(log_prob=float(log_prob[r, NULL])) for r in here]
            best = sorted(self.ended[b] + ends, key=lambda p: (-p.log_prob, p.labels))
            self.ended[b] = best[: self.n_best]
            # A longer one is less probable still.
            least = -torch.inf if len(best) < self.n_best else self.ended[b][-1].log_prob
            following = log_prob[here, NULL + 1 :]
            values, where = following.flatten().topk(min(self.beam_width, following.numel()))
            for value, i in zip(values.tolist(), where.tolist(), strict=True):
                if not value > least:
                    break  # the others are less probable still
                r, label = here[i // following.shape[1]], i % following.shape[1] + 1
                if len(live[r].labels) == self.most_labels[b]:
                    self.bounded.add(b)
                    continue
                self.live.append(_Prefix(b, value, (*live[r].labels, label)))
                rows.append(r)
                labels.append(label)
        followed = torch.tensor([rows, labels], dtype=torch.int64, device=device)
        return followed[0], followed[1]


def _check_same(name: str, values: Sequence[int]) -> None:
    for m, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"the members of an ensemble must have the same {name}, but that of the first is "
                f"{values[0]} and that of member {m + 1} is {value}"
            )
