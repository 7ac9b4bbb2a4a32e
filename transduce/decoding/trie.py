"""A trie of prefixes in tensors, and the operations that a search applies to many of them."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.hypothesis import Labels, path_labels
from transduce.decoding.problem import Problem
from transduce.decoding.protocols import State, log_probs, parts_of, rows_of, with_parts

FIRST_ROOM = 1024  # prefixes allocated at first: fewer allocations against memory


class Trie:
    """A trie of prefixes, a row each; row 0 is the empty sequence.

    The key of an extension is its prefix's row times K+1, plus the label. The prediction network is
    stepped once for each prefix, in batches, and its states are kept.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.network, self.joint = problem.network, problem.joint
        self.K1, self.size = problem.num_outputs, 0
        self.fused = problem.fused_scores()
        integers = torch.empty(0, dtype=torch.int64, device=device)
        self.parent = self.label = self.depth = integers  # [N]
        self.child = integers.new_empty(0, self.K1, dtype=torch.int32)  # [N, K+1], -1 for none
        # The last frame at whose beginning a prefix was in A, and its row of A then.
        self.frame = self.row = integers
        self.emitted = integers  # the labels a prefix has from the frame in which it is expanded
        self.log_fused = torch.empty(0, self.K1, dtype=torch.float64, device=device)
        self._plant_root()

    # --- Growth ---

    def add(self, keys: Tensor) -> Tensor:
        """Add a prefix for each key, step the prediction network to it, and return the rows."""
        new = self._more(len(keys))
        self._plant(keys, new)
        self._step(new)
        self._fuse(new)
        return torch.arange(new.start, new.stop, device=keys.device)

    def _plant_root(self) -> None:
        root = self._more(1)
        self.parent[root] = self.child[root] = self.frame[root] = -1
        self.label[root], self.depth[root] = NULL, 0
        g, state = self.network.step(self.label[root], self.network.start(1))
        self.g = g[:0].double() if self.joint is None else g[:0]
        self.state = with_parts([part[:0] for part in parts_of(state)], state)
        self._put(root, g, state)
        self._fuse(root)

    def _plant(self, keys: Tensor, new: slice) -> None:
        """Write parent, label and depth of new rows, and enter them as children."""
        parent = keys // self.K1
        self.parent[new], self.label[new] = parent, keys % self.K1
        self.depth[new] = self.depth[parent] + 1
        self.child[new] = self.frame[new] = -1
        self.child.view(-1)[keys] = torch.arange(
            new.start, new.stop, dtype=torch.int32, device=keys.device
        )

    def _step(self, new: slice) -> None:
        """Compute g and the state of new rows from their parents' states."""
        parent = self.parent[new]
        before = rows_of(self.state, parent)
        self._put(new, *self.network.step(self.label[new], before))

    def _put(self, new: slice, g: Tensor, state: State) -> None:
        """Write g and the state of new rows."""
        self._make_room()
        self.g[new] = g.to(self.g.dtype)
        for whole, rows in zip(parts_of(self.state), parts_of(state), strict=True):
            whole[new] = rows

    def _make_room(self) -> None:
        """Give g and the state as many rows as the trie has."""
        room = len(self.parent)
        if len(self.g) < room:
            self.g = _grown(self.g, room)
            parts = [_grown(part, room) for part in parts_of(self.state)]
            self.state = with_parts(parts, self.state)

    def _fuse(self, new: slice) -> None:
        if self.fused is not None:
            rows = self.fused.extend(self.parent[new].tolist(), self.label[new].tolist())
            self.log_fused[new] = torch.from_numpy(rows).to(self.log_fused.device)

    def _more(self, count: int) -> slice:
        """Make room for so many new rows; return where they are."""
        first, self.size = self.size, self.size + count
        if self.size > len(self.parent):
            room = max(FIRST_ROOM, 2 * self.size)
            for name in ("parent", "label", "depth", "child", "frame", "row", "emitted"):
                setattr(self, name, _grown(getattr(self, name), room))
            if self.fused is not None:
                self.log_fused = _grown(self.log_fused, room)
        return slice(first, self.size)

    def keep(self, rows: Tensor) -> Tensor:
        """Remove all prefixes but these and their own prefixes; return the new row of each old one.

        The new row of a prefix that was removed is -1.
        """
        is_kept = torch.zeros(self.size, dtype=torch.bool, device=rows.device)
        is_kept[0] = True
        while len(rows) > 0:
            is_kept[rows] = True
            above = self.parent[rows].clamp(min=0)
            rows = torch.unique(above[~is_kept[above]])
        kept = is_kept.nonzero()[:, 0]
        place = torch.where(is_kept, is_kept.cumsum(0) - 1, -1)
        for name in ("label", "depth", "frame", "row", "emitted"):
            getattr(self, name)[: len(kept)] = getattr(self, name)[kept]
        self.parent[1 : len(kept)] = place[self.parent[kept[1:]]]
        child = self.child[kept].long()
        child = torch.where(child < 0, -1, place[child.clamp(min=0)])
        self.child[: len(kept)] = child.to(self.child.dtype)
        for part in (self.g, *parts_of(self.state)):
            part[: len(kept)] = part[kept]
        if self.fused is not None:
            self.log_fused[: len(kept)] = self.log_fused[kept]
            self.fused.keep(kept.tolist())
        self.size = len(kept)
        return place

    # --- Questions ---

    def enter(self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor) -> Tensor:
        """Begin frame t with A = nodes; return ln of Pr(y) + Σ Pr(ŷ) Pr(y|ŷ,t) of each y in A.

        The sums over the proper prefixes ŷ in A are taken along all paths of the trie at once, in
        as many steps as the logarithm of the longest.
        """
        self.frame[nodes] = t
        self.row[nodes] = torch.arange(len(nodes), device=nodes.device)
        shortest = self.depth[nodes].min()
        # The row of each y's longest proper prefix in A, -1 for none, and ln Pr(y|ŷ,t).
        nearest, between = torch.full_like(nodes, -1), torch.zeros_like(log_prob)
        here, looking = nodes, self.depth[nodes] > shortest
        while bool(looking.any()):
            prefix = torch.where(looking, self.parent[here], 0)
            log_label = self.log_pr(prefix, f).gather(1, self.label[here, None])[:, 0]
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
        """Return ln of Pr(y) Pr(∅|y,t), [n], and of Pr(y) Pr(k|y,t), [n, K+1].

        The latter is -inf where y + k was in A when the frame began, has more than `most` labels
        from this frame, or k is null.
        """
        self.emitted[nodes] = torch.where(
            self.frame[nodes] == t, 0, self.emitted[self.parent[nodes]] + 1
        )
        extended = log_prob[:, None] + self.log_pr(nodes, f)
        with_null = extended[:, NULL].clone()
        child = self.child[nodes].long()
        closed = (child >= 0) & (self.frame[child.clamp(min=0)] == t)
        closed |= (self.emitted[nodes] == most)[:, None]
        closed[:, NULL] = True
        return with_null, extended.masked_fill_(closed, -torch.inf)

    def log_pr(self, nodes: Tensor, f: Tensor) -> Tensor:
        """Return ln Pr(k|y,t) with the fused scores, [n, K+1]; f is that of frame t."""
        log_prob = log_probs(f.expand(len(nodes), *f.shape), self.g[nodes], self.joint)
        return log_prob + self.log_fused[nodes] if self.fused else log_prob

    def labels(self, node: int) -> Labels:
        """Return the labels of a prefix."""
        return path_labels(node, self.parent, self.label)

    def largest_prediction(self) -> float:
        """Return the largest number in g: NaN if there is a NaN."""
        return float(self.g[: self.size].amax())


def _grown(tensor: Tensor, room: int) -> Tensor:
    """Return the tensor with room for so many rows; the new ones are not initialised."""
    if len(tensor) >= room:
        return tensor
    larger = tensor.new_empty(room, *tensor.shape[1:])
    larger[: len(tensor)] = tensor
    return larger
