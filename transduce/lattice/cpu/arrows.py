"""The lattice of given arrows: its loss and the posteriors of its arrows (Eqs. 16-20)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.kernels.sentinels import NEVER
from transduce.kernels.simd.functions import cast_like, exp
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.diagonals import skewed_steps, skewed_variables
from transduce.lattice.cpu.rows import count_bad


class _Arrows(NamedTuple):
    log_null: np.ndarray  # [B, T, U+1]
    log_label: np.ndarray  # [B, T, U]
    num_frames: np.ndarray  # [B]
    num_labels: np.ndarray  # [B]


class _Occupancies(NamedTuple):
    loss: np.ndarray  # [B]
    null: np.ndarray  # [B, T, U+1], occupancies
    label: np.ndarray  # [B, T, U]


@compiled
def _occupancies(lattice, T, U, null, label):
    """Write the posteriors of one utterance's arrows (Eq. 20), and 0 in the padding."""
    null[T:] = 0
    label[T:] = 0
    alpha, beta, evidence = lattice.log_alpha.ravel(), lattice.log_beta.ravel(), lattice.evidence
    log_null, log_label = lattice.log_null.ravel(), lattice.log_label.ravel()
    step_t, step_u = skewed_steps(T, U)
    for t in range(T):
        null_row, label_row = null[t], label[t]
        null_row[U + 1 :] = 0
        label_row[U:] = 0
        for u in range(U + 1):
            at = t * step_t + u * step_u + 1
            before, after = alpha[at] - evidence, beta[at + step_t]
            null_row[u] = cast_like(before + log_null[at] + after, null)
        for u in range(U):
            at = t * step_t + u * step_u + 1
            before, after = alpha[at] - evidence, beta[at + step_u]
            label_row[u] = cast_like(before + log_label[at] + after, null)
        for u in range(U + 1):
            null_row[u] = exp(null_row[u])
        for u in range(U):
            label_row[u] = exp(label_row[u])


@compiled
def _lattices(share, starts, all_items, arrows, results, with_occupancies):
    """Compute a share of the utterances; one with NaN or +inf among its arrows has loss NaN."""
    loss = results.loss
    for b in all_items[starts[share] : starts[share + 1]]:
        T, U = arrows.num_frames[b], arrows.num_labels[b]
        log_null, log_label = arrows.log_null[b, :T, : U + 1], arrows.log_label[b, :T, :U]
        num_bad = 0
        for t in range(T):
            num_bad += count_bad(log_null[t]) + count_bad(log_label[t])
        if num_bad > 0:
            loss[b] = np.nan
            if with_occupancies:
                results.null[b] = np.nan
                results.label[b] = np.nan
            continue
        lattice = skewed_variables(log_null, log_label, with_occupancies, loss)
        possible = lattice.evidence > NEVER
        loss[b] = -lattice.evidence if possible else np.inf
        if not with_occupancies:
            continue
        if possible:
            _occupancies(lattice, T, U, results.null[b], results.label[b])
        else:
            results.null[b] = 0
            results.label[b] = 0


_share_lattices = sharing(_lattices)


@compiled
def _lattices_shares(team, arguments):
    _share_lattices(team, arguments)


def lattice_forward(
    log_null: Tensor,
    log_label: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_occupancies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of given arrows, and their occupancies if asked for."""
    log_null, log_label = log_null.contiguous(), log_label.contiguous()
    loss = log_null.new_empty(len(log_null))
    B = len(log_null) if with_occupancies else 0
    null, label = (x.new_empty((B, *x.shape[1:])) for x in (log_null, log_label))
    T, U = num_frames.numpy(), num_labels.numpy()
    arrows = _Arrows(log_null.numpy(), log_label.numpy(), T, U)
    results = _Occupancies(loss.numpy(), null.numpy(), label.numpy())
    items, starts = shares_of(T * (U + 1), num_threads())
    _lattices_shares(team(len(starts) - 1), (starts, items, arrows, results, with_occupancies))
    return loss, null, label
