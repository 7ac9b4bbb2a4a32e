"""The trie of a search's prefixes in tensors, and what is asked of all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.fusion import FusedScores
from transduce.kernels.nvrtc import kernels
from transduce.lstm.reference import step
from transduce.networks import PredictionNetwork

SOURCE = Path(__file__).with_name("prefixes.cu").read_text()
NAMES = ("enter", "prefix_sums", "extend", "plant", "step")
THREADS, LANES = 256, 32
GROWN = ("parent", "label", "depth", "child", "h", "s", "g", "log_fused", "frame", "row", "emitted")


def prefixes_for(network: PredictionNetwork, fused: FusedScores | None) -> Prefixes:
    """The trie with nothing in it but the empty sequence, by kernels where they are for it."""
    weight = network.output.weight
    compiled = weight.is_cuda and weight.dtype == torch.float32
    return CompiledPrefixes(network, fused) if compiled else Prefixes(network, fused)


class Prefixes:
    """The trie of all prefixes ever expanded, a row each; row 0 is the empty sequence.

    An extension is known by its key: the prefix's row times K+1, and the label.
    """

    def __init__(self, network: PredictionNetwork, fused: FusedScores | None) -> None:
        self.network, self.fused = network, fused
        weight = network.output.weight
        L, H, K1 = network.lstm.num_layers, network.lstm.hidden_size, network.output.out_features
        integers = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.size, self.K1 = 0, K1
        self.parent = self.label = self.depth = integers  # [N]
        self.child = integers.new_empty(0, K1, dtype=torch.int32)  # [N, K+1], -1 for none
        self.h, self.s = weight.new_empty(0, L, H), weight.new_empty(0, L, H)
        self.g = weight.new_empty(0, K1, dtype=torch.float64)
        self.log_fused = self.g.new_empty(0, K1)
        # The row of A in which it was when frame `frame` began.
        self.frame = self.row = integers
        self.emitted = integers  # how many of its labels are of the frame in which it is expanded
        # What each label adds to the first layer's sums; null adds nothing.
        inputs = cast(Any, network.lstm.layers[0]).weights()[0][0].T
        self.inputs = torch.cat([torch.zeros_like(inputs[:1]), inputs])
        self._plant_root()

    def add(self, keys: Tensor) -> Tensor:
        """New nodes, the prediction network stepped to each."""
        new = self._more(len(keys))
        self._plant(keys, new)
        self._step(new)
        if self.fused:
            rows = self.fused.extend(self.parent[new].tolist(), self.label[new].tolist())
            self.log_fused[new] = torch.from_numpy(rows).to(self.g.device)
        return torch.arange(new.start, new.stop, device=keys.device)

    def enter(self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor) -> Tensor:
        """A of frame t: ln of Pr(y) + Σ Pr(ŷ) Pr(y|ŷ,t) over the proper prefixes ŷ in A, of all y
        in A.

        The prefix sums are taken along all paths through the trie at once, in as many steps as the
        logarithm of the longest.
        """
        self.frame[nodes] = t
        self.row[nodes] = torch.arange(len(nodes), device=nodes.device)
        shortest = self.depth[nodes].min()
        # Each y's nearest prefix in A, by its row, and ln Pr(y|ŷ,t); -1 where there is none.
        nearest, between = torch.full_like(nodes, -1), torch.zeros_like(log_prob)
        here, looking = nodes, self.depth[nodes] > shortest
        while bool(looking.any()):
            prefix = torch.where(looking, self.parent[here], 0)
            log_label = self._log_pr(prefix, f).gather(1, self.label[here, None])[:, 0]
            between = torch.where(looking, between + log_label, between)
            found = looking & (self.frame[prefix] == t)
            nearest = torch.where(found, self.row[prefix], nearest)
            looking = looking & ~found & (self.depth[prefix] > shortest)
            here = prefix
        # p(y) = Pr(y) + Pr(y|ŷ,t) p(ŷ), unrolled to twice as many prefixes in every step.
        between = torch.where(nearest < 0, -torch.inf, between)
        while bool((nearest >= 0).any()):
            at = nearest.clamp(min=0)
            log_prob = torch.logaddexp(log_prob, between + log_prob[at])
            between = between + between[at]
            nearest = torch.where(nearest < 0, -1, nearest[at])
        return log_prob

    def extend(
        self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """ln of Pr(y) Pr(∅|y,t), [n], and of Pr(y) Pr(k|y,t), [n, K+1], which is -inf where y + k
        was in A when the frame began, has more than `most` labels in it, or k is null."""
        self.emitted[nodes] = torch.where(
            self.frame[nodes] == t, 0, self.emitted[self.parent[nodes]] + 1
        )
        extended = log_prob[:, None] + self._log_pr(nodes, f)
        with_null = extended[:, NULL].clone()
        child = self.child[nodes].long()
        closed = (child >= 0) & (self.frame[child.clamp(min=0)] == t)
        closed |= (self.emitted[nodes] == most)[:, None]
        closed[:, NULL] = True
        return with_null, extended.masked_fill_(closed, -torch.inf)

    def labels(self, node: int) -> tuple[int, ...]:
        reversed_labels = []
        while node > 0:
            reversed_labels.append(int(self.label[node]))
            node = int(self.parent[node])
        return tuple(reversed_labels[::-1])

    def _log_pr(self, nodes: Tensor, f: Tensor) -> Tensor:
        """ln Pr(k|y,t) (Eqs. 12-13), with what is fused, [n, K+1]; f is that of frame t."""
        log_density = f + self.g[nodes]  # Eq. 12
        log_norm = log_density.logsumexp(1, keepdim=True)  # Eq. 13
        log_prob = torch.where(log_norm == -torch.inf, -torch.inf, log_density - log_norm)
        return log_prob + self.log_fused[nodes] if self.fused else log_prob

    def _more(self, count: int) -> slice:
        """Where so many new nodes are to be, with room for them."""
        first, self.size = self.size, self.size + count
        if self.size > len(self.parent):
            for name in GROWN:
                if name != "log_fused" or self.fused:
                    old: Tensor = getattr(self, name)
                    new = old.new_empty(max(1024, 2 * self.size), *old.shape[1:])
                    new[: len(old)] = old
                    setattr(self, name, new)
        return slice(first, self.size)

    def _plant_root(self) -> None:
        root = self._more(1)
        self.parent[root] = self.child[root] = self.frame[root] = -1
        self.label[root], self.depth[root] = NULL, 0
        nothing = torch.zeros_like(self.h[root])
        self._step_from(root, nothing, nothing)
        if self.fused:
            rows = self.fused.extend([-1], [NULL])
            self.log_fused[root] = torch.from_numpy(rows).to(self.g.device)

    def _plant(self, keys: Tensor, new: slice) -> None:
        parent = keys // self.K1
        self.parent[new], self.label[new] = parent, keys % self.K1
        self.depth[new] = self.depth[parent] + 1
        self.child[new] = self.frame[new] = -1
        self.child.view(-1)[keys] = torch.arange(
            new.start, new.stop, dtype=torch.int32, device=keys.device
        )

    def _step(self, new: slice) -> None:
        parent = self.parent[new]
        self._step_from(new, self.h[parent], self.s[parent])

    def _step_from(self, new: slice, h: Tensor, s: Tensor) -> None:
        """The nodes' h, s and g from their parents' h and s, [n, L, H]."""
        x = self.inputs[self.label[new]]
        for n, layer in enumerate(cast(Iterable[Any], self.network.lstm.layers)):
            # An embedding's product is in self.inputs already.
            weights = layer.weights(of_embedded=n == 0)
            inputs, hidden, peepholes, biases = (part[0] for part in weights)
            i = (x if n == 0 else x @ inputs.T) + biases
            x, self.s[new, n] = step(i, h[:, n], s[:, n], hidden, peepholes)  # Eqs. 4-8
            self.h[new, n] = x
        self.g[new] = self.network.output(x).double()  # Eq. 3


class CompiledPrefixes(Prefixes):
    """The same on a GPU, in float32, in few launches."""

    def __init__(self, network: PredictionNetwork, fused: FusedScores | None) -> None:
        device = network.output.weight.get_device()
        self.kernels = dict(zip(NAMES, kernels(SOURCE, (), NAMES, device), strict=True))
        self.layers = [
            tuple(weights[0].contiguous() for weights in layer.weights())
            for layer in cast(Iterable[Any], network.lstm.layers)
        ]
        super().__init__(network, fused)
        self.inputs = self.inputs.contiguous()

    def enter(self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor) -> Tensor:
        count, shortest = len(nodes), torch.full_like(nodes[:1], 1 << 40)
        where = (self.frame, self.row, shortest)
        self._launch("enter", count, (nodes, count, t, self.depth, *where))
        summed = torch.empty_like(log_prob)
        self._launch(
            "prefix_sums",
            LANES * count,
            (
                *(nodes, count, t, log_prob, f, self.g, self._fused_scores(), self.K1),
                *(self.parent, self.label, self.depth, *where, summed),
            ),
        )
        return summed

    def extend(
        self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        count = len(nodes)
        with_null, extended = torch.empty_like(log_prob), log_prob.new_empty(count, self.K1)
        self._launch(
            "extend",
            LANES * count,
            (
                *(nodes, count, t, log_prob, f, self.g, self._fused_scores(), self.K1, most),
                *(self.parent, self.child, self.frame, self.emitted, with_null, extended),
            ),
        )
        return with_null, extended

    def _plant(self, keys: Tensor, new: slice) -> None:
        count = len(keys)
        trie = (self.parent, self.label, self.depth, self.child, self.frame)
        self._launch("plant", LANES * count, (keys, count, new.start, self.K1, *trie))

    def _step(self, new: slice) -> None:
        L, H = self.h.shape[1:]
        parent, count = self.parent[new], new.stop - new.start
        for n, (inputs, hidden, peepholes, biases) in enumerate(self.layers):
            sums = self.h[:, n].index_select(0, parent) @ hidden.T
            if n > 0:
                sums.addmm_(self.h[new, n - 1], inputs.T)
            looked_up = self.inputs if n == 0 else None
            self._launch(
                "step",
                count * H,
                (
                    *(sums, count, new.start, H, n, L, self.parent, self.label, looked_up),
                    *(biases, peepholes, self.h, self.s),
                ),
            )
        self.g[new] = self.network.output(self.h[new, -1])  # Eq. 3

    def _fused_scores(self) -> Tensor | None:
        return self.log_fused if self.fused else None

    def _launch(self, name: str, threads: int, arguments: tuple[Tensor | int | None, ...]) -> None:
        self.kernels[name]((-(-threads // THREADS), 1), THREADS, arguments)
