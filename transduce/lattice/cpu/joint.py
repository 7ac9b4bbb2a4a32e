"""The lattice of any joint network's logits: its loss and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.sentinels import NEVER
from transduce.kernels.simd.functions import cast_like, exp, log
from transduce.kernels.simd.options import compiled, compiled_with
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.diagonals import flow, skewed_variables, unskew
from transduce.lattice.cpu.rows import count_bad, largest

# Logits of a half type, or strided ones, are converted this many at a time: more amortise a call
# better, fewer need less memory beside the logits.
CHUNK = 1 << 18


class _Piece(NamedTuple):
    """Some frames of some utterances, and the shares of the threads in all their frames."""

    starts: np.ndarray  # of each share, and the end of the last
    logits: np.ndarray  # [b, t, U+1, K+1], float32 or float64, contiguous
    log_total: np.ndarray  # [b, t, U+1], ln of the sums of e^logit
    num_frames: np.ndarray  # [b], counted from the piece's first frame
    num_labels: np.ndarray  # [b]


class _BatchArrows(NamedTuple):
    """All utterances' arrows, and the shares of the threads in the utterances."""

    starts: np.ndarray  # of each share in `items`, and the end of the last
    items: np.ndarray  # the utterances, share by share
    log_null: np.ndarray  # [B, T, U+1], float64
    log_label: np.ndarray  # [B, T, U], float64
    num_frames: np.ndarray  # [B]
    num_labels: np.ndarray  # [B]


class _Upstream(NamedTuple):
    """A piece's part of what its gradient needs beside the logits."""

    labels: np.ndarray  # [b, U]
    passed: np.ndarray  # [b, t, U+1], the posterior that the alignment passes each node
    by_label: np.ndarray  # [b, t, U+1], and that it leaves the node by its label
    upstream: np.ndarray  # [b]


@compiled_with({"reassoc", "contract"})
def _sum(row):
    total = row.dtype.type(0)
    for k in range(row.size):
        total += row[k]
    return total


@compiled
def _joint_totals(share, piece, fused, is_bad):
    """Write ln of the sum over k of e^logit for each node of a share of the frames.

    Set is_bad[b] if a logit of utterance b is NaN or +inf.
    """
    logits = piece.logits
    max_frames, max_columns, num_outputs = logits.shape[1:]
    all_terms = np.empty(max_columns * num_outputs, logits.dtype)
    tops = np.empty(max_columns, logits.dtype)
    for place in range(piece.starts[share], piece.starts[share + 1]):
        b, t = place // max_frames, place % max_frames
        if t >= piece.num_frames[b]:
            continue
        num_columns = piece.num_labels[b] + 1
        cells, totals = logits[b, t], piece.log_total[b, t]
        if count_bad(cells[:num_columns].ravel()) > 0:
            is_bad[b] = True
        if not fused:
            totals[:num_columns] = 0
            continue
        terms = all_terms[: num_columns * num_outputs]
        for u in range(num_columns):
            top = largest(cells[u])
            tops[u] = top if top > -np.inf else cast_like(0.0, logits)
            row, difference = cells[u], terms[u * num_outputs : (u + 1) * num_outputs]
            for k in range(num_outputs):
                difference[k] = row[k] - tops[u]
        for i in range(terms.size):  # one long loop, which vectorises
            terms[i] = exp(terms[i])
        for u in range(num_columns):
            total = _sum(terms[u * num_outputs : (u + 1) * num_outputs])
            # Where every output is impossible, +inf makes both arrows impossible.
            totals[u] = tops[u] + log(total) if total > 0 else cast_like(np.inf, logits)


_share_totals = sharing(_joint_totals)


@compiled
def _joint_totals_shares(team, arguments):
    _share_totals(team, arguments)


@compiled
def _joint_losses(share, arrows, labels, num_outputs, null, is_bad, loss):
    """Write the losses of a share of the utterances; NaN where logits or labels are not valid."""
    for b in arrows.items[arrows.starts[share] : arrows.starts[share + 1]]:
        T, U = arrows.num_frames[b], arrows.num_labels[b]
        num_bad = 1 if is_bad[b] else 0
        for u in range(U):
            num_bad += labels[b, u] < 0 or labels[b, u] >= num_outputs or labels[b, u] == null
        if num_bad > 0:
            loss[b] = np.nan
            continue
        lattice = skewed_variables(
            arrows.log_null[b, :T, : U + 1], arrows.log_label[b, :T, :U], False, loss
        )
        loss[b] = -lattice.evidence if lattice.evidence > NEVER else np.inf


_share_losses = sharing(_joint_losses)


@compiled
def _joint_losses_shares(team, arguments):
    _share_losses(team, arguments)


@compiled
def _joint_flows(share, arrows, like, passed, by_label):
    """Write the occupancies of a share of the utterances, and their parts that leave by a label."""
    for b in arrows.items[arrows.starts[share] : arrows.starts[share + 1]]:
        T, U = arrows.num_frames[b], arrows.num_labels[b]
        lattice = skewed_variables(
            arrows.log_null[b, :T, : U + 1], arrows.log_label[b, :T, :U], True, like
        )
        if lattice.evidence <= NEVER:
            passed[b] = 0
            by_label[b] = 0
            continue
        flow(T, U, lattice.log_alpha, lattice.log_beta, lattice.log_label, lattice.evidence, like)
        passed[b, :T, : U + 1] = unskew(T, U, lattice.log_alpha, U + 1)
        by_label[b, :T, : U + 1] = unskew(T, U, lattice.log_label, U + 1)


_share_flows = sharing(_joint_flows)


@compiled
def _joint_flows_shares(team, arguments):
    _share_flows(team, arguments)


@compiled
def _joint_gradient(share, piece, above, null, fused, clamp, grad):
    """Write upstream times the gradient of a share of the frames' logits; 0 in the padding."""
    logits = piece.logits
    max_frames, max_columns, num_outputs = logits.shape[1:]
    low, high = cast_like(-clamp, logits), cast_like(clamp, logits)
    all_terms = np.empty(max_columns * num_outputs, logits.dtype)
    for place in range(piece.starts[share], piece.starts[share + 1]):
        b, t = place // max_frames, place % max_frames
        if t >= piece.num_frames[b]:
            grad[b, t] = 0
            continue
        U, scale = piece.num_labels[b], cast_like(above.upstream[b], logits)
        terms = all_terms[: (U + 1) * num_outputs]
        for u in range(U + 1):
            row, total = logits[b, t, u], piece.log_total[b, t, u]
            difference = terms[u * num_outputs : (u + 1) * num_outputs]
            for k in range(num_outputs):
                difference[k] = row[k] - total
        if fused:
            for i in range(terms.size):  # one long loop, which vectorises
                terms[i] = exp(terms[i])
        else:
            terms[:] = 0
        for u in range(U + 1):
            row, term = grad[b, t, u], terms[u * num_outputs : (u + 1) * num_outputs]
            passed, by_label = above.passed[b, t, u], above.by_label[b, t, u]
            node = cast_like(passed, logits)
            for k in range(num_outputs):
                row[k] = node * term[k]
            if logits[b, t, u, null] > -np.inf:  # otherwise the difference is only rounding
                row[null] -= cast_like(passed - by_label, logits)
            if u < U:
                row[above.labels[b, u]] -= cast_like(by_label, logits)
            if clamp > 0:
                for k in range(num_outputs):
                    value = row[k] if row[k] > low else low
                    row[k] = value if value < high else high
            for k in range(num_outputs):
                row[k] *= scale
        grad[b, t, U + 1 :] = 0


_share_gradient = sharing(_joint_gradient)


@compiled
def _joint_gradient_shares(team, arguments):
    _share_gradient(team, arguments)


def _pieces(
    logits: Tensor, log_total: Tensor, num_frames: Tensor, num_labels: Tensor
) -> Iterator[tuple[slice, slice, _Piece]]:
    """Yield (utterances, frames, piece) with the logits in float32 or float64, contiguous.

    Logits that are so already make one piece and are not copied.
    """
    if logits.dtype == log_total.dtype and logits.is_contiguous():
        whole = slice(0, len(logits)), slice(0, logits.shape[1])
        yield *whole, _piece(*whole, logits, log_total, num_frames, num_labels)
        return
    step = max(num_threads(), CHUNK // logits[0, 0].numel())
    for b, T in enumerate(num_frames.tolist()):
        for first in range(0, T, step):
            items, frames = slice(b, b + 1), slice(first, min(T, first + step))
            cells = logits[items, frames].to(log_total.dtype).contiguous()
            yield items, frames, _piece(items, frames, cells, log_total, num_frames, num_labels)


def _piece(
    items: slice,
    frames: slice,
    cells: Tensor,
    log_total: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> _Piece:
    size = (items.stop - items.start) * (frames.stop - frames.start)
    shares = min(num_threads(), size)
    return _Piece(
        np.array([size * i // shares for i in range(shares + 1)]),
        cells.numpy(),
        log_total[items, frames].numpy(),
        (num_frames[items] - frames.start).numpy(),
        num_labels[items].numpy(),
    )


def _arrows(
    logits: Tensor,
    log_total: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
) -> _BatchArrows:
    """Gather the arrows of the logits (Eqs. 14-15), and share the utterances out by their cost."""
    B, T, _, num_outputs = logits.shape
    log_null = logits[..., null].double() - log_total
    at = labels.clamp(0, num_outputs - 1)[:, None, :, None].expand(B, T, -1, 1)
    log_label = logits[:, :, :-1].gather(3, at)[..., 0].double() - log_total[:, :, :-1]
    lengths = num_frames.numpy(), num_labels.numpy()
    items, starts = shares_of(lengths[0] * (lengths[1] + 1), num_threads())
    return _BatchArrows(starts, items, log_null.numpy(), log_label.numpy(), *lengths)


def joint_forward(
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of any joint network's logits [B, T, U+1, K+1], ln of the sums of their
    exponentials [B, T, U+1], and an empty tensor."""
    log_total, nothing = joint_saved(logits, with_gradients)
    loss = torch.empty(len(logits), dtype=log_total.dtype)
    is_bad = np.zeros(len(logits), np.bool_)
    for items, _, piece in _pieces(logits, log_total, num_frames, num_labels):
        _joint_totals_shares(team(len(piece.starts) - 1), (piece, fused, is_bad[items]))
    arrows = _arrows(logits, log_total, labels, num_frames, num_labels, null)
    options = (logits.shape[3], null, is_bad, loss.numpy())
    _joint_losses_shares(team(len(arrows.starts) - 1), (arrows, labels.numpy(), *options))
    return loss, log_total, nothing


def joint_saved(logits: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate ln of the sums of the logits' exponentials (0 in padding), and an empty tensor."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_zeros(logits.shape[:3], dtype=dtype), logits.new_empty(0, dtype=dtype)


def joint_backward(
    upstream: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    clamp: float,
    log_total: Tensor,
    nothing: Tensor,
) -> Tensor:
    """Return the gradient with respect to the logits, clamped before `upstream` scales it."""
    arrows = _arrows(logits, log_total, labels, num_frames, num_labels, null)
    flows = np.empty((2, *log_total.shape))
    _joint_flows_shares(team(len(arrows.starts) - 1), (arrows, log_total.numpy(), *flows))
    grad = torch.empty(logits.shape, dtype=logits.dtype)
    for items, frames, piece in _pieces(logits, log_total, num_frames, num_labels):
        result = grad[items, frames]
        same = result.dtype == log_total.dtype
        buffer = result if same else torch.empty(result.shape, dtype=log_total.dtype)
        above = _Upstream(
            labels[items].numpy(),
            flows[0, items, frames],
            flows[1, items, frames],
            upstream[items].contiguous().numpy(),
        )
        arguments = (piece, above, null, fused, float(clamp), buffer.numpy())
        _joint_gradient_shares(team(len(piece.starts) - 1), arguments)
        if buffer is not result:
            result.copy_(buffer)
        if frames.stop == num_frames[items.start]:  # the padding of a piece by itself
            grad[items, frames.stop :] = 0
    return grad
