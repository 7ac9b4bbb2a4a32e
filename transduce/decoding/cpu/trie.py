"""A trie of the prefixes that a search has expanded, and the probabilities of their extensions.

ln Pr(k|y,t) = f_t^k + g^k - ln Σ_k exp(f_t^k + g^k) (Eqs. 12-13). The exponentials of f and g are
taken once each and their products summed, as the paper proposes at the end of its section 2.5.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from transduce.decoding.cpu.prediction import PackedWeights, step_prefixes
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import sharing

# The least work that is worth a second thread: rows of the prediction network, and sums.
MIN_ROWS, MIN_NORMS = 24, 400
FIRST_ROOM = 256  # prefixes allocated at first: fewer allocations against memory
# A sum of products below this may have lost digits to underflow (docs/derivations.md, 1).
SMALLEST_TERM = np.finfo(np.float64).tiny / np.finfo(np.float64).eps


class Prefixes(NamedTuple):
    """A trie of prefixes, a row each; parents come before children.

    Row 0 is the empty sequence, or the prefix of all others where those before it were removed.
    """

    parent: np.ndarray  # [N]
    label: np.ndarray  # [N], the last label
    depth: np.ndarray  # [N], labels after row 0
    first_child: np.ndarray  # [N], -1 for none
    next_sibling: np.ndarray  # [N], -1 for none
    h: np.ndarray  # [N, L, H], of the prediction network
    s: np.ndarray  # [N, L, H]
    g: np.ndarray  # [N, K+1]
    max_g: np.ndarray  # [N], float64
    exp_g: np.ndarray  # [N, K+1], exp(g - max_g), float64
    log_fused: np.ndarray  # [N, K+1], added to ln Pr(k|y,t); [N, 0] without fusion
    frame: np.ndarray  # [N], the last frame at whose beginning it was in A
    log_prob: np.ndarray  # [N], its log-probability then
    norm_frame: np.ndarray  # [N], the last frame for which log_norm was computed
    log_norm: np.ndarray  # [N], ln of the sum in Eq. 13


class Transcription(NamedTuple):
    """The transcription vectors of one utterance, in float64."""

    f: np.ndarray  # [T, K+1]
    max_f: np.ndarray  # [T]
    exp_f: np.ndarray  # [T, K+1], exp(f - max_f)


def new_prefixes(weights: PackedWeights, num_outputs: int, fused: bool) -> Prefixes:
    """Return a trie with the empty sequence; its g is not computed yet."""
    L, H = weights.peepholes.shape[0], weights.peepholes.shape[2]
    kind, N = weights.biases.dtype, FIRST_ROOM
    parent, label, depth, first_child, next_sibling, frame, norm_frame = np.full(
        (7, N), -1, np.int32
    )
    max_g, log_prob, log_norm = np.zeros((3, N))
    label[0] = depth[0] = 0
    return Prefixes(
        *(parent, label, depth, first_child, next_sibling),
        np.empty((N, L, H), kind),
        np.empty((N, L, H), kind),
        np.empty((N, num_outputs), kind),
        max_g,
        np.empty((N, num_outputs)),
        np.zeros((N, num_outputs if fused else 0)),
        *(frame, log_prob, norm_frame, log_norm),
    )


# --- The trie -----------------------------------------------------------------------------------


@compiled
def child_of(node, label, prefixes):
    """Return the node of y+k, or -1 if there is none."""
    child = prefixes.first_child[node]
    while child >= 0 and prefixes.label[child] != label:
        child = prefixes.next_sibling[child]
    return child


@compiled
def path_of(labels, prefixes):
    """Return the nodes on the path from row 0 along the labels [U], [U+1]."""
    nodes = np.zeros(labels.size + 1, np.int64)
    for u in range(labels.size):
        nodes[u + 1] = child_of(nodes[u], labels[u], prefixes)
    return nodes


@compiled
def add_child(node, parent, label, prefixes):
    """Make `node` the node of y+k."""
    prefixes.parent[node], prefixes.label[node] = parent, label
    prefixes.depth[node] = prefixes.depth[parent] + 1
    prefixes.first_child[node] = -1
    prefixes.next_sibling[node] = prefixes.first_child[parent]
    prefixes.first_child[parent] = node
    prefixes.frame[node] = prefixes.norm_frame[node] = -1


@compiled
def precedes(a, b, prefixes):
    """Return whether the labels of node a come before those of b in lexicographic order."""
    parent, depth = prefixes.parent, prefixes.depth
    shorter = depth[a] < depth[b]
    while depth[a] > depth[b]:
        a = parent[a]
    while depth[b] > depth[a]:
        b = parent[b]
    if a == b:
        return shorter
    while parent[a] != parent[b]:
        a, b = parent[a], parent[b]
    return prefixes.label[a] < prefixes.label[b]


@compiled
def common_prefix(nodes, prefixes):
    """Return the node of the longest prefix that some nodes have in common."""
    parent, depth, node = prefixes.parent, prefixes.depth, nodes[0]
    for other in nodes[1:]:
        while node != other:
            if depth[node] >= depth[other]:
                node = parent[node]
            else:
                other = parent[other]
    return node


@compiled
def by_depth(nodes, depth):
    """Sort nodes by depth, shortest first, by counting."""
    deepest = 0
    for node in nodes:
        deepest = max(deepest, depth[node])
    places = np.zeros(deepest + 2, np.int64)
    for node in nodes:
        places[depth[node] + 1] += 1
    places = places.cumsum()
    ordered = np.empty_like(nodes)
    for node in nodes:
        ordered[places[depth[node]]] = node
        places[depth[node]] += 1
    return ordered


@compiled
def grown(array, size):
    """Return a copy of an array with room for `size` rows."""
    larger = np.empty((size, *array.shape[1:]), array.dtype)
    larger[: array.shape[0]] = array
    return larger


@compiled
def keep_prefixes(is_kept, root, prefixes):
    """Remove all prefixes but those marked in `is_kept` [N] and their own prefixes from `root` on.

    The marked ones extend the prefix `root`, which becomes row 0. Return the rows that stay, which
    move up in their order, and the new row of each old one.
    """
    parent, label, depth, frame = prefixes.parent, prefixes.label, prefixes.depth, prefixes.frame
    is_kept[root] = True
    for node in range(is_kept.size - 1, root, -1):
        if is_kept[node]:
            is_kept[parent[node]] = True
    kept = np.nonzero(is_kept)[0]
    place, root_depth = is_kept.cumsum() - 1, depth[root]
    for new in range(kept.size):
        old = kept[new]
        label[new], depth[new], frame[new] = label[old], depth[old] - root_depth, frame[old]
        prefixes.log_prob[new] = prefixes.log_prob[old]
        prefixes.norm_frame[new] = prefixes.norm_frame[old]
        prefixes.log_norm[new], prefixes.max_g[new] = prefixes.log_norm[old], prefixes.max_g[old]
        prefixes.h[new], prefixes.s[new] = prefixes.h[old], prefixes.s[old]
        prefixes.g[new], prefixes.exp_g[new] = prefixes.g[old], prefixes.exp_g[old]
        prefixes.log_fused[new] = prefixes.log_fused[old]
        prefixes.first_child[new] = -1
        if new > 0:
            parent[new] = place[parent[old]]
            prefixes.next_sibling[new] = prefixes.first_child[parent[new]]
            prefixes.first_child[parent[new]] = new
    return kept, place


@compiled
def prefixes_for(size, prefixes):
    """Return the trie with room for `size` prefixes."""
    if size <= prefixes.parent.size:
        return prefixes
    return Prefixes(
        grown(prefixes.parent, size), grown(prefixes.label, size),
        grown(prefixes.depth, size), grown(prefixes.first_child, size),
        grown(prefixes.next_sibling, size), grown(prefixes.h, size),
        grown(prefixes.s, size), grown(prefixes.g, size), grown(prefixes.max_g, size),
        grown(prefixes.exp_g, size), grown(prefixes.log_fused, size),
        grown(prefixes.frame, size), grown(prefixes.log_prob, size),
        grown(prefixes.norm_frame, size), grown(prefixes.log_norm, size),
    )  # fmt: skip


# --- Probabilities ------------------------------------------------------------------------------


@compiled
def _step_share(share, starts, weights, prefixes):
    first, last = starts[share], starts[share + 1]
    step_prefixes(
        first, last, weights, prefixes.parent, prefixes.label, prefixes.h, prefixes.s, prefixes.g
    )
    for node in range(first, last):
        _exponentials(prefixes.g[node], prefixes.max_g, prefixes.exp_g, node)


_share_steps = sharing(_step_share)


@compiled
def step_new(first, last, weights, prefixes, teams):
    """Step the prediction network to each of the prefixes first to last-1."""
    team = teams[1] if last - first >= 2 * MIN_ROWS else teams[0]
    _share_steps(team, (_evenly(first, last, team[0]), weights, prefixes))


@compiled
def _exponentials(x, max_x, exp_x, row):
    """Write the maximum of x and exp(x - maximum) to a row, so that sums do not overflow."""
    largest = -np.inf
    for k in range(x.size):
        largest = max(largest, x[k])
    largest = 0.0 if largest == -np.inf else np.float64(largest)
    max_x[row] = largest
    for k in range(x.size):
        exp_x[row, k] = math.exp(x[k] - largest)


@compiled
def exponentials(f):
    """Return max_f and exp_f of a `Transcription`."""
    max_f, exp_f = np.empty(f.shape[0]), np.empty(f.shape)
    for t in range(f.shape[0]):
        _exponentials(f[t], max_f, exp_f, t)
    return max_f, exp_f


@compiled
def log_norms(first, last, nodes, prefixes, transcription, t):
    """Compute ln Σ exp(f_t^k + g^k) over k (Eq. 13) of some nodes, by products where exact."""
    f, max_f = transcription.exp_f[t], transcription.max_f[t]
    g, max_g = prefixes.exp_g, prefixes.max_g
    norm_frame, log_norm, K1 = prefixes.norm_frame, prefixes.log_norm, transcription.f.shape[1]
    fours = K1 // 4 * 4
    for i in range(first, last):
        node = nodes[i]
        if norm_frame[node] == t:
            continue
        a = b = c = d = 0.0  # four independent sums, for instruction-level parallelism
        for k in range(0, fours, 4):
            a += f[k] * g[node, k]
            b += f[k + 1] * g[node, k + 1]
            c += f[k + 2] * g[node, k + 2]
            d += f[k + 3] * g[node, k + 3]
        for k in range(fours, K1):
            a += f[k] * g[node, k]
        total = (a + b) + (c + d)
        if total >= K1 * SMALLEST_TERM:
            log_norm[node] = max_f + max_g[node] + math.log(total)
        else:
            log_norm[node] = _log_norm_directly(transcription.f[t], prefixes.g[node])
        norm_frame[node] = t


@compiled
def _log_norm_directly(f, g):
    """Compute it without products; return inf, so that every Pr(k) is 0, if none is possible."""
    largest, total = -np.inf, 0.0
    for k in range(f.size):
        largest = max(largest, f[k] + g[k])
    if largest == -np.inf:
        return np.inf
    for k in range(f.size):
        total += math.exp(f[k] + g[k] - largest)
    return largest + math.log(total)


@compiled
def _norm_share(share, starts, nodes, prefixes, transcription, t):
    log_norms(starts[share], starts[share + 1], nodes, prefixes, transcription, t)


_share_norms = sharing(_norm_share)


@compiled
def normalise(nodes, prefixes, transcription, t, teams):
    """Compute `log_norm` of some nodes for frame t."""
    team = teams[1] if nodes.size >= 2 * MIN_NORMS else teams[0]
    starts = _evenly(0, nodes.size, team[0])
    _share_norms(team, (starts, nodes, prefixes, transcription, t))


@compiled
def log_label(node, label, prefixes, transcription, t):
    """Return ln Pr(k|y,t) plus its fused score."""
    log_label = transcription.f[t, label] + prefixes.g[node, label] - prefixes.log_norm[node]
    if prefixes.log_fused.shape[1] > 0:
        log_label += prefixes.log_fused[node, label]
    return log_label


@compiled
def add(a, b):
    """Return ln(e^a + e^b); a is not -inf."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


@compiled
def _evenly(first, last, num_shares):
    """Cut first to last-1 into equal shares; return where each starts, and the end."""
    starts = np.empty(num_shares + 1, np.int64)
    for i in range(num_shares + 1):
        starts[i] = first + (last - first) * i // num_shares
    return starts
