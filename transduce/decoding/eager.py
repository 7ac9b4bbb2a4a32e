"""Both searches in PyTorch operations, for any network and any joint, on any device.

The loop in batches is that of cpu/beam.py, which has the proof. Here a set of hypotheses is a
tensor, from which those that have become too improbable are dropped, and the trie answers for all
prefixes at once. Probabilities are logarithms in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.hypothesis import Found, Greedy, check_prediction
from transduce.decoding.problem import Problem, padded
from transduce.decoding.protocols import State, log_probs, put_rows, rows_of
from transduce.decoding.trie import Trie

# Hypotheses expanded at once: W, or this many of a narrower beam. More rows make better use of a
# device and expand more hypotheses in vain.
MIN_BATCH = 256
LEAST = -torch.finfo(torch.float64).max  # below any possible log-probability
NewTrie = Callable[[Problem, torch.device], Trie]


def beam_searches(problem: Problem, new_trie: NewTrie = Trie) -> list[Found]:
    """Return the beam B after the last frame of each utterance, one utterance after the other."""
    return [_Search(problem, f, new_trie).run() for f in problem.transcriptions]


class _Search:
    """The search through one utterance's output sequences."""

    def __init__(self, problem: Problem, transcription: Tensor, new_trie: NewTrie) -> None:
        # The sum is taken in float64; any other joint gets f as it is.
        f = transcription.double() if problem.joint is None else transcription
        self.f, self.trie = f.contiguous(), new_trie(problem, f.device)
        self.beam_width = problem.beam_width
        self.max_labels_per_frame = problem.max_labels_per_frame
        self.batch_size = max(MIN_BATCH, self.beam_width)
        self.spare_prefixes, self.most_open = problem.spare_prefixes, problem.most_open
        self.most_prefixes = self.spare_prefixes
        self.num_bounded = self.num_expanded = self.num_removed = 0

    def run(self) -> Found:
        """Search to the last frame."""
        trie = self.trie
        nodes = torch.zeros(1, dtype=torch.int64, device=self.f.device)
        log_prob = torch.zeros(1, dtype=torch.float64, device=self.f.device)
        for t in range(len(self.f)):
            if len(nodes) == 0:
                break
            log_prob = trie.enter(t, nodes, log_prob, self.f[t])
            nodes, log_prob = self._frame(t, nodes, log_prob)
        check_prediction(trie.largest_prediction())
        depth = trie.depth[nodes].cpu().numpy()
        # The labels are read on the CPU.
        trie.parent, trie.label = trie.parent[: trie.size].cpu(), trie.label[: trie.size].cpu()
        at = nodes.tolist()
        return Found(
            log_prob.cpu().numpy(),
            depth,
            lambda i: trie.labels(at[i]),
            self.num_bounded,
            self.num_expanded,
            trie.size + self.num_removed,
        )

    def _frame(self, t: int, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nodes of B after frame t and their probabilities, given A with its sums."""
        trie, K1, most = self.trie, self.trie.K1, self.max_labels_per_frame
        beam_nodes, beam = nodes[:0], log_prob[:0]
        open_log_prob, open_keys = log_prob[:0], nodes[:0]  # the extensions in A
        bounded = log_prob.new_full((), -torch.inf)
        rounds = 0
        while len(nodes) > 0:
            self.num_expanded += len(nodes)
            # Pr(y) is its value before the product with Pr(∅|y,t).
            with_null, extended = trie.extend(t, nodes, log_prob, self.f[t], most)
            beam_nodes, beam = torch.cat([beam_nodes, nodes]), torch.cat([beam, with_null])
            if rounds >= most:
                ended = trie.emitted[nodes] == most
                bounded = torch.maximum(bounded, torch.where(ended, log_prob, -torch.inf).amax())
            # Hypotheses equal to the W-th best stay until the frame is over.
            worst = self._worst(beam)
            found = (extended >= worst).view(-1).nonzero()[:, 0]
            row = found // K1
            keys = torch.add(found, nodes[row] - row, alpha=K1)
            if len(open_keys) > 0:
                kept = (open_log_prob >= worst).nonzero()[:, 0]
                open_log_prob, open_keys = open_log_prob[kept], open_keys[kept]
            open_log_prob = torch.cat([open_log_prob, extended.view(-1)[found]])
            open_keys = torch.cat([open_keys, keys])
            log_prob, keys = open_log_prob, open_keys
            open_log_prob, open_keys = open_log_prob[:0], open_keys[:0]
            if len(keys) > self.batch_size:
                taken = log_prob.topk(self.batch_size, sorted=False).indices
                if len(keys) > self.most_open:  # the latest instead, so that A does not grow
                    taken = torch.arange(len(keys) - self.batch_size, len(keys), device=keys.device)
                left = torch.ones_like(keys, dtype=torch.bool)
                left[taken] = False
                open_log_prob, open_keys = log_prob[left], keys[left]
                log_prob, keys = log_prob[taken], keys[taken]
            nodes = trie.child.view(-1)[keys].long()
            new = (nodes < 0).nonzero()[:, 0]
            if len(new) > 0:
                nodes[new] = trie.add(keys[new])
            rounds += 1
            if trie.size > self.most_prefixes:
                kept = (beam >= worst).nonzero()[:, 0]
                place = self._remove_prefixes(t, nodes, beam_nodes[kept], open_keys // K1)
                nodes, beam_nodes, beam = place[nodes], place[beam_nodes[kept]], beam[kept]
                open_keys = place[open_keys // K1] * K1 + open_keys % K1
        worst = self._worst(beam)
        self.num_bounded += rounds > most and bool(bounded >= worst)
        kept = (beam >= worst).nonzero()[:, 0]
        return self._best(beam_nodes[kept], beam[kept])

    def _remove_prefixes(self, t: int, *reached: Tensor) -> Tensor:
        """Keep the prefixes with which frame t began, and those reached; return the new rows."""
        trie, size = self.trie, self.trie.size
        check_prediction(trie.largest_prediction())
        begun = (trie.frame[:size] == t).nonzero()[:, 0]
        place = trie.keep(torch.unique(torch.cat([begun, *reached])))
        self.num_removed += size - trie.size
        self.most_prefixes = max(self.spare_prefixes, 2 * trie.size)
        return place

    def _worst(self, beam: Tensor) -> Tensor:
        """Return the W-th best log-probability of B; `LEAST` if B has fewer."""
        excess = len(beam) - self.beam_width
        if excess < 0:
            return beam.new_full((), LEAST)
        return beam.kthvalue(excess + 1).values.clamp(min=LEAST)

    def _best(self, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the W best; ties are decided by the order of their labels."""
        excess = len(nodes) - self.beam_width
        if excess > 0:
            equal = (log_prob == log_prob.amin()).nonzero()[:, 0].tolist()
            last = sorted(equal, key=lambda i: self.trie.labels(int(nodes[i])))[-excess:]
            kept = torch.ones_like(nodes, dtype=torch.bool)
            kept[last] = False
            nodes, log_prob = nodes[kept], log_prob[kept]
        return nodes, log_prob


def greedy_searches(problem: Problem) -> list[Greedy]:
    """Return each utterance's greedy alignment; all utterances go through the frames together."""
    f, num_vectors = padded(problem.transcriptions)
    network, most = problem.network, problem.max_labels_per_frame
    (B, T), device = f.shape[:2], f.device
    nulls = torch.full((B,), NULL, device=device)
    g, state = network.step(nulls, network.start(B))
    labels: list[list[int]] = [[] for _ in range(B)]
    frames: list[list[int]] = [[] for _ in range(B)]
    log_prob = torch.zeros(B, dtype=torch.float64, device=device)
    num_bounded, largest = torch.zeros_like(nulls), g.amax()
    for t in range(T):
        here = t < num_vectors  # the utterances whose alignment is at this frame
        begun = log_prob.clone()
        for emitted in range(most + 1):
            scores = log_probs(f[:, t], g, problem.joint)
            best, output = scores.max(-1)
            if emitted == most:
                bounded = here & (output != NULL)
                num_bounded += bounded
                here = here & ~bounded
                for b in bounded.nonzero()[:, 0].tolist():
                    row = torch.tensor([b], device=device)
                    kept, log_prob[b], reached = _leave(problem, labels[b], f[row, t], begun[b])
                    del labels[b][kept:], frames[b][kept:]
                    g, state = g.index_copy(0, row, reached[0]), put_rows(state, row, reached[1])
            log_prob += torch.where(here, best, 0.0)
            here = here & (output != NULL)
            rows = here.nonzero()[:, 0]
            if len(rows) == 0:
                break
            for b, label in zip(rows.tolist(), output[rows].tolist(), strict=True):
                labels[b].append(label)
                frames[b].append(t)
            stepped, later = network.step(output[rows], rows_of(state, rows))
            largest = torch.maximum(largest, stepped.amax())
            g, state = g.index_copy(0, rows, stepped), put_rows(state, rows, later)
    check_prediction(float(largest))
    columns = (log_prob.tolist(), num_bounded.tolist())
    return [
        Greedy(tuple(y), tuple(when), *numbers)
        for y, when, *numbers in zip(labels, frames, *columns, strict=True)
    ]


def _leave(
    problem: Problem, labels: list[int], f: Tensor, log_prob: Tensor
) -> tuple[int, Tensor, tuple[Tensor, State]]:
    """Leave a frame, f [1, K+1], whose last labels meet the bound, in the most probable way.

    `log_prob` is that of the labels before the frame. Return how many labels to keep, the
    log-probability of null after them, and the prediction network's output and state there. All
    labels are stepped again, because this is rare.
    """
    network, begun = problem.network, len(labels) - problem.max_labels_per_frame
    here: tuple[Tensor, State] = network.step(
        torch.full((1,), NULL, device=f.device), network.start(1)
    )
    best = log_prob.new_full((), -torch.inf), 0, here
    for number, label in enumerate([*labels, NULL]):
        if number >= begun:
            [scores] = log_probs(f, here[0], problem.joint)
            leaving = log_prob + scores[NULL]
            if number == begun or leaving > best[0]:
                best = leaving, number, here
            log_prob = log_prob + scores[label]
        if label != NULL:
            here = network.step(torch.tensor([label], device=f.device), here[1])
    return best[1], best[0], best[2]
