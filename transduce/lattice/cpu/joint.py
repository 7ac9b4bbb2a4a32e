"""The lattice of any joint network's logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numba import njit
from torch import Tensor

from transduce.lattice.cpu.diagonals import NEVER, flow, unskew, variables
from transduce.lattice.cpu.rows import count_bad, largest
from transduce.simd.functions import exp, log, narrow
from transduce.simd.options import compiled
from transduce.simd.threads import num_threads, sharing, team

CHUNK = 1 << 18  # elements of the logits that are taken at a time


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _sum(row):
    total = row.dtype.type(0)
    for k in range(row.size):
        total += row[k]
    return total


@compiled
def _joint_totals(share, starts, logits, num_columns, fused, log_total, num_bad):
    """ln of the sum over k of e^logit for each node of a share of the frames.

    num_bad[share] becomes how many of its logits are NaN or +inf.
    """
    num_outputs = logits.shape[2]
    terms, tops = np.empty(num_columns * num_outputs, logits.dtype), np.empty_like(log_total[0])
    for t in range(starts[share], starts[share + 1]):
        cells, totals = logits[t], log_total[t]
        numbers = cells[:num_columns].ravel()
        num_bad[share] += count_bad(numbers)
        if not fused:
            totals[:num_columns] = 0
            continue
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
def _joint_flow(log_null, log_label, like):
    """The occupancy of each node [T, U+1] and its part that leaves by the label [T, U]."""
    T, U = log_label.shape
    label, alpha, beta, evidence = variables(log_null, log_label, True, like)
    if evidence <= NEVER:
        return np.zeros((T, U + 1)), np.zeros((T, U + 1))
    flow(alpha, beta, label, evidence, like)
    return unskew(alpha, T, U + 1), unskew(label, T, U + 1)


@compiled
def _joint_gradient(
    share, starts, logits, log_total, labels, occupancy, by_label, null, fused, clamp, upstream,
    grad,
):  # fmt: skip
    """upstream times the gradient with respect to the logits of a share of the frames."""
    U, num_outputs = labels.size, logits.shape[2]
    low, high, scale = narrow(-clamp, logits), narrow(clamp, logits), narrow(upstream, logits)
    terms = np.empty((U + 1) * num_outputs, logits.dtype)
    for t in range(starts[share], starts[share + 1]):
        for u in range(U + 1):
            row, total = logits[t, u], log_total[t, u]
            difference = terms[u * num_outputs : (u + 1) * num_outputs]
            for k in range(num_outputs):
                difference[k] = row[k] - total
        if fused:
            for i in range(terms.size):  # one long loop
                terms[i] = exp(terms[i])
        else:
            terms[:] = 0
        for u in range(U + 1):
            row, term = grad[t, u], terms[u * num_outputs : (u + 1) * num_outputs]
            passed = narrow(occupancy[t, u], logits)
            for k in range(num_outputs):
                row[k] = passed * term[k]
            if logits[t, u, null] > -np.inf:  # else the difference is rounding alone
                row[null] -= narrow(occupancy[t, u] - by_label[t, u], logits)
            if u < U:
                row[labels[u]] -= narrow(by_label[t, u], logits)
            if clamp > 0:
                for k in range(num_outputs):
                    value = row[k] if row[k] > low else low
                    row[k] = value if value < high else high
            for k in range(num_outputs):
                row[k] *= scale
        grad[t, U + 1 :] = 0


_share_gradient = sharing(_joint_gradient)


@compiled
def _joint_gradient_shares(team, arguments):
    _share_gradient(team, arguments)


def _chunks(logits: Tensor, num_frames: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """The batch in pieces, as (item, frames, their logits in float32 or float64, contiguous).

    Where the logits are that already they are not copied, and a piece is a whole utterance.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    step = max(num_threads(), CHUNK // logits[0, 0].numel())
    for b, T in enumerate(num_frames.tolist()):
        as_they_are = logits.dtype == dtype and logits[b].is_contiguous()
        for first in range(0, T, T if as_they_are else step):
            frames = slice(first, min(T, first + (T if as_they_are else step)))
            yield b, frames, logits[b, frames].to(dtype).contiguous()


def _equal_shares(num_frames: int) -> np.ndarray:
    """Where each thread's frames start, and the last end."""
    return np.linspace(0, num_frames, min(num_threads(), num_frames) + 1).astype(np.int64)


def _arrows(
    logits: Tensor, log_total: Tensor, labels: Tensor, null: int
) -> tuple[np.ndarray, np.ndarray]:
    """ln ∅(t,u) and ln y(t,u) of one utterance's logits [T, U+1, K+1] (Eqs. 14-15)."""
    log_null = logits[..., null].double() - log_total
    at = labels[None, :, None].expand(len(logits), -1, 1)
    log_label = logits[:, :-1].gather(2, at)[..., 0].double() - log_total[:, :-1]
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
    loss = torch.zeros(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    log_total = torch.empty(logits.shape[:3], dtype=loss.dtype)
    for b, frames, cells in _chunks(logits, num_frames):
        starts = _equal_shares(len(cells))
        num_bad = np.zeros(len(starts) - 1, np.int64)
        totals = log_total[b, frames].numpy()
        arguments = (starts, cells.numpy(), int(num_labels[b]) + 1, fused, totals, num_bad)
        _joint_totals_shares(team(len(num_bad)), arguments)
        if num_bad.any():
            loss[b] = torch.nan
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        y = labels[b, :U]
        if loss[b].isnan() or ((y < 0) | (y >= logits.shape[3]) | (y == null)).any():
            loss[b] = torch.nan
            continue
        arrows = _arrows(logits[b, :T, : U + 1], log_total[b, :T, : U + 1], y, null)
        evidence = variables(*arrows, False, loss.numpy())[3]
        loss[b] = -evidence if evidence > NEVER else torch.inf
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
    grad = torch.empty(logits.shape, dtype=logits.dtype)
    flows: list[tuple[np.ndarray, np.ndarray]] = []
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        grad[b, T:] = 0
        totals = log_total[b, :T, : U + 1]
        arrows = _arrows(logits[b, :T, : U + 1], totals, labels[b, :U], null)
        flows.append(_joint_flow(*arrows, log_total.numpy()))
    for b, frames, cells in _chunks(logits, num_frames):
        result = grad[b, frames]
        buffer = result if result.dtype == cells.dtype else torch.empty_like(cells)
        occupancy, by_label = (flow[frames] for flow in flows[b])
        y = labels[b, : int(num_labels[b])]
        starts = _equal_shares(len(cells))
        arguments = (
            starts, cells.numpy(), log_total[b, frames].numpy(), y.numpy(), occupancy, by_label,
            null, fused, float(clamp), float(upstream[b]), buffer.numpy(),
        )  # fmt: skip
        _joint_gradient_shares(team(len(starts) - 1), arguments)
        if buffer is not result:
            result.copy_(buffer)
    return grad
