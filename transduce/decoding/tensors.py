"""Algorithm 1 in tensor operations, for models on a GPU: no loop over hypotheses.

The loop in batches is that of cpu.py, and so is the proof. What differs is how its parts are put:
the prefix sums are taken along all paths through the trie at once, in as many steps as the
logarithm of the longest, and a set is a tensor from which what has become too improbable is left
out. Probabilities are logarithms in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, check_prediction
from transduce.lstm.reference import step
from transduce.networks import PredictionNetwork

MIN_BATCH = 256  # hypotheses that are expanded at once, of a narrow beam; W / 4 of a wide one


def beam_searches(
    network: PredictionNetwork,
    transcriptions: list[Tensor],  # [T, K+1] each
    beam_width: int,
    max_labels_per_frame: int,
    fused: Callable[[], FusedScores | None],
) -> list[Found]:
    """B after the last frame, of each utterance, one utterance after the other."""
    return [
        _Search(network, f, beam_width, max_labels_per_frame, fused()).run() for f in transcriptions
    ]


class _Prefixes:
    """The trie of all prefixes ever expanded, a row each; row 0 is the empty sequence."""

    def __init__(self, network: PredictionNetwork, fused: FusedScores | None) -> None:
        self.network, self.fused = network, fused
        weight = network.output.weight
        L, H, K1 = network.lstm.num_layers, network.lstm.hidden_size, network.output.out_features
        integers = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.size = 0
        self.parent = self.label = self.depth = integers  # [N]
        self.child = integers.new_empty(0, K1, dtype=torch.int32)  # [N, K+1], -1 for none
        self.h, self.s = weight.new_empty(0, L, H), weight.new_empty(0, L, H)
        self.g = weight.new_empty(0, K1, dtype=torch.float64)
        self.log_fused = self.g.new_empty(0, K1)
        # The row of A in which it was when frame `frame` began.
        self.frame = self.row = integers
        # What each label adds to the first layer's sums; null adds nothing.
        inputs = cast(Any, network.lstm.layers[0]).input_weights[0].T
        self.inputs = torch.cat([torch.zeros_like(inputs[:1]), inputs])
        self.add(integers.new_full((1,), -1), integers.new_full((1,), NULL))

    def add(self, parent: Tensor, label: Tensor) -> Tensor:
        """New nodes, the prediction network stepped to each."""
        first, self.size = self.size, self.size + len(parent)
        self._make_room()
        new = slice(first, self.size)
        nodes = torch.arange(first, self.size, device=parent.device)
        root = first == 0
        self.parent[new], self.label[new] = parent, label
        self.depth[new] = 0 if root else self.depth[parent] + 1
        self.child[new] = self.frame[new] = -1
        if not root:
            self.child[parent, label] = nodes.int()
        x = self.inputs[label]
        layers = cast(Iterable[Any], self.network.lstm.layers)
        for n, layer in enumerate(layers):
            inputs, hidden, peepholes, biases = (weights[0] for weights in layer.weights())
            h, s = (
                torch.zeros_like(part[new, n]) if root else part[parent, n]
                for part in (self.h, self.s)
            )
            i = (x if n == 0 else x @ inputs.T) + biases
            x, self.s[new, n] = step(i, h, s, hidden, peepholes)  # Eqs. 4-8
            self.h[new, n] = x
        self.g[new] = self.network.output(x).double()  # Eq. 3
        if self.fused:
            rows = self.fused.extend(parent.tolist(), label.tolist())
            self.log_fused[new] = torch.from_numpy(rows).to(self.g.device)
        return nodes

    def _make_room(self) -> None:
        if self.size <= len(self.parent):
            return
        for name in (
            "parent",
            "label",
            "depth",
            "child",
            "h",
            "s",
            "g",
            "log_fused",
            "frame",
            "row",
        ):
            if name != "log_fused" or self.fused:
                old: Tensor = getattr(self, name)
                new = old.new_empty(max(1024, 2 * self.size), *old.shape[1:])
                new[: len(old)] = old
                setattr(self, name, new)

    def log_pr(self, nodes: Tensor, f: Tensor) -> Tensor:
        """ln Pr(k|y,t) (Eqs. 12-13), with what is fused, [n, K+1]; f is that of frame t."""
        log_density = f + self.g[nodes]  # Eq. 12
        log_norm = log_density.logsumexp(1, keepdim=True)  # Eq. 13
        log_prob = torch.where(log_norm == -torch.inf, -torch.inf, log_density - log_norm)
        return log_prob + self.log_fused[nodes] if self.fused else log_prob

    def labels(self, node: int) -> tuple[int, ...]:
        reversed_labels = []
        while node > 0:
            reversed_labels.append(int(self.label[node]))
            node = int(self.parent[node])
        return tuple(reversed_labels[::-1])


class _Search:
    """The search through one utterance's output sequences."""

    def __init__(
        self,
        network: PredictionNetwork,
        transcription: Tensor,
        beam_width: int,
        max_labels_per_frame: int,
        fused: FusedScores | None,
    ) -> None:
        self.f = transcription.double()
        self.prefixes = _Prefixes(network, fused)
        self.beam_width, self.max_labels_per_frame = beam_width, max_labels_per_frame
        self.batch_size = max(MIN_BATCH, beam_width // 4)
        self.num_bounded = self.num_expanded = 0

    def run(self) -> Found:
        nodes = torch.zeros(1, dtype=torch.int64, device=self.f.device)
        log_prob = self.f.new_zeros(1)
        for t in range(len(self.f)):
            if len(nodes) == 0:
                break
            nodes, log_prob = self._frame(t, nodes, self._with_prefixes(t, nodes, log_prob))
        # What remains of the trie, on the CPU.
        size, prefixes = self.prefixes.size, self.prefixes
        check_prediction(float(prefixes.g[:size].amax()))
        prefixes.parent, prefixes.label = prefixes.parent[:size].cpu(), prefixes.label[:size].cpu()
        at = nodes.tolist()
        return Found(
            log_prob.cpu().numpy(),
            prefixes.depth[nodes].cpu().numpy(),
            lambda i: prefixes.labels(at[i]),
            self.num_bounded,
            self.num_expanded,
            size,
        )

    def _with_prefixes(self, t: int, nodes: Tensor, log_prob: Tensor) -> Tensor:
        """ln of Pr(y) + Σ Pr(ŷ) Pr(y|ŷ,t) over the proper prefixes ŷ in A, of all y in A."""
        trie = self.prefixes
        trie.frame[nodes] = t
        trie.row[nodes] = torch.arange(len(nodes), device=nodes.device)
        shortest = trie.depth[nodes].min()
        # Each y's nearest prefix in A, by its row, and ln Pr(y|ŷ,t); -1 where there is none.
        nearest, between = torch.full_like(nodes, -1), torch.zeros_like(log_prob)
        here, looking = nodes, trie.depth[nodes] > shortest
        while bool(looking.any()):
            prefix = torch.where(looking, trie.parent[here], 0)
            log_label = trie.log_pr(prefix, self.f[t]).gather(1, trie.label[here, None])[:, 0]
            between = torch.where(looking, between + log_label, between)
            found = looking & (trie.frame[prefix] == t)
            nearest = torch.where(found, trie.row[prefix], nearest)
            looking = looking & ~found & (trie.depth[prefix] > shortest)
            here = prefix
        # p(y) = Pr(y) + Pr(y|ŷ,t) p(ŷ), unrolled to twice as many prefixes in every step.
        between = torch.where(nearest < 0, -torch.inf, between)
        while bool((nearest >= 0).any()):
            at = nearest.clamp(min=0)
            log_prob = torch.logaddexp(log_prob, between + log_prob[at])
            between = between + between[at]
            nearest = torch.where(nearest < 0, -1, nearest[at])
        return log_prob

    def _frame(self, t: int, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """B of frame t: its nodes and their probabilities, from A with its prefix sums."""
        trie, W = self.prefixes, self.beam_width
        beam_nodes, beam = nodes[:0], log_prob[:0]
        # The extensions in A: their probability, parent, label, and labels in this frame.
        open_log_prob, open_rest = log_prob[:0], nodes.new_empty(0, 3)
        emitted = torch.zeros_like(nodes)
        bounded = log_prob.new_full((), -torch.inf)
        while len(nodes) > 0:
            self.num_expanded += len(nodes)
            log_pr = trie.log_pr(nodes, self.f[t])
            beam_nodes = torch.cat([beam_nodes, nodes])
            beam = torch.cat([beam, log_prob + log_pr[:, NULL]])
            worst = beam.topk(W).values[-1] if len(beam) >= W else beam.new_full((), -torch.inf)
            # Those equal to the W-th best stay, until the frame is over.
            kept = ((beam >= worst) & (beam > -torch.inf)).nonzero()[:, 0]
            beam_nodes, beam = beam_nodes[kept], beam[kept]
            ended = emitted == self.max_labels_per_frame
            bounded = torch.maximum(bounded, torch.where(ended, log_prob, -torch.inf).amax())
            # Pr(y) from before the product with Pr(∅|y,t). What was in A when the frame began
            # keeps the sum that it was given.
            extended = log_prob[:, None] + log_pr
            child = trie.child[nodes].long()
            begun = (child >= 0) & (trie.frame[child.clamp(min=0)] == t)
            wanted = (extended >= worst) & (extended > -torch.inf) & ~begun & ~ended[:, None]
            wanted[:, NULL] = False
            row, label = wanted.nonzero(as_tuple=True)
            rest = torch.stack([nodes[row], label, emitted[row] + 1], 1)
            open_log_prob = torch.cat([open_log_prob, extended[row, label]])
            open_rest = torch.cat([open_rest, rest])
            kept = (open_log_prob >= worst).nonzero()[:, 0]
            open_log_prob, open_rest = open_log_prob[kept], open_rest[kept]
            size = min(self.batch_size, len(open_log_prob))
            taken = open_log_prob.topk(size, sorted=False).indices
            left = torch.ones_like(open_log_prob, dtype=torch.bool)
            left[taken] = False
            log_prob, (parent, label, emitted) = open_log_prob[taken], open_rest[taken].unbind(1)
            open_log_prob, open_rest = open_log_prob[left], open_rest[left]
            nodes = trie.child[parent, label].long()
            new = (nodes < 0).nonzero()[:, 0]
            if len(new) > 0:
                nodes[new] = trie.add(parent[new], label[new])
        worst = beam.topk(W).values[-1] if len(beam) >= W else beam.new_full((), -torch.inf)
        self.num_bounded += bool((bounded > -torch.inf) & (bounded >= worst))
        return self._best(beam_nodes, beam)

    def _best(self, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """The W best; equals in the order of their labels."""
        excess = len(nodes) - self.beam_width
        if excess > 0:
            equal = (log_prob == log_prob.amin()).nonzero()[:, 0].tolist()
            last = sorted(equal, key=lambda i: self.prefixes.labels(int(nodes[i])))[-excess:]
            kept = torch.ones_like(nodes, dtype=torch.bool)
            kept[last] = False
            nodes, log_prob = nodes[kept], log_prob[kept]
        return nodes, log_prob
