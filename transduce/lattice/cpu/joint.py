"""The lattice of any joint network's logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numba import njit
from torch import Tensor

from transduce.kernels.simd.functions import exp, log, narrow
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.diagonals import NEVER, flow, unskew, variables
from transduce.lattice.cpu.rows import count_bad, largest

CHUNK = 1 << 18  # elements of the logits that are taken at a time


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _sum(row):
    total = row.dtype.type(0)
    for k in range(row.size):
        total += row[k]
    return total


@compiled
def _joint_totals(share, starts, logits, num_frames, num_labels, fused, log_total, is_bad):
    """ln of the sum over k of e^logit for each node of a share of all utterances' frames.

    is_bad[b] becomes true if a logit of utterance b is NaN or +inf.
    """
    max_frames, max_columns, num_outputs = logits.shape[1:]
    all_terms = np.empty(max_columns * num_outputs, logits.dtype)
    tops = np.empty(max_columns, logits.dtype)
    for place in range(starts[share], starts[share + 1]):
        b, t = place // max_frames, place % max_frames
        if t >= num_frames[b]:
            continue
        num_columns = num_labels[b] + 1
        cells, totals = logits[b, t], log_total[b, t]
        if count_bad(cells[:num_columns].ravel()) > 0:
            is_bad[b] = True
        if not fused:
            totals[:num_columns] = 0
            continue
        terms = all_terms[: num_columns * num_outputs]
        for u in range(num_columns):
            top = largest(cells[u])
            tops[u] = top if top > -np.inf else narrow(0.0, logits)
            row, difference = cells[u], terms[u * num_outputs : (u + 1) * num_outputs]
            for k in range(num_outputs):
                difference[k] = row[k] - tops[u]
        for i in range(terms.size):  # one long loop
            terms[i] = exp(terms[i])
        for u in range(num_columns):
            total = _sum(terms[u * num_outputs : (u + 1) * num_outputs])
            # Where nothing is possible, nothing that is divided by the total is.
            totals[u] = tops[u] + log(total) if total > 0 else narrow(np.inf, logits)


_share_totals = sharing(_joint_totals)


@compiled
def _joint_totals_shares(team, arguments):
    _share_totals(team, arguments)


@compiled
def _joint_losses(
    share, starts, all_items, log_null, log_label, labels, num_frames, num_labels, num_outputs,
    null, is_bad, loss,
):  # fmt: skip
    """The losses of a share of the utterances; NaN of those that are bad or have bad labels."""
    for b in all_items[starts[share] : starts[share + 1]]:
        T, U = num_frames[b], num_labels[b]
        num_bad = 1 if is_bad[b] else 0
        for u in range(U):
            num_bad += labels[b, u] < 0 or labels[b, u] >= num_outputs or labels[b, u] == null
        if num_bad > 0:
            loss[b] = np.nan
            continue
        _, _, _, evidence = variables(log_null[b, :T, : U + 1], log_label[b, :T, :U], False, loss)
        loss[b] = -evidence if evidence > NEVER else np.inf


_share_losses = sharing(_joint_losses)


@compiled
def _joint_losses_shares(team, arguments):
    _share_losses(team, arguments)


@compiled
def _joint_flows(
    share, starts, all_items, log_null, log_label, num_frames, num_labels, like, occupancy, by_label
):
    """The occupancy of each node of a share of the utterances, and its part that leaves by the
    label."""
    for b in all_items[starts[share] : starts[share + 1]]:
        T, U = num_frames[b], num_labels[b]
        label, alpha, beta, evidence = variables(
            log_null[b, :T, : U + 1], log_label[b, :T, :U], True, like
        )
        if evidence <= NEVER:
            occupancy[b] = 0
            by_label[b] = 0
            continue
        flow(alpha, beta, label, evidence, like)
        occupancy[b, :T, : U + 1] = unskew(alpha, T, U + 1)
        by_label[b, :T, : U + 1] = unskew(label, T, U + 1)


_share_flows = sharing(_joint_flows)


@compiled
def _joint_flows_shares(team, arguments):
    _share_flows(team, arguments)


@compiled
def _joint_gradient(
    share, starts, logits, log_total, labels, num_frames, num_labels, occupancy, by_label, null,
    fused, clamp, upstream, grad,
):  # fmt: skip
    """upstream times the gradient with respect to the logits of a share of all utterances' frames;
    0 in the padding."""
    max_frames, max_columns, num_outputs = logits.shape[1:]
    low, high = narrow(-clamp, logits), narrow(clamp, logits)
    all_terms = np.empty(max_columns * num_outputs, logits.dtype)
    for place in range(starts[share], starts[share + 1]):
        b, t = place // max_frames, place % max_frames
        if t >= num_frames[b]:
            grad[b, t] = 0
            continue
        U, scale = num_labels[b], narrow(upstream[b], logits)
        terms = all_terms[: (U + 1) * num_outputs]
        for u in range(U + 1):
            row, total = logits[b, t, u], log_total[b, t, u]
            difference = terms[u * num_outputs : (u + 1) * num_outputs]
            for k in range(num_outputs):
                difference[k] = row[k] - total
        if fused:
            for i in range(terms.size):  # one long loop
                terms[i] = exp(terms[i])
        else:
            terms[:] = 0
        for u in range(U + 1):
            row, term = grad[b, t, u], terms[u * num_outputs : (u + 1) * num_outputs]
            passed = narrow(occupancy[b, t, u], logits)
            for k in range(num_outputs):
                row[k] = passed * term[k]
            if logits[b, t, u, null] > -np.inf:  # else the difference is rounding alone
                row[null] -= narrow(occupancy[b, t, u] - by_label[b, t, u], logits)
            if u < U:
                row[labels[b, u]] -= narrow(by_label[b, t, u], logits)
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


def _pieces(logits: Tensor, num_frames: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """The batch as (utterances, frames, their logits in float32 or float64, contiguous).

    Where the logits are that already, it is one piece, and not copied.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.dtype == dtype and logits.is_contiguous():
        yield slice(0, len(logits)), slice(0, logits.shape[1]), logits
        return
    step = max(num_threads(), CHUNK // logits[0, 0].numel())
    for b, T in enumerate(num_frames.tolist()):
        for first in range(0, T, step):
            items, frames = slice(b, b + 1), slice(first, min(T, first + step))
            yield items, frames, logits[items, frames].to(dtype).contiguous()


def _of_piece(items: slice, frames: slice, num_frames: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Where each thread's frames start, and the last end, those of all the piece's utterances
    counted on; and how many frames each of them has from there on."""
    size = (items.stop - items.start) * (frames.stop - frames.start)
    starts = np.linspace(0, size, min(num_threads(), size) + 1).astype(np.int64)
    return starts, (num_frames[items] - frames.start).numpy()


def _arrows(
    logits: Tensor, log_total: Tensor, labels: Tensor, null: int
) -> tuple[np.ndarray, np.ndarray]:
    """ln ∅(t,u) [B, T, U+1] and ln y(t,u) [B, T, U] of the logits (Eqs. 14-15)."""
    B, T, _, num_outputs = logits.shape
    log_null = logits[..., null].double() - log_total
    at = labels.clamp(0, num_outputs - 1)[:, None, :, None].expand(B, T, -1, 1)
    log_label = logits[:, :, :-1].gather(3, at)[..., 0].double() - log_total[:, :, :-1]
    return log_null.numpy(), log_label.numpy()


def joint_forward(
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of any joint network's logits [B, T, U+1, K+1], and ln of their sums."""
    loss = torch.empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    log_total = torch.empty(logits.shape[:3], dtype=loss.dtype)
    is_bad = np.zeros(len(logits), np.bool_)
    T, U = num_frames.numpy(), num_labels.numpy()
    for items, frames, cells in _pieces(logits, num_frames):
        starts, lengths = _of_piece(items, frames, num_frames)
        totals = log_total[items, frames].numpy()
        arguments = (starts, cells.numpy(), lengths, U[items], fused, totals, is_bad[items])
        _joint_totals_shares(team(len(starts) - 1), arguments)
    arrows = _arrows(logits, log_total, labels, null)
    order, starts = shares_of(T * (U + 1), num_threads())
    sizes = (T, U, logits.shape[3], null)
    whole = (starts, order, *arrows, labels.numpy(), *sizes, is_bad, loss.numpy())
    _joint_losses_shares(team(len(starts) - 1), whole)
    return loss, (log_total,)


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
) -> Tensor:
    """The gradient with respect to the logits, clamped before it is scaled by `upstream`."""
    T, U = num_frames.numpy(), num_labels.numpy()
    flows = np.empty((2, *log_total.shape))
    order, starts = shares_of(T * (U + 1), num_threads())
    arrows = _arrows(logits, log_total, labels, null)
    whole = (starts, order, *arrows, T, U, log_total.numpy(), *flows)
    _joint_flows_shares(team(len(starts) - 1), whole)
    grad = torch.empty(logits.shape, dtype=logits.dtype)
    for items, frames, cells in _pieces(logits, num_frames):
        starts, lengths = _of_piece(items, frames, num_frames)
        result = grad[items, frames]
        buffer = result if result.dtype == cells.dtype else torch.empty_like(cells)
        arguments = (
            starts, cells.numpy(), log_total[items, frames].numpy(), labels[items].numpy(), lengths,
            U[items], *(part[items, frames] for part in flows), null, fused, float(clamp),
            upstream[items].contiguous().numpy(), buffer.numpy(),
        )  # fmt: skip
        _joint_gradient_shares(team(len(starts) - 1), arguments)
        if buffer is not result:
            result.copy_(buffer)
        if frames.stop == num_frames[items.start]:  # the padding of a piece by itself
            grad[items, frames.stop :] = 0
    return grad
