"""Several transducers as one: the average, label by label, of the next label that each expects.

Transducers that were trained apart emit the same labels at different frames, so averaging their
outputs at the nodes of the lattice would mix things that do not belong together. They do agree on
the next label. A transducer gives Pr(k|y,x), the probability that label k follows y whatever the
alignment, and the probability that y is complete (docs/derivations.md, section 6); the ensemble
averages these, and searches with the average.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from transduce.alphabet import NULL
from transduce.data.batches import Batch, Example
from transduce.decoding.hypothesis import Hypothesis, Labels, Timing
from transduce.decoding.options import SearchOptions
from transduce.decoding.problem import Problem
from transduce.decoding.protocols import Scorer, State, TransducerModel, rows_of
from transduce.decoding.search import (
    check_frames,
    check_numbers,
    eval_mode,
    reads_backwards,
    timings_of,
)
from transduce.kernels.backends import Backend
from transduce.networks import TranscriptionNetwork
from transduce.sequences import reverse_padded

# The logarithm that stands for an impossible null: finite, so that differences of sums exist.
LEAST_LOG_NULL = -1e5


class Ensemble(nn.Module):
    """The normalised geometric mean of its members' next-label distributions.

    Members may differ in everything but their inputs and outputs. An ensemble is for decoding, not
    for training.

    Members that read backwards expect other labels next than the rest. Each direction's members
    form such a distribution, and Pr(y|x) is the geometric mean of the two, weighted by their
    numbers of members; summed over all y it is at most one. In a search the forward and the
    backward models rescore each other's N-best lists.

    Scorers, such as joint n-gram models, find no outputs of their own. In a search they rank those
    that the members have found, and each counts as one member (docs/derivations.md, section 13).
    """

    kind, reads_input, has_timings, has_labels = "transducer", True, True, True

    def __init__(
        self, members: Sequence[TransducerModel], *, scorers: Sequence[Scorer] = ()
    ) -> None:
        super().__init__()
        if not members:
            raise ValueError("an ensemble needs a member; give at least one")
        for member in members:
            if not isinstance(member, nn.Module) or not hasattr(member, "prediction_network"):
                raise ValueError("the members of an ensemble must be transducers")
        networks = [member.transcription_network for member in members]
        ours = [network for network in networks if isinstance(network, TranscriptionNetwork)]
        _check_same("input_size", [network.input_size for network in ours])
        _check_same("num_labels", [network.output.out_features - 1 for network in ours])
        self.members = nn.ModuleList(cast(Sequence[nn.Module], members))
        self.scorers = tuple(scorers)
        self.eval()

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether each direction is backward, the first member's direction first."""
        return tuple(dict.fromkeys(map(reads_backwards, self._members())))

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return -ln Pr(y|x) of each sequence in nats, [B]; scorers have no part in it."""
        for b, length in enumerate(check_frames(batch.frames, batch.num_frames)):
            if length == 0:
                raise ValueError(f"num_frames[{b}] must be at least 1, not 0")
        with eval_mode(self):
            groups = self._groups(batch.frames, batch.num_frames)
            rows = torch.arange(len(batch.labels), device=batch.labels.device)
            return _losses(groups, rows, batch.labels, batch.num_labels)

    @torch.no_grad()
    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[tuple[Hypothesis, ...]]:
        """Return the n most probable output sequences of each utterance, best first, by ln Pr(y|x).

        All live sequences of the beam have the same number of labels. A complete one waits until no
        live one is more probable than the n best complete ones. If members read in both directions,
        or there are scorers, each direction keeps as many as the beam is wide, and all directions
        and scorers score all of them. The timings are the first member's; the confidences are the
        mean over the members of its direction. Hypotheses are never normalised by length, and there
        is no fusion.
        """
        if options.fuses:
            raise ValueError("an ensemble has no fusion; leave it out, or give one model")
        if self.scorers and options.beam_width == len(self.directions) == 1:
            raise ValueError(
                "beam_width is 1, which leaves the joint n-gram model one output to rank; give a "
                "wider beam, such as 4"
            )
        lengths = check_frames(batch.frames, batch.num_frames)
        heard = [b for b, T in enumerate(lengths) if T > 0]
        found: list[tuple[Hypothesis, ...]] = [(Hypothesis((), 0.0, 0.0, ()),) for _ in lengths]
        if not heard:
            return found
        with eval_mode(self):
            inputs = batch.frames[heard], batch.num_frames[heard]
            groups = self._groups(*inputs, options.null_bias)
            most_labels = [options.max_labels_per_frame * lengths[b] for b in heard]
            rescores = len(groups) > 1 or bool(self.scorers)
            kept = options.beam_width if rescores else options.n_best
            beams = [group.search(most_labels, options.beam_width, kept) for group in groups]
            if bounded := set().union(*(beam.bounded for beam in beams)):
                warnings.warn(
                    f"{batch.names[heard[min(bounded)]]} had not ended after "
                    f"{options.max_labels_per_frame} labels for each of its frames; longer "
                    "sequences were not looked at",
                    stacklevel=2,
                )
            complete = [beam.complete for beam in beams]
            best = complete[0]
            if rescores:
                scorers = [partial(scorer.log_joints, *inputs) for scorer in self.scorers]
                best = _rescored(groups, scorers, complete, options.n_best)
            for i, b in enumerate(heard):
                found[b] = tuple(
                    groups[0].hypothesis(i, one, options.with_timings) for one in best[i]
                )
        return found

    def can_align(self, example: Example) -> bool:
        """Return True: a transducer can align any labels with one frame."""
        return True

    def rows_per_input(self, options: SearchOptions) -> int:
        """Return how many rows of f a search holds for each input: a beam for each direction."""
        return options.beam_width * len(self.directions)

    def _members(self) -> list[TransducerModel]:
        return list(cast(Iterable[TransducerModel], self.members))

    def _groups(
        self, frames: Tensor, num_frames: Tensor, null_bias: float = 0.0
    ) -> list[_DirectionGroup]:
        """Put the members of each direction to work on some utterances."""
        return [
            _DirectionGroup(
                [member for member in self._members() if reads_backwards(member) == backwards],
                *(backwards, frames, num_frames, null_bias),
            )
            for backwards in self.directions
        ]


class _Candidate(NamedTuple):
    """The first labels of an utterance, or all of them if it is complete."""

    utterance: int
    log_prob: float
    labels: Labels


class _DirectionGroup:
    """The members that read in one direction, at work on some utterances."""

    def __init__(
        self,
        members: Sequence[TransducerModel],
        backwards: bool,
        frames: Tensor,
        num_frames: Tensor,
        null_bias: float,
    ) -> None:
        self.backwards = backwards
        if backwards:
            frames = reverse_padded(frames, num_frames)
        self.columns = [_Column(member, frames, num_frames, null_bias) for member in members]

    def losses(self, rows: Tensor, labels: Tensor, num_labels: Tensor) -> Tensor:
        """Return -ln Pr(y|x) in nats, [R], of labels [R, U], each for the utterance rows[r]."""
        if self.backwards:
            labels = reverse_padded(labels, num_labels)
        losses = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
        each = torch.arange(len(labels), device=labels.device)
        impossible = torch.zeros_like(each, dtype=torch.bool)
        self._start(rows)
        for u in range(labels.shape[1] + 1):
            # Null follows the last label, and marks the end.
            following = labels[:, u] if u < labels.shape[1] else torch.zeros_like(each)
            following = following.where(u < num_labels, NULL)
            losses -= self._expected()[each, following].where(u <= num_labels, 0.0)
            # After an impossible label there is no distribution: the loss stays infinite.
            losses = losses.where(~impossible, torch.inf)
            impossible = losses == torch.inf
            self._advance(each, following)
        return losses

    def search(self, most_labels: Sequence[int], beam_width: int, n_best: int) -> _Beam:
        """Search until every sequence is complete; its labels are in forward order."""
        beam = _Beam(most_labels, beam_width, n_best)
        self._start(torch.arange(len(most_labels), device=self.columns[0].f.device))
        while beam.live:
            self._advance(*beam.advance(self._expected()))
        if self.backwards:
            beam.complete = [
                [prefix._replace(labels=prefix.labels[::-1]) for prefix in best]
                for best in beam.complete
            ]
        return beam

    def hypothesis(self, utterance: int, found: _Candidate, with_timings: bool) -> Hypothesis:
        """Make a hypothesis of a complete sequence, with the members' timings."""
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
        return one.reversed(self.columns[0].num_vectors(utterance)) if self.backwards else one

    def _start(self, rows: Tensor) -> None:
        for column in self.columns:
            column.start(rows)

    def _expected(self) -> Tensor:
        """Return the normalised geometric mean of the members' distributions, [R, K+1]."""
        expected = [column.expected() for column in self.columns]
        return torch.stack(expected).mean(0).log_softmax(-1)

    def _advance(self, prefixes: Tensor, labels: Tensor) -> None:
        for column in self.columns:
            column.advance(prefixes, labels)


def _losses(
    groups: Sequence[_DirectionGroup], rows: Tensor, labels: Tensor, num_labels: Tensor
) -> Tensor:
    """Return the mean of the groups' losses, weighted by their numbers of members."""
    size = sum(len(group.columns) for group in groups)
    weighted = [
        group.losses(rows, labels, num_labels) * (len(group.columns) / size) for group in groups
    ]
    return torch.stack(weighted).sum(0)


def _rescored(
    groups: Sequence[_DirectionGroup],
    scorers: Sequence[Callable[[Tensor, Tensor, Tensor], Tensor]],
    complete: Sequence[Sequence[Sequence[_Candidate]]],
    n_best: int,
) -> list[list[_Candidate]]:
    """Score all sequences that any group has found with all groups and scorers, and return the n
    best of each.

    A scorer has ln Pr(x, y) of rows, labels and their numbers. Normalised over the sequences of an
    input it is an estimate of ln Pr(y|x), and counts as that of one member.
    """
    candidates = [
        (b, labels)
        for b, each in enumerate(zip(*complete, strict=True))
        for labels in sorted({one.labels for some in each for one in some})
    ]
    device = groups[0].columns[0].f.device
    rows = torch.tensor([b for b, _ in candidates], device=device)
    num_labels = torch.tensor([len(labels) for _, labels in candidates], device=device)
    padded = pad_sequence(
        [torch.tensor(labels, dtype=torch.int64, device=device) for _, labels in candidates], True
    )
    if len(groups) == 1:  # its search has the probabilities
        known = [{one.labels: one.log_prob for one in some} for some in complete[0]]
        found = [known[b][labels] for b, labels in candidates]
        log_probs = torch.tensor(found, dtype=torch.float64, device=device)
    else:
        log_probs = -_losses(groups, rows, padded, num_labels).double()
    if scorers:
        each = torch.stack([scorer(rows, padded, num_labels).double() for scorer in scorers])
        of_inputs = torch.split(each, torch.bincount(rows).tolist(), 1)
        normalised = torch.cat([some.log_softmax(1) for some in of_inputs], 1)
        size = sum(len(group.columns) for group in groups)
        log_probs = (size * log_probs + normalised.sum(0)) / (size + len(scorers))
    best: list[list[_Candidate]] = [[] for _ in complete[0]]
    for (b, sequence), log_prob in zip(candidates, log_probs.tolist(), strict=True):
        best[b].append(_Candidate(b, log_prob, sequence))
    return [sorted(some, key=_most_probable_first)[:n_best] for some in best]


class _Column:
    """One member's lattices for some prefixes: the last column of each, all t of one u."""

    def __init__(
        self, member: TransducerModel, frames: Tensor, num_frames: Tensor, null_bias: float
    ) -> None:
        self.network = member.prediction_network
        f, num_vectors = member.transcription_network(frames, num_frames)
        self.inside = torch.arange(f.shape[1], device=f.device) < num_vectors[:, None]
        for b, length in enumerate(num_vectors.tolist()):
            check_numbers(b, f[b, :length])
        self.f, self.last = f.double(), num_vectors.long() - 1
        self.f[..., NULL] += null_bias

    def start(self, rows: Tensor) -> None:
        """Begin with one empty prefix for the utterance of each row."""
        self.rows = rows  # the utterance of each prefix
        self.labels = torch.full_like(rows, NULL)  # the last label of each prefix
        self.state: State = self.network.start(len(rows))  # before that label
        # ln of the probability that the last label is emitted at t, where column u is entered.
        self.log_entered = self.f.new_full((len(rows), self.f.shape[1]), -torch.inf)
        self.log_entered[:, 0] = 0.0

    def expected(self) -> Tensor:
        """Return ln Pr(y k|x) of every prefix y and label k, null being the end, [R, K+1]."""
        g, self.state = self.network.step(self.labels, self.state)
        self.log_pr = (self.f[self.rows] + g.double()[:, None]).log_softmax(-1)  # [R, T, K+1]
        log_null = self.log_pr[..., NULL].clamp(min=LEAST_LOG_NULL)
        # α(t,u) sums over the frames at which the column was entered; from there on all outputs up
        # to t are null.
        before = nn.functional.pad(log_null.cumsum(1), (1, 0))[:, :-1]
        log_alpha = before + torch.logcumsumexp(self.log_entered - before, 1)
        self.log_alpha = log_alpha.masked_fill(~self.inside[self.rows], -torch.inf)
        joint = torch.logsumexp(self.log_alpha[..., None] + self.log_pr, 1)
        ends = (self.log_alpha + log_null).gather(1, self.last[self.rows, None])
        return torch.cat((ends, joint[:, NULL + 1 :]), 1)

    def advance(self, prefixes: Tensor, labels: Tensor) -> None:
        """Continue with some of the prefixes, each with one more label."""
        log_label = self.log_pr[prefixes, :, labels]
        self.log_entered = self.log_alpha[prefixes] + log_label
        self.rows, self.labels = self.rows[prefixes], labels
        self.state = rows_of(self.state, prefixes)

    def num_vectors(self, utterance: int) -> int:
        """Return T, the number of transcription vectors."""
        return int(self.last[utterance]) + 1

    def timings(self, utterance: int, labels: Labels) -> list[Timing]:
        """Return when this member emits the labels."""
        f = self.f[utterance, : self.num_vectors(utterance)]
        problem = Problem([f], self.network, None, f.shape[-1], SearchOptions())
        return timings_of(problem, f, labels)


class _Beam:
    """The most probable prefixes of each utterance, all of one length, and the complete ones."""

    def __init__(self, most_labels: Sequence[int], beam_width: int, n_best: int) -> None:
        self.most_labels, self.beam_width, self.n_best = most_labels, beam_width, n_best
        self.bounded: set[int] = set()  # utterances in which `most_labels` was met
        self.live = [_Candidate(b, 0.0, ()) for b in range(len(most_labels))]
        self.complete: list[list[_Candidate]] = [[] for _ in most_labels]

    def advance(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next labels, given ln Pr(k|y,x) [R, K+1]; return which prefixes go on with
        which labels."""
        device, live = expected.device, self.live
        so_far = torch.tensor([prefix.log_prob for prefix in live], dtype=torch.float64)
        log_prob = so_far[:, None] + expected.cpu()
        self.live, rows, labels = [], list[int](), list[int]()
        for b, group in groupby(range(len(live)), key=lambda r: live[r].utterance):
            here = list(group)
            ends = [live[r]._replace(log_prob=float(log_prob[r, NULL])) for r in here]
            best = sorted(self.complete[b] + ends, key=_most_probable_first)
            self.complete[b] = best[: self.n_best]
            # No extension is more probable than its prefix.
            least = -torch.inf if len(best) < self.n_best else self.complete[b][-1].log_prob
            following = log_prob[here, NULL + 1 :]
            values, where = following.flatten().topk(min(self.beam_width, following.numel()))
            for value, i in zip(values.tolist(), where.tolist(), strict=True):
                if not value > least:
                    break  # the others are less probable still
                r, label = here[i // following.shape[1]], i % following.shape[1] + 1
                if len(live[r].labels) == self.most_labels[b]:
                    self.bounded.add(b)
                    continue
                self.live.append(_Candidate(b, value, (*live[r].labels, label)))
                rows.append(r)
                labels.append(label)
        chosen = torch.tensor([rows, labels], dtype=torch.int64, device=device)
        return chosen[0], chosen[1]


def _most_probable_first(one: _Candidate) -> tuple[float, Labels]:
    return -one.log_prob, one.labels


def _check_same(name: str, values: Sequence[int]) -> None:
    for m, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"the members of an ensemble must have the same {name}, but that of the first is "
                f"{values[0]} and that of member {m + 1} is {value}"
            )
