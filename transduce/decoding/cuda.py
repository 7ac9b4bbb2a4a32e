"""Both searches on a GPU for our prediction network in float32.

utterances.py searches a whole batch at once. What does not suit it, a fusion or a very wide beam,
is searched one utterance after the other: the search itself is then that of eager.py, and the
trie's hot parts are kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import transduce.decoding.utterances as utterances
from transduce.decoding.eager import beam_searches as eager_beam_searches
from transduce.decoding.eager import greedy_searches as eager_greedy_searches
from transduce.decoding.hypothesis import Found, Greedy, Labels, Timing
from transduce.decoding.problem import Problem
from transduce.decoding.trie import Trie
from transduce.kernels.nvrtc import current, full_float32_matmul, kernels, without_autocast

SOURCE = Path(__file__).with_name("prefixes.cu").read_text()
NAMES = ("enter", "prefix_sums", "extend", "plant", "step")
THREADS, LANES = 256, 32
One = TypeVar("One")


def beam_searches(problem: Problem) -> list[Found]:
    """Return the beam B after the last frame of each utterance."""
    device = problem.transcriptions[0].device
    with current(device), without_autocast():
        if not utterances.suits(problem):
            return eager_beam_searches(problem, CompiledTrie)
        found = utterances.beam_searches(problem)
        too_large = [b for b, one in enumerate(found) if one is None]
        others = eager_beam_searches(_part(problem, too_large), CompiledTrie)
    return _filled(found, others)


def greedy_searches(problem: Problem) -> list[Greedy]:
    """Return each utterance's greedy alignment."""
    device = problem.transcriptions[0].device
    with current(device), without_autocast():
        if not utterances.suits_greedy(problem):
            return eager_greedy_searches(problem)
        found = utterances.greedy_searches(problem)
        too_long = [b for b, one in enumerate(found) if one is None]
        others = eager_greedy_searches(_part(problem, too_long)) if too_long else []
    return _filled(found, others)


def timings(
    problem: Problem, hypotheses: Sequence[tuple[int, Labels]]
) -> list[list[Timing] | None]:
    """Return when each label is emitted, of hypotheses (utterance, labels); None of a large one."""
    with current(problem.transcriptions[0].device), without_autocast():
        return utterances.timings(problem, hypotheses)


def _part(problem: Problem, places: list[int]) -> Problem:
    """Return the problem of some of the utterances."""
    return replace(problem, transcriptions=[problem.transcriptions[b] for b in places])


def _filled(found: list[One | None], others: list[One]) -> list[One]:
    """Put the others, in their order, where None is."""
    rest = iter(others)
    return [next(rest) if one is None else one for one in found]


class CompiledTrie(Trie):
    """The trie of a `PredictionNetwork` in float32 on a GPU, in few launches."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        network = problem.peephole_network()
        assert network is not None and network.output.weight.dtype == torch.float32
        at = network.output.weight.get_device()
        self.kernels = dict(zip(NAMES, kernels(SOURCE, (), NAMES, at), strict=True))
        self.layers = [
            tuple(weights[0].contiguous() for weights in layer.weights())
            for layer in cast(Iterable[Any], network.lstm.layers)
        ]
        self.output = network.output
        # The part of each label in the first layer's sums; null's is zero.
        inputs = self.layers[0][0].T
        self.inputs = torch.cat([torch.zeros_like(inputs[:1]), inputs]).contiguous()
        super().__init__(problem, device)

    def enter(self, t: int, nodes: Tensor, log_prob: Tensor, f: Tensor) -> Tensor:
        """Begin frame t with A = nodes; see `Trie.enter`."""
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
        """Return the probabilities of prefixes that end or go on; see `Trie.extend`."""
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
        """Step the LSTM to new rows: a product and a kernel for each layer (Eqs. 3-8)."""
        self._make_room()
        h, s = self.state
        L, H = h.shape[1:]
        parent, count = self.parent[new], new.stop - new.start
        for n, (inputs, hidden, peepholes, biases) in enumerate(self.layers):
            sums = full_float32_matmul(h[:, n].index_select(0, parent), hidden.T)
            if n > 0:
                sums += full_float32_matmul(h[new, n - 1], inputs.T)
            looked_up = self.inputs if n == 0 else None
            self._launch(
                "step",
                count * H,
                (
                    *(sums, count, new.start, H, n, L, self.parent, self.label, looked_up),
                    *(biases, peepholes, h, s),
                ),
            )
        g = full_float32_matmul(h[new, -1].contiguous(), self.output.weight.T) + self.output.bias
        self.g[new] = g.double()  # Eq. 3

    def _fused_scores(self) -> Tensor | None:
        return self.log_fused if self.fused else None

    def _launch(self, name: str, threads: int, arguments: tuple[Tensor | int | None, ...]) -> None:
        self.kernels[name]((-(-threads // THREADS), 1), THREADS, arguments)
