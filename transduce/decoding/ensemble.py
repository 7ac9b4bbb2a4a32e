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
from torch.nn.utils.rnn import pad_sequence

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
from transduce.sequences import reverse_padded

# An impossible null has e to this power, so that a sum of logarithms has a difference.
LEAST_LOG_NULL = -1e5


class Ensemble(nn.Module):
    """The geometric mean of what its members expect next, normalised: a distribution over y.

    Members may differ in everything but what goes in and what comes out. An ensemble is made to be
    used, not trained.

    Members that go `backwards`, from the end of every sequence, expect other things next than the
    rest do. Either party is such a distribution, and Pr(y|x) their geometric mean, by the number of
    their members: over all y it adds up to one at most.
    """

    def __init__(
        self, members: Sequence[Transducer], backwards: Sequence[bool] | None = None
    ) -> None:
        super().__init__()
        if not members:
            raise ValueError("an ensemble needs a member; give at least one")
        if not all(isinstance(member, Transducer) for member in members):
            raise ValueError("the members of an ensemble must be transducers")
        _check_same("input_size", [m.transcription_network.lstm.input_size for m in members])
        _check_same("num_labels", [m.prediction_network.num_labels for m in members])
        self.backwards = tuple(backwards) if backwards is not None else (False,) * len(members)
        if len(self.backwards) != len(members):
            raise ValueError(
                f"an ensemble must know of each member whether it goes backwards, but is told so "
                f"of {len(self.backwards)} where there are {len(members)}"
            )
        self.members = nn.ModuleList(members)
        self.eval()

    @torch.no_grad()
    def losses(
        self, frames: Tensor, num_frames: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """-ln Pr(y|x) of each sequence in nats, [B], of the labels [B, U]."""
        for b, length in enumerate(check_frames(frames, num_frames)):
            if length == 0:
                raise ValueError(f"num_frames[{b}] must be at least 1, not 0")
        with evaluating(self):
            parties = self._parties(frames, num_frames)
            rows = torch.arange(len(labels), device=labels.device)
            return _losses(parties, rows, labels, num_labels)

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
        the others, until no live one is more probable than the n best that have ended. Where some
        members go backwards, n is the beam's width for either party, and both together choose from
        what they have found. The timings are the first member's, with the mean of the
        confidences of all that go its way.
        """
        check_width(beam_width, n_best, max_labels_per_frame)
        lengths = check_frames(frames, num_frames)
        heard = [b for b, T in enumerate(lengths) if T > 0]
        found = [[Hypothesis((), 0.0, 0.0, ())] for _ in lengths]
        if not heard:
            return found
        with evaluating(self):
            parties = self._parties(frames[heard], num_frames[heard])
            most_labels = [max_labels_per_frame * lengths[b] for b in heard]
            kept = n_best if len(parties) == 1 else beam_width
            beams = [party.search(most_labels, beam_width, kept) for party in parties]
            if bounded := set().union(*(beam.bounded for beam in beams)):
                warnings.warn(
                    f"item {heard[min(bounded)]} had not ended after {max_labels_per_frame} labels "
                    "for each of its frames; longer sequences were not looked at",
                    stacklevel=2,
                )
            ended = [beam.ended for beam in beams]
            best = ended[0] if len(parties) == 1 else _chosen(parties, ended, n_best)
            for i, b in enumerate(heard):
                found[b] = [parties[0].hypothesis(i, one, with_timings) for one in best[i]]
        return found

    def _parties(self, frames: Tensor, num_frames: Tensor) -> list[_Party]:
        """The members, at work on some utterances: those that go the first one's way, the rest."""
        members = cast(Iterable[Transducer], self.members)
        ways = list(zip(members, self.backwards, strict=True))
        return [
            _Party([member for member, its in ways if its == way], way, frames, num_frames)
            for way in dict.fromkeys(self.backwards)
        ]


class _Prefix(NamedTuple):
    """Labels that an utterance may begin with; or, if they have ended, all of its labels."""

    utterance: int
    log_prob: float
    labels: tuple[int, ...]


class _Party:
    """The members of an ensemble that go one way, at work on some utterances."""

    def __init__(
        self, members: Sequence[Transducer], backwards: bool, frames: Tensor, num_frames: Tensor
    ) -> None:
        self.backwards = backwards
        if backwards:
            frames = reverse_padded(frames, num_frames)
        self.columns = [_Column(member, frames, num_frames) for member in members]

    def losses(self, rows: Tensor, labels: Tensor, num_labels: Tensor) -> Tensor:
        """-ln Pr(y|x) in nats, [R], of labels [R, U] for the utterances of these numbers."""
        if self.backwards:
            labels = reverse_padded(labels, num_labels)
        losses = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
        each = torch.arange(len(labels), device=labels.device)
        impossible = torch.zeros_like(each, dtype=torch.bool)
        self._begin(rows)
        for u in range(labels.shape[1] + 1):
            # After the last label, and ever after, null: the end.
            following = labels[:, u] if u < labels.shape[1] else torch.zeros_like(each)
            following = following.where(u < num_labels, NULL)
            losses -= self._expected()[each, following].where(u <= num_labels, 0.0)
            # What is impossible stays so: what would follow it has no distribution.
            losses = losses.where(~impossible, torch.inf)
            impossible = losses == torch.inf
            self._follow(each, following)
        return losses

    def search(self, most_labels: Sequence[int], beam_width: int, n_best: int) -> _Beam:
        """The beam when all has ended; its labels are in their order, whichever the way."""
        beam = _Beam(most_labels, beam_width, n_best)
        self._begin(torch.arange(len(most_labels), device=self.columns[0].f.device))
        while beam.live:
            self._follow(*beam.follow(self._expected()))
        if self.backwards:
            beam.ended = [[p._replace(labels=p.labels[::-1]) for p in best] for best in beam.ended]
        return beam

    def hypothesis(self, utterance: int, found: _Prefix, with_timings: bool) -> Hypothesis:
        """What was found, with the members' timings."""
        order = -1 if self.backwards else 1
        labels, timings = found.labels[::order], list[Timing]()
        if with_timings:
            members = [column.timings(utterance, labels) for column in self.columns]
            timings = [
                same[0]._replace(confidence=sum(t.confidence for t in same) / len(same))
                for same in zip(*members, strict=True)
            ]
        emitted = tuple(timing.frame for timing in timings)
        one = Hypothesis(labels, found.log_prob, found.log_prob, emitted, tuple(timings))
        return one.from_the_end(self.columns[0].num_vectors(utterance)) if self.backwards else one

    def _begin(self, rows: Tensor) -> None:
        for column in self.columns:
            column.begin(rows)

    def _expected(self) -> Tensor:
        """The geometric mean of the members' distributions, normalised."""
        expected = [column.expected() for column in self.columns]
        return torch.stack(expected).mean(0).log_softmax(-1)

    def _follow(self, prefixes: Tensor, labels: Tensor) -> None:
        for column in self.columns:
            column.follow(prefixes, labels)


def _losses(parties: Sequence[_Party], rows: Tensor, labels: Tensor, num_labels: Tensor) -> Tensor:
    """The parties' losses, weighed by the number of their members."""
    size = sum(len(party.columns) for party in parties)
    weighed = [
        party.losses(rows, labels, num_labels) * (len(party.columns) / size) for party in parties
    ]
    return torch.stack(weighed).sum(0)


def _chosen(
    parties: Sequence[_Party], ended: Sequence[Sequence[Sequence[_Prefix]]], n_best: int
) -> list[list[_Prefix]]:
    """Of each utterance the n most probable of what any party has found, to all of them."""
    candidates = [
        (b, labels)
        for b, each in enumerate(zip(*ended, strict=True))
        for labels in sorted({one.labels for some in each for one in some})
    ]
    device = parties[0].columns[0].f.device
    rows = torch.tensor([b for b, _ in candidates], device=device)
    num_labels = torch.tensor([len(labels) for _, labels in candidates], device=device)
    labels = pad_sequence(
        [torch.tensor(labels, dtype=torch.int64, device=device) for _, labels in candidates], True
    )
    best: list[list[_Prefix]] = [[] for _ in ended[0]]
    losses = _losses(parties, rows, labels, num_labels).tolist()
    for (b, found), loss in zip(candidates, losses, strict=True):
        best[b].append(_Prefix(b, -loss, found))
    return [sorted(some, key=_likeliest_first)[:n_best] for some in best]


class _Column:
    """One member's lattices for some prefixes, of which it has the last column: all t, one u."""

    def __init__(self, member: Transducer, frames: Tensor, num_frames: Tensor) -> None:
        self.network = member.prediction_network
        f, num_vectors = member.transcription_network(frames, num_frames)
        self.inside = torch.arange(f.shape[1], device=f.device) < num_vectors[:, None]
        for b, length in enumerate(num_vectors.tolist()):
            check_numbers(b, f[b, :length])
        self.f, self.last = f.double(), num_vectors.long() - 1

    def begin(self, rows: Tensor) -> None:
        """With prefixes that have no labels yet, of the utterances of these numbers."""
        self.rows = rows  # the utterance of each prefix
        self.labels = torch.full_like(rows, NULL)  # the last of each
        self.state: State | None = None  # before it
        # ln of the probability that the last label is emitted at t: that column u is entered there.
        self.log_entered = self.f.new_full((len(rows), self.f.shape[1]), -torch.inf)
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

    def num_vectors(self, utterance: int) -> int:
        """T, of the transcription."""
        return int(self.last[utterance]) + 1

    def timings(self, utterance: int, labels: tuple[int, ...]) -> list[Timing]:
        """When this member emits the labels."""
        return timings_of(self.network, self.f[utterance, : self.num_vectors(utterance)], labels)


class _Beam:
    """The most probable prefixes of each utterance, of as many labels each, and what has ended."""

    def __init__(self, most_labels: Sequence[int], beam_width: int, n_best: int) -> None:
        self.most_labels, self.beam_width, self.n_best = most_labels, beam_width, n_best
        self.bounded: set[int] = set()  # utterances in which that was met
        self.live = [_Prefix(b, 0.0, ()) for b in range(len(most_labels))]
        self.ended: list[list[_Prefix]] = [[] for _ in most_labels]

    def follow(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Take the next labels, given ln Pr(k|y,x) [R, K+1]: which prefixes go on, with which."""
        device, live = expected.device, self.live
        so_far = torch.tensor([prefix.log_prob for prefix in live], dtype=torch.float64)
        log_prob = so_far[:, None] + expected.cpu()
        self.live, rows, labels = [], list[int](), list[int]()
        for b, group in groupby(range(len(live)), key=lambda r: live[r].utterance):
            here = list(group)
            ends = [live[r]._replace(log_prob=float(log_prob[r, NULL])) for r in here]
            best = sorted(self.ended[b] + ends, key=_likeliest_first)
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


def _likeliest_first(one: _Prefix) -> tuple[float, tuple[int, ...]]:
    return -one.log_prob, one.labels


def _check_same(name: str, values: Sequence[int]) -> None:
    for m, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"the members of an ensemble must have the same {name}, but that of the first is "
                f"{values[0]} and that of member {m + 1} is {value}"
            )
