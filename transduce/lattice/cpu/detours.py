"""The likelihoods of label sequences that differ from y in one place, in strips of the lattice.

A detour leaves y after label a, emits labels of its own, and joins y again after label e. Before a
its alignments are those of y, so that their sum is y's α(t,a); after e they are y's β(t,e), as far
as the prediction network has forgotten the detour. Only the rows between are computed.
"""

from __future__ import annotations

import math

import numpy as np

from transduce.kernels.sentinels import IMPOSSIBLE
from transduce.kernels.simd.options import compiled
from transduce.lattice.cpu.emissions import log_sum

# A sum of products below this may have lost digits to underflow (docs/derivations.md, 1).
SMALLEST_SUM = np.finfo(np.float64).tiny / np.finfo(np.float64).eps


@compiled
def _exponentials(x):
    """Return the maximum of each row, and exp(x - maximum), in float64."""
    largest, exp_x = np.empty(x.shape[0]), np.empty(x.shape)
    for row in range(x.shape[0]):
        largest[row] = x[row].max()
        for k in range(x.shape[1]):
            exp_x[row, k] = math.exp(x[row, k] - largest[row])
    return largest, exp_x


@compiled
def _log_norm(f, g, exp_f, exp_g, largest):
    """Return ln of the sum of exp(f + g) (Eq. 13), by products of exponentials where exact."""
    a = b = c = d = 0.0  # four independent sums, for instruction-level parallelism
    fours = f.size // 4 * 4
    for k in range(0, fours, 4):
        a += exp_f[k] * exp_g[k]
        b += exp_f[k + 1] * exp_g[k + 1]
        c += exp_f[k + 2] * exp_g[k + 2]
        d += exp_f[k + 3] * exp_g[k + 3]
    for k in range(fours, f.size):
        a += exp_f[k] * exp_g[k]
    total = (a + b) + (c + d)
    if total >= f.size * SMALLEST_SUM:
        return largest + math.log(total)
    highest = (f + g).max()
    return highest + math.log(np.exp(f + g - highest).sum())


@compiled
def variables(log_null, log_label):
    """Return ln α(t,u) and ln β(t,u) [T, U+1] from the arrows of a lattice (Eqs. 16, 18).

    The arrows, [T, U+1] and [T, U], are finite, and there is at least one vector.
    """
    T, U = log_label.shape
    log_alpha, log_beta = np.full((T, U + 1), IMPOSSIBLE), np.full((T, U + 1), IMPOSSIBLE)
    log_alpha[0, 0] = 0.0
    for t in range(T):
        for u in range(U + 1):
            here = log_alpha[t, u]
            if t > 0:
                here = log_alpha[t - 1, u] + log_null[t - 1, u]
            if u > 0:
                here = log_sum(here, log_alpha[t, u - 1] + log_label[t, u - 1])
            log_alpha[t, u] = here
    for t in range(T - 1, -1, -1):
        for u in range(U, -1, -1):
            after = log_beta[t + 1, u] if t < T - 1 else (0.0 if u == U else IMPOSSIBLE)
            here = after + log_null[t, u]
            if u < U:
                here = log_sum(here, log_beta[t, u + 1] + log_label[t, u])
            log_beta[t, u] = here
    return log_alpha, log_beta


@compiled
def detour_log_likelihoods(f, g, nodes, labels, leaves, joins, firsts, lasts, log_alpha, log_beta):
    """Return ln Pr of y with each of N detours.

    g has a row for every node; `nodes` [N, n+1] are those of a detour, the first of which is y's
    own after `leaves` labels, and `labels` [N, n] lead from one to the next, -1 beyond its end. The
    detour's last label leads to y's node after `joins` labels; a detour to the end of y keeps its
    own node instead. Alignments leave y at vector `firsts` or later, and join it before `lasts`.
    """
    T, U = log_alpha.shape[0], log_alpha.shape[1] - 1
    (max_f, exp_f), (max_g, exp_g) = _exponentials(f), _exponentials(g)
    found = np.full(leaves.size, IMPOSSIBLE)
    for i in range(leaves.size):
        n = 0
        while n < labels.shape[1] and labels[i, n] >= 0:
            n += 1
        to_end = joins[i] == U
        first, last = firsts[i], T if to_end else lasts[i]
        entering = log_alpha[first:last, leaves[i]].copy()  # row j's α of the detour
        for j in range(n + 1):
            if j == n and not to_end:
                for t in range(first, last):
                    found[i] = log_sum(found[i], entering[t - first] + log_beta[t, joins[i]])
                break
            node = nodes[i, j]
            staying = IMPOSSIBLE  # from the vector before, by null
            for t in range(first, last):
                norm = _log_norm(f[t], g[node], exp_f[t], exp_g[node], max_f[t] + max_g[node])
                # α of y's own row has the alignments that stay in it already.
                here = entering[t - first] if j == 0 else log_sum(entering[t - first], staying)
                staying = here + f[t, 0] + g[node, 0] - norm
                if j < n:
                    label = labels[i, j]
                    entering[t - first] = here + f[t, label] + g[node, label] - norm
            if j == n:
                found[i] = staying
    return found
