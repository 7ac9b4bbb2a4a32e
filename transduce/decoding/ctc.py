"""Decoding of connectionist temporal classification (CTC; Graves et al., 2006), the baseline.

A transcription network alone is a CTC network: its output at each frame is a label or the blank,
id 0 as null is. A path's labels are what remains when repeats are merged and then blanks removed.
There is no prediction network, so the labels between two certain blanks do not depend on the rest.
"""

from __future__ import annotations

import warnings
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import NULL as BLANK
from transduce.decoding.fusion import FusedScores
from transduce.decoding.options import SearchOptions
from transduce.kernels.backends import check_tensors


class Labelling(NamedTuple):
    """An output sequence of CTC."""

    labels: tuple[int, ...]
    log_prob: float  # of the path, for the best path; of all paths found, for the other searches


def ctc_best_path(transcription: Tensor, num_frames: Tensor) -> list[Labelling]:
    """Return the labels of the most probable path of each utterance; f is [B, T, K+1]."""
    return [_best_path(log_prob) for log_prob in _utterances(transcription, num_frames)]


def ctc_prefix_search(
    transcription: Tensor,
    num_frames: Tensor,
    *,
    threshold: float = 0.995,
    max_prefixes: int = 1000,
) -> list[Labelling]:
    """Return the most probable labelling of each utterance; f is [B, T, K+1].

    The search cuts an utterance where the blank's probability passes the threshold, and searches
    each section alone: exact if the threshold is 1, and nearly so at the paper's 0.995. The time is
    exponential in the length of a section at worst, as before a network has learnt anything.
    Therefore at most `max_prefixes` are extended in a section; then the best labelling so far is
    taken, or that of the best path if it is better, and a warning says so.
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


def ctc_beam_search(
    transcription: Tensor, num_frames: Tensor, options: SearchOptions
) -> list[list[Labelling]]:
    """Return the n best labellings of each utterance, frame by frame; f is [B, T, K+1].

    Prefix beam search: after every frame the `beam_width` most probable prefixes stay, each with
    the probabilities of its paths that end in a blank and in its last label. `fusion` adds its
    score when a label is appended. The order is that of log Pr(y) / |y|, or of log Pr(y).
    """
    found = []
    for log_prob in _utterances(transcription, num_frames):
        fused = options.fused_scores(log_prob.shape[1] - 1)
        labellings = _prefix_beam(log_prob, options.beam_width, fused)

        def score(one: Labelling) -> tuple[float, tuple[int, ...]]:
            length = max(1, len(one.labels)) if options.length_normalised else 1
            return -one.log_prob / length, one.labels

        found.append(sorted(labellings, key=score)[: options.n_best])
    return found


def _utterances(transcription: Tensor, num_frames: Tensor) -> list[np.ndarray]:
    """Return ln Pr(k|t) [T, K+1] of each utterance; raise ValueError where f has no numbers."""
    check_tensors(transcription=transcription, num_frames=num_frames)
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
    """Return the labelling, and the number of sections in which the search was cut short."""
    cuts = np.nonzero(log_prob[:, BLANK] > np.log(threshold))[0].tolist()
    labels: tuple[int, ...] = ()
    total, num_bounded = float(log_prob[cuts, BLANK].sum()), 0
    for first, last in zip([-1, *cuts], [*cuts, len(log_prob)], strict=True):
        if last - first > 1:
            found, bounded = _prefix_search(log_prob[first + 1 : last], max_prefixes)
            labels, total = labels + found.labels, total + found.log_prob
            num_bounded += bounded
    return Labelling(labels, total), num_bounded


class _LabelsPrefix(NamedTuple):
    """A labels prefix of a section, with ln of the probability of its paths up to each frame."""

    labels: tuple[int, ...]
    log_label: np.ndarray  # [T], of paths that are exactly these labels and end in the last one
    log_blank: np.ndarray  # [T], of paths that are exactly these labels and end in a blank


def _prefix_search(log_prob: np.ndarray, max_prefixes: int) -> tuple[Labelling, bool]:
    """Return the most probable labelling of a section of T >= 1 frames, and whether the search was
    cut short, so that there may be a better one.

    Repeatedly extend the prefix whose proper extensions are together the most probable by every
    label, until no extensions are together more probable than the best labelling so far.
    """
    empty, num_extended = _empty_prefix(log_prob), 0
    best = Labelling((), float(empty.log_blank[-1]))
    # The key is minus ln of the probability of a prefix's proper extensions.
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
            longer = _LabelsPrefix((*labels, k + 1), log_label[:, k], log_blank[:, k])
            if log_whole[k] > best.log_prob:
                best = Labelling(longer.labels, float(log_whole[k]))
            log_more = _log_without(log_begun[k], log_whole[k])
            if log_more > best.log_prob:
                heappush(open_prefixes, (-log_more, longer.labels, longer))
    return best, False


def _empty_prefix(log_prob: np.ndarray) -> _LabelsPrefix:
    return _LabelsPrefix((), np.full(len(log_prob), -np.inf), log_prob[:, BLANK].cumsum())


def _labelling(labels: tuple[int, ...], log_prob: np.ndarray) -> Labelling:
    """Return the labels with ln of the probability of all their paths."""
    prefix = _empty_prefix(log_prob)
    for u, k in enumerate(labels):
        log_label, log_blank, _ = _extended(prefix, log_prob)
        prefix = _LabelsPrefix(labels[: u + 1], log_label[:, k - 1], log_blank[:, k - 1])
    return Labelling(labels, float(np.logaddexp(prefix.log_label[-1], prefix.log_blank[-1])))


def _extended(
    prefix: _LabelsPrefix, log_prob: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Append each label to a prefix; return its two arrays [T, K], and ln of the probability [K] of
    all paths that begin with the result."""
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
    """Return ln(e^whole - e^part), -inf where rounding leaves nothing."""
    if log_part >= log_whole:
        return -np.inf
    return float(log_whole + np.log1p(-np.exp(log_part - log_whole)))


def _prefix_beam(
    log_prob: np.ndarray, beam_width: int, fused: FusedScores | None
) -> list[Labelling]:
    """Return the labellings in the beam after the last frame."""
    number: dict[tuple[int, ...], int] = {}  # prefixes whose fused scores are known
    scores: list[np.ndarray] = []

    def fused_scores(y: tuple[int, ...]) -> np.ndarray | float:
        """Return the language model's scores of the labels after y, [K]."""
        if fused is None:
            return 0.0
        if y not in number:
            parent = number[y[:-1]] if y else -1
            scores.extend(fused.extend([parent], [y[-1] if y else BLANK]))
            number[y] = len(number)
        return scores[number[y]][1:]

    # ln of the probability of the paths that end in a blank, and in the last label.
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for outputs in log_prob:
        merged: dict[tuple[int, ...], tuple[float, float]] = {}
        for y, (in_blank, in_label) in beam.items():
            whole = np.logaddexp(in_blank, in_label)
            blank, same = merged.get(y, (-np.inf, -np.inf))
            stays = in_label + outputs[y[-1]] if y else -np.inf
            merged[y] = (
                np.logaddexp(blank, whole + outputs[BLANK]),
                np.logaddexp(same, stays),
            )
            extended = whole + outputs[1:] + fused_scores(y)
            if y:  # a repeat needs a blank between
                extended[y[-1] - 1] += in_blank - whole
            for k in np.argsort(-extended)[:beam_width].tolist():
                if extended[k] > -np.inf:
                    longer = (*y, k + 1)
                    blank, last = merged.get(longer, (-np.inf, -np.inf))
                    merged[longer] = (blank, np.logaddexp(last, extended[k]))
        best = sorted(merged, key=lambda y: (-np.logaddexp(*merged[y]), y))[:beam_width]
        beam = {y: merged[y] for y in best}
    return [Labelling(y, float(np.logaddexp(*parts))) for y, parts in beam.items()]
