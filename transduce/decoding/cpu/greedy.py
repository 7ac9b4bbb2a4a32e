"""The greedy search on the CPU, compiled by Numba.

The utterances of a block go through their frames together. The prediction network is stepped for
all that have just emitted a label at once, so that its weights are read once for many utterances.
Each thread has blocks of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.decoding.cpu.prediction import (
    BLOCK,
    PackedWeights,
    packed_weights,
    step_prefixes,
)
from transduce.decoding.hypothesis import Greedy, check_prediction
from transduce.decoding.problem import Problem, padded
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team

ROOM = 5  # states kept for each utterance of a block: memory against how often they are compacted


class Utterances(NamedTuple):
    """A padded batch to search."""

    f: np.ndarray  # [B, T, K+1]
    lengths: np.ndarray  # [B], numbers of vectors
    max_labels_per_frame: int


class Paths(NamedTuple):
    """The greedy alignments of a batch."""

    labels: np.ndarray  # [B, T x max_labels_per_frame]
    times: np.ndarray  # the same, the frame of each label
    num_labels: np.ndarray  # [B]
    num_bounded: np.ndarray  # [B], frames in which `max_labels_per_frame` was met
    log_prob: np.ndarray  # [B]
    largest: np.ndarray  # [B], the largest number in g so far; one row a block


class Past(NamedTuple):
    """The prediction network after the labels before a piece of an utterance; [0] without one."""

    h: np.ndarray  # [1, L, H]
    s: np.ndarray  # [1, L, H]
    g: np.ndarray  # [1, K+1]


def greedy_searches(problem: Problem) -> list[Greedy]:
    """Return each utterance's greedy alignment."""
    network = problem.peephole_network()
    assert network is not None
    weights = packed_weights(network)
    f, num_vectors = padded(problem.transcriptions)
    f = f.to(torch.promote_types(f.dtype, torch.float32)).contiguous()
    utterances = Utterances(f.numpy(), num_vectors.numpy(), problem.max_labels_per_frame)
    paths = _new_paths(utterances)
    rows, starts = shares_of(utterances.lengths, num_threads())
    past = _past(weights, 0, f.shape[2])
    _search_shares(team(len(starts) - 1), (rows, starts, utterances, weights, paths, past))
    check_prediction(float(paths.largest.max()))
    return [
        Greedy(tuple(y[:n].tolist()), tuple(when[:n].tolist()), float(log_prob), int(num_bounded))
        for y, when, n, num_bounded, log_prob, _ in zip(*paths, strict=True)
    ]


class GreedySearch:
    """The greedy search of one utterance, whose transcription vectors come in pieces."""

    def __init__(self, weights: PackedWeights, num_outputs: int, max_labels_per_frame: int) -> None:
        self.weights, self.max_labels_per_frame = weights, max_labels_per_frame
        self.labels: list[int] = []
        self.frames: list[int] = []  # at which each label is emitted
        self.num_vectors, self.num_bounded, self.log_prob = 0, 0, 0.0
        self._past = _past(weights, 1, num_outputs)
        null = np.zeros(1, np.int32)
        step_prefixes(0, 1, weights, null, null, *self._past)

    def advance(self, vectors: Tensor) -> None:
        """Search further transcription vectors [T, K+1]."""
        f = vectors.to(torch.promote_types(vectors.dtype, torch.float32)).contiguous()[None]
        utterances = Utterances(f.numpy(), np.array([len(vectors)]), self.max_labels_per_frame)
        paths = _new_paths(utterances)
        paths.log_prob[0] = self.log_prob
        row, starts = np.zeros(1, np.int64), np.array([0, 1])
        _search_shares(team(1), (row, starts, utterances, self.weights, paths, self._past))
        check_prediction(float(paths.largest.max()))
        number = int(paths.num_labels[0])
        self.labels += paths.labels[0, :number].tolist()
        self.frames += (self.num_vectors + paths.times[0, :number]).tolist()
        self.num_vectors += len(vectors)
        self.num_bounded += int(paths.num_bounded[0])
        self.log_prob = float(paths.log_prob[0])


def _new_paths(utterances: Utterances) -> Paths:
    B, T = utterances.f.shape[:2]
    labels, times = np.empty((2, B, T * utterances.max_labels_per_frame), np.int32)
    num_labels, num_bounded = np.zeros((2, B), np.int64)
    return Paths(labels, times, num_labels, num_bounded, np.zeros(B), np.full(B, -np.inf))


def _past(weights: PackedWeights, size: int, num_outputs: int) -> Past:
    (L, _, H), kind = weights.peepholes.shape, weights.biases.dtype
    h, s = np.zeros((2, size, L, H), kind)
    return Past(h, s, np.zeros((size, num_outputs), kind))


@compiled
def _search_share(share, all_rows, starts, utterances, weights, paths, past):
    rows = all_rows[starts[share] : starts[share + 1]]
    for first in range(0, rows.size, BLOCK):
        _search_block(rows[first : first + BLOCK], utterances, weights, paths, past)


@compiled
def _search_block(rows, utterances, weights, paths, past):
    """Take the most probable output at every node of each utterance, frame by frame.

    With a past, go on from it, and let it become that of the next piece.
    """
    f, lengths, max_labels_per_frame = utterances
    labels, times, num_labels, num_bounded, log_prob, largest = paths
    n, size = rows.size, ROOM * rows.size + 1
    L, H = weights.peepholes.shape[0], weights.peepholes.shape[2]
    parent, label = np.zeros(size, np.int32), np.zeros(size, np.int32)
    h, s = (
        np.empty((size, L, H), weights.biases.dtype),
        np.empty((size, L, H), weights.biases.dtype),
    )
    g = np.empty((size, f.shape[2]), weights.biases.dtype)
    goes_on = past.g.shape[0] > 0
    if goes_on:
        h[0], s[0], g[0] = past.h[0], past.s[0], past.g[0]
    else:
        step_prefixes(0, 1, weights, parent, label, h, s, g)  # the empty sequence, which all share
    node, used = np.zeros(n, np.int64), 1
    largest[rows[0]] = _largest(g[:1])
    emitting, bounded = np.empty(n, np.int64), np.empty(n, np.int64)
    begun = np.zeros(n, np.int64)  # the node with which each utterance began the frame
    # The most probable way to leave the frame so far: its ln Pr, and the labels before it.
    leaving, kept = np.empty(n), np.empty(n, np.int64)
    for t in range(lengths[rows].max()):
        begun[:] = node
        count = num_of_bounded = 0
        for i in range(n):
            if t < lengths[rows[i]]:
                emitting[count] = i
                count += 1
        emitted = 0
        while count > 0:
            if used + count > size:
                used = _give_up_past(node, begun, h, s, g)
            first, num_before, count = used, count, 0
            for j in range(num_before):
                i = emitting[j]
                b = rows[i]
                k, log_best, log_null = _best(f[b, t], g[node[i]])
                if emitted == 0 or log_prob[b] + log_null > leaving[i]:
                    leaving[i], kept[i] = log_prob[b] + log_null, emitted
                if k > 0 and emitted == max_labels_per_frame:
                    bounded[num_of_bounded] = i
                    num_of_bounded += 1
                    continue
                log_prob[b] += log_best
                if k > 0:
                    labels[b, num_labels[b]], times[b, num_labels[b]] = k, t
                    num_labels[b] += 1
                    parent[used], label[used] = node[i], k
                    node[i] = used
                    used += 1
                    emitting[count] = i
                    count += 1
            step_prefixes(first, used, weights, parent, label, h, s, g)
            largest[rows[0]] = max(largest[rows[0]], _largest(g[first:used]))
            emitted += 1
        # Departure: where the bound is met, leave the frame in the most probable way on the path.
        for j in range(num_of_bounded):
            i = bounded[j]
            b = rows[i]
            num_bounded[b] += 1
            log_prob[b], node[i] = leaving[i], begun[i]
            first = num_labels[b] - max_labels_per_frame
            num_labels[b] = first + kept[i]
            for u in range(first, num_labels[b]):
                if used == size:
                    used = _give_up_past(node, begun, h, s, g)
                parent[used], label[used] = node[i], labels[b, u]
                step_prefixes(used, used + 1, weights, parent, label, h, s, g)
                node[i] = used
                used += 1
    if goes_on:
        past.h[0], past.s[0], past.g[0] = h[node[0]], s[node[0]], g[node[0]]


_share_search = sharing(_search_share)


@compiled
def _search_shares(team, arguments):
    _share_search(team, arguments)


@compiled
def _best(f, g):
    """Return a node's most probable output, ln of its probability (Eq. 13), and ln of null's."""
    k, highest = 0, np.float64(f[0]) + g[0]
    for j in range(1, f.size):
        if np.float64(f[j]) + g[j] > highest:
            k, highest = j, np.float64(f[j]) + g[j]
    total = 0.0
    for j in range(f.size):
        total += np.exp(np.float64(f[j]) + g[j] - highest)
    return k, -np.log(total), np.float64(f[0]) + g[0] - highest - np.log(total)


@compiled
def _largest(g):
    """Return the largest number; +inf if there is a NaN."""
    largest = -np.inf
    for row in g:
        for x in row:
            if not x <= largest:
                largest = x if x > largest else np.inf
    return largest


@compiled
def _give_up_past(node, begun, h, s, g):
    """Move the states that utterances are at, or began the frame at, to the front; return how many.

    Rewrite `node` and `begun`.
    """
    place, before, n = -1, -1, node.size
    both = np.concatenate((node, begun))
    for i in np.argsort(both):
        if both[i] != before:
            place, before = place + 1, both[i]
            h[place], s[place], g[place] = h[before], s[before], g[before]
        both[i] = place
    node[:], begun[:] = both[:n], both[n:]
    return place + 1
