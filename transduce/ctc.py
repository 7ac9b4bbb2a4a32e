"""Decoding with Connectionist Temporal Classification (Graves et al., 2006), the paper's baseline.

A transcription network alone is a CTC network: its output at each frame is a label or the blank,
which is id 0 as null is; a path's labels are what remains when repeats are merged and then blanks
removed. There is no prediction network, so the labels of a section between two certain blanks do
not depend on the rest.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.alphabet import NULL as BLANK


class Labelling(NamedTuple):
    labels: tuple[int, ...]
    log_prob: float  # of the path for the best path, of all that was searched for the prefix search


def ctc_best_path(transcription: Tensor, num_frames: Tensor) -> list[Labelling]:
    """The labels of the most probable path, for each utterance of f [B, T, K+1], num_frames [B]."""
    return [_best_path(log_prob) for log_prob in _utterances(transcription, num_frames)]


def ctc_prefix_search(
    transcription: Tensor, num_frames: Tensor, *, threshold: float = 0.995
) -> list[Labelling]:
    """The most probable labelling of each utterance, f [B, T, K+1], num_frames [B].

    An utterance is cut where the blank's probability passes the threshold, and each section is
    searched alone: exact if the threshold is 1, and with the paper's 0.995 nearly so. Its time is
    exponential in the length of a section at worst.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
    return [
        _search_in_sections(log_prob, threshold)
        for log_prob in _utterances(transcription, num_frames)
    ]


def _utterances(transcription: Tensor, num_frames: Tensor) -> list[np.ndarray]:
    """ln Pr(k|t) [T, K+1] of each utterance."""
    if transcription.ndim != 3 or transcription.shape[2] < 2:
        raise ValueError(f"transcription must be [B, T, K+1], not {list(transcription.shape)}")
    B, T = transcription.shape[:2]
    if num_frames.shape != (B,) or num_frames.is_floating_point():
        raise ValueError(f"num_frames must be integers [B] = [{B}], not {list(num_frames.shape)}")
    utterances = []
    for b, length in enumerate(num_frames.tolist()):
        if not 0 <= length <= T:
            raise ValueError(f"num_frames[{b}] must be between 0 and {T}, not {length}")
        f = transcription[b, :length].detach().double()
        if f.isnan().any() or f.isposinf().any():
            raise ValueError(f"transcription of item {b} has NaN or +inf")
        utterances.append(f.log_softmax(-1).cpu().numpy())
    return utterances


def _best_path(log_prob: np.ndarray) -> Labelling:
    path = log_prob.argmax(1).tolist()
    merged = [k for t, k in enumerate(path) if t == 0 or k != path[t - 1]]
    labels = tuple(k for k in merged if k != BLANK)
    return Labelling(labels, float(log_prob.max(1, initial=-np.inf).sum()))


def _search_in_sections(log_prob: np.ndarray, threshold: float) -> Labelling:
    cuts = np.nonzero(log_prob[:, BLANK] > np.log(threshold))[0].tolist()
    labels: tuple[int, ...] = ()
    total = float(log_prob[cuts, BLANK].sum())
    for first, last in zip([-1, *cuts], [*cuts, len(log_prob)], strict=True):
        if last - first > 1:
            found = _prefix_search(log_prob[first + 1 : last])
            labels, total = labels + found.labels, total + found.log_prob
    return Labelling(labels, total)


class _Prefix(NamedTuple):
    """Paths over a section that begin with some labels: ln of their probabilities up to frame t."""

    labels: tuple[int, ...]
    log_label: np.ndarray  # [T], of those that are exactly the labels, ending in the last label
    log_blank: np.ndarray  # [T], and ending in a blank


def _prefix_search(log_prob: np.ndarray) -> Labelling:
    """The most probable labelling of a section of T >= 1 frames.

    The prefix whose proper extensions are together the most probable is extended by every label,
    until no extensions are together more probable than the best labelling so far.
    """
    empty = _Prefix((), np.full(len(log_prob), -np.inf), log_prob[:, BLANK].cumsum())
    best = Labelling((), float(empty.log_blank[-1]))
    # Of each prefix, minus ln of the probability of its proper extensions.
    open_prefixes = [(-_log_without(0.0, best.log_prob), empty.labels, empty)]
    while open_prefixes and -open_prefixes[0][0] > best.log_prob:
        _, labels, prefix = heappop(open_prefixes)
        log_label, log_blank, log_begun = _extended(prefix, log_prob)
        log_whole = np.logaddexp(log_label[-1], log_blank[-1])  # [K]
        for k in range(len(log_whole)):
            longer = _Prefix((*labels, k + 1), log_label[:, k], log_blank[:, k])
            if log_whole[k] > best.log_prob:
                best = Labelling(longer.labels, float(log_whole[k]))
            log_more = _log_without(log_begun[k], log_whole[k])
            if log_more > best.log_prob:
                heappush(open_prefixes, (-log_more, longer.labels, longer))
    return best


def _extended(prefix: _Prefix, log_prob: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two arrays of the prefix with each label added, [T, K], and ln of the probability [K]
    of all paths that begin with it."""
    T, K = len(log_prob), log_prob.shape[1] - 1
    # Before a new label: the prefix ends in a blank, or in another label than the new one.
    before = np.logaddexp(prefix.log_label, prefix.log_blank)[:, None].repeat(K, 1)
    if prefix.labels:
        before[:, prefix.labels[-1] - 1] = prefix.log_blank
    first = 0.0 if not prefix.labels else -np.inf
    log_new = log_prob[:, 1:] + np.concatenate([np.full((1, K), first), before[:-1]])
    log_label, log_blank = np.full((T, K), -np.inf), np.full((T, K), -np.inf)
    log_label[0] = log_new[0]
    for t in range(1, T):
        log_label[t] = np.logaddexp(log_new[t], log_prob[t, 1:] + log_label[t - 1])
        log_blank[t] = log_prob[t, BLANK] + np.logaddexp(log_blank[t - 1], log_label[t - 1])
    return log_label, log_blank, np.logaddexp.reduce(log_new, axis=0)


def _log_without(log_whole: float, log_part: float) -> float:
    """ln(e^whole - e^part), -inf where rounding leaves nothing."""
    if log_part >= log_whole:
        return -np.inf
    return float(log_whole + np.log1p(-np.exp(log_part - log_whole)))
