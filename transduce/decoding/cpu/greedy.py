"""The greedy search on the CPU, compiled by Numba: all utterances of a block in step.

The prediction network is stepped for all that have emitted a label at once, so that its weights are
read once for many; each thread has blocks of its own.
"""

from __future__ import annotations

import numpy as np
import torch

from transduce.decoding.cpu.prediction import BLOCK, packed_weights, step_prefixes
from transduce.decoding.hypothesis import Greedy, check_prediction
from transduce.decoding.problem import Problem, padded
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team

ROOM = 4  # states kept for each utterance of a block: memory against how often they are compacted


def greedy_searches(problem: Problem) -> list[Greedy]:
    """Return each utterance's greedy alignment."""
    network = problem.peephole_network()
    assert network is not None
    weights = packed_weights(network)
    f, num_vectors = padded(problem.transcriptions)
    f = f.to(torch.promote_types(f.dtype, torch.float32)).contiguous()
    B, T = f.shape[:2]
    labels, times = np.empty((2, B, T * problem.max_labels_per_frame), np.int32)
    num_labels, num_bounded = np.zeros((2, B), np.int64)
    log_prob, largest = np.zeros(B), np.full(B, -np.inf)
    lengths = num_vectors.numpy()
    rows, starts = shares_of(lengths, num_threads())
    _search_shares(
        team(len(starts) - 1),
        (
            *(rows, starts, f.numpy(), lengths, weights, problem.max_labels_per_frame),
            *(labels, times, num_labels, log_prob, num_bounded, largest),
        ),
    )
    check_prediction(float(largest.max()))
    return [
        Greedy(tuple(y[:n].tolist()), tuple(when[:n].tolist()), *numbers)
        for y, when, n, *numbers in zip(
            labels, times, num_labels, log_prob.tolist(), num_bounded.tolist(), strict=True
        )
    ]


@compiled
def _search_share(
    share, all_rows, starts, f, lengths, weights, max_labels_per_frame,
    labels, times, num_labels, log_prob, num_bounded, largest,
):  # fmt: skip
    rows = all_rows[starts[share] : starts[share + 1]]
    for first in range(0, rows.size, BLOCK):
        _search_block(
            rows[first : first + BLOCK], f, lengths, weights, max_labels_per_frame,
            labels, times, num_labels, log_prob, num_bounded, largest,
        )  # fmt: skip


@compiled
def _search_block(
    rows, f, lengths, weights, max_labels_per_frame,
    labels, times, num_labels, log_prob, num_bounded, largest,
):  # fmt: skip
    """Of each utterance of the block the most probable output at every node, frame by frame."""
    n, size = rows.size, ROOM * rows.size + 1
    L, H = weights.peepholes.shape[0], weights.peepholes.shape[2]
    parent, label = np.zeros(size, np.int32), np.zeros(size, np.int32)
    h, s = (
        np.empty((size, L, H), weights.biases.dtype),
        np.empty((size, L, H), weights.biases.dtype),
    )
    g = np.empty((size, f.shape[2]), weights.biases.dtype)
    step_prefixes(0, 1, weights, parent, label, h, s, g)  # all begin with the empty sequence
    node, used = np.zeros(n, np.int64), 1
    largest[rows[0]] = _largest(g[:1])
    emitting = np.empty(n, np.int64)
    for t in range(lengths[rows].max()):
        count = 0
        for i in range(n):
            if t < lengths[rows[i]]:
                emitting[count] = i
                count += 1
        emitted = 0
        while count > 0:
            if used + count > size:
                used = _give_up_past(node, h, s, g)
            first, num_before, count = used, count, 0
            for j in range(num_before):
                i = emitting[j]
                b = rows[i]
                k, log_best, log_null = _best(f[b, t], g[node[i]])
                if k > 0 and emitted == max_labels_per_frame:
                    num_bounded[b] += 1
                    k, log_best = 0, log_null
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


_share_search = sharing(_search_share)


@compiled
def _search_shares(team, arguments):
    _share_search(team, arguments)


@compiled
def _best(f, g):
    """The most probable output of a node, ln of its probability (Eq. 13), and ln of null's."""
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
    """The largest number, or +inf if there is one that is none."""
    largest = -np.inf
    for row in g:
        for x in row:
            if not x <= largest:
                largest = x if x > largest else np.inf
    return largest


@compiled
def _give_up_past(node, h, s, g):
    """Move the states that utterances are at to the front; how many they are."""
    place, before = -1, -1
    for i in np.argsort(node):
        if node[i] != before:
            place, before = place + 1, node[i]
            h[place], s[place], g[place] = h[before], s[before], g[before]
        node[i] = place
    return place + 1
