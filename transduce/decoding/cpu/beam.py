"""Algorithm 1 on the CPU, compiled by Numba: hypotheses in batches, prefixes in a trie.

**The loop in batches.** In each frame the paper's loop repeatedly takes the most probable
hypothesis y* from A, until B has W elements more probable than any in A. Here the loop first
expands all of A at once. Then, with τ the W-th best probability in B (zero while B has fewer), it
expands batches of the elements of A that are at least as probable as τ, until there are none. Both
loops end with the same W best in B:

Let p(y) be the probability of y in A, and b(y) = p(y) Pr(∅|y,t) its probability in B. An extension
has p(y+k) <= p(y), or keeps the sum with which it entered the frame, and b(y) <= p(y). Neither p
nor b depends on when y is expanded. Consider the set of all hypotheses that could be expanded in
this frame, and the W best of it by b. The paper's loop stops when B has W elements above q, the
largest p left in A. Every hypothesis that it has not expanded is in A, or extends one in A, so its
p and b are at most q: none is among the W best. The loop here stops when every p left in A is below
τ; by the same argument none of the hypotheses it leaves is among the W best. Hypotheses that it
expands in vain have their true b, so they displace nothing. Hence both loops keep the W best of the
same set. Ties are decided by the order of the labels, which depends on neither loop.

All probabilities are logarithms in float64. Impossible hypotheses are never kept.

**Memory.** The trie keeps the prefixes that B and A reach; the others are removed when it is full.
By the argument above the elements of A may be taken in any order. If A has more than `most_open`
elements, its last are taken first, which are the latest and the least probable, so that A does not
grow further. The trie has room for `spare_prefixes`, or for twice the prefixes of the hypotheses of
two beams and of `most_open` + 20 K extensions, whatever the network does. A prefix that comes back
after its removal gets the same g again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from torch import Tensor

from transduce.decoding.cpu.heaps import Beam, Open, beam_for, offer, open_for, pop, push, worst_in
from transduce.decoding.cpu.prediction import PackedWeights, packed_weights
from transduce.decoding.cpu.trie import (
    Prefixes,
    Transcription,
    add,
    add_child,
    by_depth,
    child_of,
    common_prefix,
    exponentials,
    keep_prefixes,
    log_label,
    log_norms,
    new_prefixes,
    normalise,
    path_of,
    prefixes_for,
    step_new,
)
from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, Labels, check_prediction, path_labels
from transduce.decoding.problem import Problem
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, team

# Hypotheses expanded at once: W / 16 within these bounds. Larger batches make better use of the
# vectors, and expand more hypotheses in vain.
MIN_BATCH, MAX_BATCH = 8, 256
NEVER_ENOUGH = 1 << 31  # labels that hypotheses have in common
# Indices of Search.counts.
NUM_PREFIXES, NUM_BATCH, FRAME, NUM_EXPANDED, NUM_BOUNDED, NUM_STEPPED = range(6)


class Expansion(NamedTuple):
    """Hypotheses of A that are expanded together."""

    node: np.ndarray
    log_prob: np.ndarray
    emitted: np.ndarray


class Limits(NamedTuple):
    """The bounds of the search."""

    beam_width: int
    max_labels_per_frame: int
    spare_prefixes: int
    most_open: int


class Search(NamedTuple):
    """The state of a search between calls of `run`."""

    prefixes: Prefixes
    beam: Beam
    open: Open
    batch: Expansion
    counts: np.ndarray
    bounded: np.ndarray  # [1], the best p in this frame that `max_labels_per_frame` has cut off


def beam_searches(problem: Problem) -> list[Found]:
    """Return the beam B after the last frame of each utterance.

    If there are at least as many utterances as threads, each thread searches whole utterances;
    otherwise all threads share one utterance at a time. The result is the same to the last bit.
    """
    network, transcriptions = problem.peephole_network(), problem.transcriptions
    assert network is not None
    weights = packed_weights(network)

    def search(f: Tensor, threads: int) -> Found:
        fused, limits = problem.fused_scores(), limits_of(problem)
        beam = BeamSearch(weights, problem.num_outputs, fused, limits, threads)
        beam.advance(f)
        return beam.found()

    if len(transcriptions) < max(2, num_threads()):
        return [search(f, num_threads()) for f in transcriptions]
    with ThreadPoolExecutor(num_threads()) as pool:
        return list(pool.map(lambda f: search(f, 1), transcriptions))


def limits_of(problem: Problem) -> Limits:
    """Return the bounds of a problem's searches."""
    return Limits(
        problem.beam_width,
        problem.max_labels_per_frame,
        problem.spare_prefixes,
        problem.most_open,
    )


class BeamSearch:
    """The search of one utterance, whose transcription vectors may come in pieces.

    The pieces do not change the result: the search takes one frame after the other, and what is
    kept for a frame is computed anew in the next one.
    """

    def __init__(
        self,
        weights: PackedWeights,
        num_outputs: int,
        fused: FusedScores | None,
        limits: Limits,
        threads: int,
    ) -> None:
        self.weights, self.fused, self.limits = weights, fused, limits
        self.teams = team(1), team(threads)
        batch_size = min(max(limits.beam_width // 16, MIN_BATCH), MAX_BATCH)
        self.search = new_search(weights, num_outputs, batch_size, fused is not None)
        self.num_before = 0  # labels before those of the trie
        self._num_stepped = 0
        step_new(0, 1, weights, self.search.prefixes, self.teams)
        self._take_in_new()

    def advance(self, vectors: Tensor, num_agreed: int | None = None) -> int:
        """Search further transcription vectors [T, K+1]; return how many were searched.

        With `num_agreed`, stop after a vector if all hypotheses agree on more labels than that.
        """
        enough = NEVER_ENOUGH if num_agreed is None else num_agreed - self.num_before
        f = np.ascontiguousarray(vectors.double().numpy())
        transcription = Transcription(f, *exponentials(f))
        prefixes, counts = self.search.prefixes, self.search.counts
        # Frames are counted from the first of these vectors.
        prefixes.frame[:], prefixes.norm_frame[:], counts[FRAME] = -1, -1, 0
        while (done := int(self.search.counts[FRAME])) < len(f):
            if done and not self.search.counts[NUM_BATCH] and _num_common(self.search) > enough:
                break
            if lacks_room(self.search):
                kept, self.search = make_room(self.search, self.limits)
                self._keep(kept)
            arguments = (transcription, self.weights, self.limits, self.fused is not None)
            self.search = run(self.search, *arguments, enough, self.teams)
            self._take_in_new()
        return done

    def _take_in_new(self) -> None:
        """Give new prefixes their fused scores; check their prediction vectors."""
        prefixes = self.search.prefixes
        new = slice(self._num_stepped, int(self.search.counts[NUM_PREFIXES]))
        if self.fused is not None:
            prefixes.log_fused[new] = self.fused.extend(
                prefixes.parent[new].tolist(), prefixes.label[new].tolist()
            )
        self._num_stepped = new.stop
        check_prediction(float(prefixes.g[new].max(initial=-np.inf)))

    def _keep(self, rows: np.ndarray) -> None:
        self._num_stepped = len(rows)
        if self.fused is not None:
            self.fused.keep(rows.tolist())

    def found(self) -> Found:
        """Return the beam B after the vectors so far."""
        size, prefixes = int(self.search.beam.size[0]), self.search.prefixes
        # Copy what outlives the search: the states are large.
        nodes = self.search.beam.node[:size].copy()
        parent, label, depth = (x[: self._num_stepped].copy() for x in prefixes[:3])
        return Found(
            self.search.beam.log_prob[:size].copy(),
            self.num_before + depth[nodes],
            lambda i: path_labels(int(nodes[i]), parent, label),
            int(self.search.counts[NUM_BOUNDED]),
            int(self.search.counts[NUM_EXPANDED]),
            int(self.search.counts[NUM_STEPPED]),
        )

    # --- Of searches that go on for hours ---

    @property
    def num_hypotheses(self) -> int:
        """The hypotheses in B; none if all outputs are impossible."""
        return int(self.search.beam.size[0])

    def num_common(self) -> int:
        """Return the number of labels with which all hypotheses begin."""
        return self.num_before + int(_num_common(self.search))

    def predictions(self, labels: Labels, skipped: int) -> np.ndarray:
        """Return g [U+1, K+1] of labels that follow those before the trie, from `skipped` on."""
        vectors: np.ndarray = self.search.prefixes.g[self._path(labels)[skipped:]]
        return vectors

    def settle(self, labels: Labels, number: int) -> None:
        """Let the trie begin after the first `number` of a hypothesis's labels.

        Keep the hypotheses that begin with these and the next label; if there is none, keep this
        hypothesis alone.
        """
        path = self._path(labels[: number + 1])
        exactly = number == len(labels)
        width = self.limits.beam_width
        self._keep(settle(self.search, path[number], path[-1], exactly, width))
        self.num_before += number

    def _path(self, labels: Labels) -> np.ndarray:
        """Return the nodes on the path from row 0 along `labels`."""
        nodes: np.ndarray = path_of(np.array(labels, np.int64), self.search.prefixes)
        return nodes


def new_search(weights: PackedWeights, num_outputs: int, batch_size: int, fused: bool) -> Search:
    """Return a search with the empty sequence in B; its g is not computed yet."""
    counts = np.zeros(6, np.int64)
    counts[NUM_PREFIXES] = counts[NUM_STEPPED] = 1
    parent, label, emitted, nodes = np.zeros((4, 1), np.int32)
    return Search(
        new_prefixes(weights, num_outputs, fused),
        Beam(np.zeros(1), nodes, np.ones(1, np.int64)),
        Open(np.zeros(1), parent, label, emitted, np.zeros(1, np.int64)),
        Expansion(
            np.empty(batch_size, np.int32), np.empty(batch_size), np.empty(batch_size, np.int32)
        ),
        counts,
        np.full(1, -np.inf),
    )


# --- The search ---------------------------------------------------------------------------------


@compiled
def lacks_room(search):
    """Return whether the trie has no room for another batch."""
    return search.counts[NUM_PREFIXES] + search.batch.node.size > search.prefixes.parent.size


@compiled
def make_room(search, limits):
    """Remove prefixes that are out of reach if there are many, and let the trie grow if it must.

    Return the rows that were kept, and the search.
    """
    prefixes, beam, open, batch, counts, bounded = search
    size = counts[NUM_PREFIXES]
    kept = np.arange(size)
    if size >= limits.spare_prefixes:
        is_reached = prefixes.frame[:size] == counts[FRAME]  # those with which the frame began
        is_reached[beam.node[: beam.size[0]]] = True
        is_reached[open.parent[: open.size[0]]] = True
        is_reached[batch.node[: counts[NUM_BATCH]]] = True
        kept, place = keep_prefixes(is_reached, 0, prefixes)
        for i in range(beam.size[0]):
            beam.node[i] = place[beam.node[i]]
        for i in range(open.size[0]):
            open.parent[i] = place[open.parent[i]]
        for i in range(counts[NUM_BATCH]):
            batch.node[i] = place[batch.node[i]]
        counts[NUM_PREFIXES] = kept.size
    # Room for as many again, so that removals and copies take a small part of the time.
    prefixes = prefixes_for(2 * kept.size + batch.node.size, prefixes)
    return kept, Search(prefixes, beam, open, batch, counts, bounded)


@compiled
def settle(search, root, prefix, exactly, beam_width):
    """Keep the hypotheses that begin with `prefix`, or it alone; drop all before the node `root`.

    This is for the time between two frames. Return the rows that were kept.
    """
    prefixes, beam, counts = search.prefixes, search.beam, search.counts
    extends, is_kept = np.zeros((2, counts[NUM_PREFIXES]), np.bool_)
    extends[prefix] = True
    if not exactly:
        for node in range(prefix + 1, extends.size):
            extends[node] = extends[prefixes.parent[node]]
    nodes, log_prob = beam.node[: beam.size[0]].copy(), beam.log_prob[: beam.size[0]].copy()
    beam.size[0] = 0
    for i in range(nodes.size):
        if extends[nodes[i]]:
            offer(beam, beam_width, log_prob[i], nodes[i], prefixes)
            is_kept[nodes[i]] = True
    kept, place = keep_prefixes(is_kept, root, prefixes)
    for i in range(beam.size[0]):
        beam.node[i] = place[beam.node[i]]
    prefixes.parent[0] = -1
    counts[NUM_PREFIXES] = kept.size
    return kept


@compiled
def _depth_in_common(beam, prefixes):
    """Return the number of labels, after row 0, with which all hypotheses begin."""
    if beam.size[0] == 0:
        return 0
    return prefixes.depth[common_prefix(beam.node[: beam.size[0]], prefixes)]


@compiled
def _num_common(search):
    return _depth_in_common(search.beam, search.prefixes)


@compiled
def run(search, transcription, weights, limits, pause, enough, teams):
    """Search to the last frame, or until the trie lacks room.

    With `pause`, stop also when new prefixes need their log_fused; after a frame, stop if the
    hypotheses have more than `enough` labels in common. Return the search, whose arrays may have
    grown.
    """
    prefixes, beam, open, batch, counts, bounded = search
    beam_width = limits.beam_width
    while counts[FRAME] < transcription.f.shape[0] and not lacks_room(search):
        if counts[NUM_BATCH] == 0:
            expanded = _open_frame(prefixes, beam, transcription, counts, teams)
        else:
            n = counts[NUM_BATCH]
            expanded = Expansion(batch.node[:n], batch.log_prob[:n], batch.emitted[:n])
        beam = beam_for(min(beam_width, beam.size[0] + expanded.node.size), beam)
        open = _expand(
            expanded, prefixes, beam, open, transcription, limits, counts, bounded, teams
        )
        first = counts[NUM_PREFIXES]
        _take_batch(prefixes, beam, open, batch, limits, counts)
        if counts[NUM_BATCH] == 0:
            open.size[0] = 0
            counts[FRAME] += 1
            counts[NUM_BOUNDED] += -np.inf < bounded[0] >= worst_in(beam, beam_width)
            bounded[0] = -np.inf
            if _depth_in_common(beam, prefixes) > enough:
                break
        elif counts[NUM_PREFIXES] > first:
            step_new(first, counts[NUM_PREFIXES], weights, prefixes, teams)
            counts[NUM_STEPPED] += counts[NUM_PREFIXES] - first
            if pause:
                break
    return Search(prefixes, beam, open, batch, counts, bounded)


@compiled
def _open_frame(prefixes, beam, transcription, counts, teams):
    """Let A = B with its prefix sums, and B = {}; return A's nodes, shortest first, as a batch."""
    t, size = counts[FRAME], beam.size[0]
    for i in range(size):
        prefixes.frame[beam.node[i]] = t
        prefixes.log_prob[beam.node[i]] = beam.log_prob[i]
    nodes = by_depth(beam.node[:size], prefixes.depth)
    beam.size[0] = 0
    normalise(nodes, prefixes, transcription, t, teams)
    _add_prefixes(nodes, prefixes, transcription, t)
    return Expansion(nodes, prefixes.log_prob[nodes], np.zeros(size, np.int32))


@compiled
def _add_prefixes(nodes, prefixes, transcription, t):
    """Add Σ Pr(ŷ) Pr(y|ŷ,t) over the proper prefixes ŷ of y in A to Pr(y), shortest y first.

    The longest such ŷ already has its own sum, and the shorter ones reach y through it, so one term
    is enough. All prefixes between ŷ and y have been expanded, because y exists.
    """
    parent, label, depth, frame = prefixes.parent, prefixes.label, prefixes.depth, prefixes.frame
    log_prob, norm_frame = prefixes.log_prob, prefixes.norm_frame
    for y in nodes:
        node, between = y, 0.0
        while depth[node] > depth[nodes[0]]:
            prefix = parent[node]
            if norm_frame[prefix] != t:
                log_norms(0, 1, parent[node : node + 1], prefixes, transcription, t)
            between += log_label(prefix, label[node], prefixes, transcription, t)
            if frame[prefix] == t:
                log_prob[y] = add(log_prob[y], log_prob[prefix] + between)
                break
            node = prefix


@compiled
def _expand(batch, prefixes, beam, open, transcription, limits, counts, bounded, teams):
    """Put hypotheses into B, and their extensions that may still enter B into A."""
    nodes, log_prob, emitted = batch
    beam_width, max_labels_per_frame = limits.beam_width, limits.max_labels_per_frame
    t, K = counts[FRAME], transcription.f.shape[1] - 1
    normalise(nodes, prefixes, transcription, t, teams)
    _offer_all(nodes, log_prob, prefixes, beam, transcription.f[t, 0], beam_width)
    worst = worst_in(beam, beam_width)
    for i in range(nodes.size):
        if emitted[i] == max_labels_per_frame:
            bounded[0] = max(bounded[0], log_prob[i])
    done = 0
    while done < nodes.size:
        open = open_for(open.size[0] + K, open)
        done = _push_extensions(
            done, batch, worst, max_labels_per_frame, prefixes, open, transcription, t
        )
    counts[NUM_EXPANDED] += nodes.size
    return open


@compiled
def _offer_all(nodes, log_prob, prefixes, beam, f_null, beam_width):
    """Let Pr(y*) = Pr(y*) Pr(∅|y*,t), and add y* to B."""
    g, log_norm = prefixes.g, prefixes.log_norm
    for i in range(nodes.size):
        log_ended = log_prob[i] + (f_null + g[nodes[i], 0] - log_norm[nodes[i]])
        if log_ended > -np.inf and log_ended >= worst_in(beam, beam_width):
            offer(beam, beam_width, log_ended, nodes[i], prefixes)


@compiled
def _push_extensions(done, batch, worst, max_labels_per_frame, prefixes, open, transcription, t):
    """Add y+k to A with Pr(y) Pr(k|y,t) if that is at least the W-th best probability in B.

    Pr(y) is its value before the product with Pr(∅|y,t). An extension that was in A when the frame
    began keeps its sum, which includes this product. Start with hypothesis `done`; return the index
    of the first hypothesis for which A's arrays were too short.
    """
    nodes, log_prob, emitted = batch
    K1 = transcription.f.shape[1]
    f, max_f = transcription.f[t], transcription.max_f[t]
    g, max_g, log_norm = prefixes.g, prefixes.max_g, prefixes.log_norm
    fused = prefixes.log_fused.shape[1] > 0
    for i in range(done, nodes.size):
        if open.size[0] + K1 - 1 > open.label.size:
            return i
        node, log_rest = nodes[i], log_prob[i] - log_norm[nodes[i]]
        if emitted[i] == max_labels_per_frame or max_f + max_g[node] + log_rest < worst:
            continue
        enough = 0
        for k in range(1, K1):
            enough += f[k] + g[node, k] + log_rest >= worst  # vectorised; few nodes have any
        if enough == 0:
            continue
        for k in range(1, K1):
            log_extended = f[k] + g[node, k] + log_rest
            if fused:
                log_extended += prefixes.log_fused[node, k]
            if log_extended >= worst and log_extended > -np.inf:
                child = child_of(node, k, prefixes)
                if child < 0 or prefixes.frame[child] < t:
                    push(open, log_extended, node, k, emitted[i] + 1)
    return nodes.size


@compiled
def _take_batch(prefixes, beam, open, batch, limits, counts):
    """Move the best of A that are at least the W-th best of B into the batch, as many as fit.

    While A has too many elements, move the last of its heap instead.
    """
    worst, n = worst_in(beam, limits.beam_width), 0
    while n < batch.node.size and open.size[0] > 0 and open.log_prob[0] >= worst:
        i = open.size[0] - 1 if open.size[0] > limits.most_open else 0
        log_prob, parent, label = open.log_prob[i], open.parent[i], open.label[i]
        batch.emitted[n] = open.emitted[i]
        if i == 0:
            pop(open)
        else:
            open.size[0] = i
            if log_prob < worst:
                continue
        node = child_of(parent, label, prefixes)
        if node < 0:
            node = counts[NUM_PREFIXES]
            counts[NUM_PREFIXES] += 1
            add_child(node, parent, label, prefixes)
        batch.node[n], batch.log_prob[n] = node, log_prob
        n += 1
    counts[NUM_BATCH] = n
