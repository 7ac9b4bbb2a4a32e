"""The sets A and B of Algorithm 1 within a frame, as heaps in arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from transduce.decoding.cpu.trie import grown, precedes
from transduce.kernels.simd.options import compiled


class Beam(NamedTuple):
    """The set B: a heap of at most W hypotheses, the worst on top."""

    log_prob: np.ndarray
    node: np.ndarray
    size: np.ndarray  # [1]


class Open(NamedTuple):
    """The extensions in A: a heap, the best on top."""

    log_prob: np.ndarray
    parent: np.ndarray
    label: np.ndarray
    emitted: np.ndarray  # labels in this frame
    size: np.ndarray  # [1]


@compiled
def worst_in(beam, beam_width):
    """Return the W-th best log-probability in B; -inf while B has fewer."""
    return beam.log_prob[0] if beam.size[0] == beam_width else -np.inf


@compiled
def _worse(log_prob, node, beam, i, prefixes):
    """Return whether a hypothesis is worse than the i-th of B."""
    if log_prob == beam.log_prob[i]:
        return precedes(beam.node[i], node, prefixes)
    return log_prob < beam.log_prob[i]


@compiled
def offer(beam, beam_width, log_prob, node, prefixes):
    """Put a hypothesis into B if it is among the W best; the arrays have room."""
    size = beam.size[0]
    if size < beam_width:
        beam.size[0] += 1
        i = size
        while i > 0 and _worse(log_prob, node, beam, (i - 1) // 2, prefixes):
            beam.log_prob[i], beam.node[i] = beam.log_prob[(i - 1) // 2], beam.node[(i - 1) // 2]
            i = (i - 1) // 2
    elif _worse(log_prob, node, beam, 0, prefixes):
        return
    else:
        i = 0
        while 2 * i + 1 < size:
            j = 2 * i + 1
            if j + 1 < size and _worse(beam.log_prob[j + 1], beam.node[j + 1], beam, j, prefixes):
                j += 1
            if _worse(log_prob, node, beam, j, prefixes):
                break
            beam.log_prob[i], beam.node[i] = beam.log_prob[j], beam.node[j]
            i = j
    beam.log_prob[i], beam.node[i] = log_prob, node


@compiled
def _place(open, i, log_prob, parent, label, emitted):
    open.log_prob[i], open.parent[i] = log_prob, parent
    open.label[i], open.emitted[i] = label, emitted


@compiled
def _move(open, i, j):
    """Copy entry j to place i."""
    _place(open, i, open.log_prob[j], open.parent[j], open.label[j], open.emitted[j])


@compiled
def push(open, log_prob, parent, label, emitted):
    """Put an extension into A; the arrays have room."""
    i = open.size[0]
    open.size[0] += 1
    while i > 0 and log_prob > open.log_prob[(i - 1) // 2]:
        _move(open, i, (i - 1) // 2)
        i = (i - 1) // 2
    _place(open, i, log_prob, parent, label, emitted)


@compiled
def pop(open):
    """Remove the best extension."""
    open.size[0] -= 1
    last, i = open.size[0], 0
    while 2 * i + 1 < last:
        j = 2 * i + 1
        if j + 1 < last and open.log_prob[j + 1] > open.log_prob[j]:
            j += 1
        if open.log_prob[last] >= open.log_prob[j]:
            break
        _move(open, i, j)
        i = j
    _move(open, i, last)


@compiled
def beam_for(size, beam):
    """Return B with room for `size` hypotheses."""
    if size <= beam.node.size:
        return beam
    return Beam(grown(beam.log_prob, 2 * size), grown(beam.node, 2 * size), beam.size)


@compiled
def open_for(size, open):
    """Return A with room for `size` extensions."""
    if size <= open.label.size:
        return open
    return Open(
        grown(open.log_prob, 2 * size), grown(open.parent, 2 * size), grown(open.label, 2 * size),
        grown(open.emitted, 2 * size), open.size,
    )  # fmt: skip
