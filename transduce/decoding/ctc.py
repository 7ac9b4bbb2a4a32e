"""Decoding with Connectionist Temporal Classification (Graves et al., 2006), the paper's baseline.

A transcription network alone is a CTC network: its output at each frame is a label or the blank,
which is id 0 as null is; a path's labels are what remains when repeats are merged and then blanks
removed. There is no prediction network, so the labels of a section between two certain blanks do
not depend on the rest.
"""

from __future__ import annotations

import warnings
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL as BLANK


class Labelling(NamedTuple):
    labels: tuple[int, ...]
    log_prob: float  # of the path for the best path, of all that was searched for the prefix search


def ctc_best_path(transcription: Tensor, num_frames: Tensor) -> list[Labelling]:
    """The labels of the most probable path, for each utterance of f [B, T, K+1], num_frames [B]."""
    return [_best_path(log_prob) for log_prob in _utterances(transcription, num_frames)]


def ctc_prefix_search(
    transcription: Tensor,
    num_frames: Tensor,
    *,
    threshold: float = 0.995,
    max_prefixes: int = 1000,
) -> list[Labelling]:
    """The most probable labelling of each utterance, f [B, T, K+1], num_frames [B].

    An utterance is cut where the blank's probability passes the threshold, and each section is
    searched alone: exact if the threshold is 1, and with the paper's 0.995 nearly so. Its time is
    exponential in the length of a section at worst, as before a network has learnt anything. So at
    most `max_prefixes` are extended in a section, after which the best labelling so far is taken,
    or that of the best path if it is better; a warning says so.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
    if max_prefixes < 1:
        raise ValueError(f"max_prefixes must be at least 1, not {max_prefixes}")
    found = [
        _search_in_sections(log_prob, threshold, max_prefixes)
        for log_prob in _utterances(transcription, num_frames)
    ]
    if cut_short := [b for b, (_, num_bounded) in enumerate(found) if num_bounded > 0]:
        others = f" and in {len(cut_short) - 1} other items" if len(cut_short) > 1 else ""
        warnings.warn(
            f"max_prefixes = {max_prefixes} was met in {found[cut_short[0]][1]} sections of item "
            f"{cut_short[0]}{others}; their labellings may not be the most probable",
            stacklevel=2,
        )
    return [labelling for labelling, _ in found]


def _utterances(transcription: Tensor, num_frames: Tensor) -> list[np.ndarray]:
    """ln Pr(k|t) [T, K+1] of each utterance."""
    if transcription.ndim != 3 or transcription.shape[2] < 2:
        raise ValueError(f"transcription must be [B, T, K+1], not {list(transcription.shape)}")
    if not transcription.is_floating_point():
        raise ValueError(f"transcription must be floating-point, not {transcription.dtype}")
    B, T = transcription.shape[:2]
    if num_frames.shape != (B,) or num_frames.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"num_frames must be integers [B] = [{B}], not {num_frames.dtype} "
            f"{list(num_frames.shape)}"
        )
    utterances = []
    for b, length in enumerate(num_frames.tolist()):
        if not 0 <= length <= T:
            raise ValueError(f"num_frames[{b}] must be between 0 and {T}, not {length}")
        f = transcription[b, :length].detach().double()
        if f.isnan().any() or f.isposinf().any():
            raise ValueError(f"transcription of item {b} has NaN or +inf")
        if len(impossible := f.isneginf().all(1).nonzero()):
            raise ValueError(
                f"transcription of item {b} at {int(impossible[0])} is -inf for every output, so "
                "that there is no labelling"
            )
        utterances.append(f.log_softmax(-1).cpu().numpy())
    return utterances


def _best_path(log_prob: np.ndarray) -> Labelling:
    path = log_prob.argmax(1).tolist()
    merged = [k for t, k in enumerate(path) if t == 0 or k != path[t - 1]]
    labels = tuple(k for k in merged if k != BLANK)
    return Labelling(labels, float(log_prob.max(1, initial=-np.inf).sum()))


def _search_in_sections(
    log_prob: np.ndarray, threshold: float, max_prefixes: int
) -> tuple[Labelling, int]:
    """The labelling, and in how many sections the search was cut short."""
    cuts = np.nonzero(log_prob[:, BLANK] > np.log(threshold))[0].tolist()
    labels: tuple[int, ...] = ()
    total, num_bounded = float(log_prob[cuts, BLANK].sum()), 0
    for first, last in zip([-1, *cuts], [*cuts, len(log_prob)], strict=True):
        if last - first > 1:
            found, bounded = _prefix_search(log_prob[first + 1 : last], max_prefixes)
            labels, total = labels + found.labels, total + found.log_prob
            num_bounded += bounded
    return Labelling(labels, total), num_bounded


class _Prefix(NamedTuple):
    """Paths over a section that begin with some labels: ln of their probabilities up to frame t."""

    labels: tuple[int, ...]
    log_label: np.ndarray  # [T], of those that are exactly the labels, ending in the last label
    log_blank: np.ndarray  # [T], and ending in a blank


def _prefix_search(log_prob: np.ndarray, max_prefixes: int) -> tuple[Labelling, bool]:
    """The most probable labelling of a section of T >= 1 frames, and whether the search was cut
    short, so that there may be a better one.

    The prefix whose proper extensions are together the most probable is extended by every label,
    until no extensions are together more probable than the best labelling so far.
    """
    empty, num_extended = _empty_prefix(log_prob), 0
    best = Labelling((), float(empty.log_blank[-1]))
    # Of each prefix, minus ln of the probability of its proper extensions.
    open_prefixes = [(-_log_without(0.0, best.log_prob), empty.labels, empty)]
    while open_prefixes and -open_prefixes[0][0] > best.log_prob:
        if num_extended == max_prefixes:
            likely = _labelling(_best_path(log_prob).labels, log_prob)
            return max(best, likely, key=lambda found: found.log_prob), True
        num_extended += 1
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
    return best, False


def _empty_prefix(log_prob: np.ndarray) -> _Prefix:
    return _Prefix((), np.full(len(log_prob), -np.inf), log_prob[:, BLANK].cumsum())


def _labelling(labels: tuple[int, ...], log_prob: np.ndarray) -> Labelling:
    """The labels with ln of the probability of all their paths."""
    prefix = _empty_prefix(log_prob)
    for u, k in enumerate(labels):
        log_label, log_blank, _ = _extended(prefix, log_prob)
        prefix = _Prefix(labels[: u + 1], log_label[:, k - 1], log_blank[:, k - 1])
    return Labelling(labels, float(np.logaddexp(prefix.log_label[-1], prefix.log_blank[-1])))


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
