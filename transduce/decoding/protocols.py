"""The interfaces of networks to the searches: any transcription, prediction network and joint.

A search takes the transcription vectors f [B, T, ...] as tensors, steps a prediction network
(predictor) label by label, and puts the two together with a joint (joiner). Ours are a
`PredictionNetwork` and the sum of Eq. 12; anything with the same two methods will do, such as a
GRU, or an embedding of the last two labels:

    class Stateless(nn.Module):
        def start(self, batch):
            return torch.zeros(batch, 2, dtype=torch.int64)  # on the device of f

        def step(self, labels, state):
            state = torch.cat([state[:, 1:], labels[:, None]], 1)
            return self.embedding(state).flatten(1), state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]  # each tensor is [N, ...]: a row for each prefix
# Logits [N, K+1], null first, from rows of f and rows of g, N of each.
Joint = Callable[[Tensor, Tensor], Tensor]


class Predictor(Protocol):
    """A prediction network that reads one label at a time."""

    def start(self, batch: int) -> State:
        """Return the state before any label, one row for each of `batch` prefixes."""

    def step(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """Return g [N, ...] after one more label each [N], and the new state.

        The first step takes null, id 0: its g is that of the empty sequence.
        """


class TransducerModel(Protocol):
    """Both networks, as `beam_search` takes them.

    A model may also have a `joint`; without one the joint is the sum. A model whose `backwards` is
    true reads its input, and writes its output, from the end.
    """

    @property
    def transcription_network(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """A function of frames [B, T, ...] and their numbers [B] that returns f and its lengths."""

    @property
    def prediction_network(self) -> Predictor:
        """The network that reads the labels."""


class Scorer(Protocol):
    """A model of inputs and outputs together, which ranks the outputs that transducers find."""

    def log_joints(
        self, frames: Tensor, num_frames: Tensor, rows: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Return ln Pr(x, y), [R], of labels [R, U], each for the input rows[r] of frames."""


def parts_of(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a state."""
    return (state,) if isinstance(state, Tensor) else tuple(state)


def with_parts(parts: Sequence[Tensor], like: State) -> State:
    """Return a state of the same kind as `like`, made of these tensors."""
    return parts[0] if isinstance(like, Tensor) else tuple(parts)


def rows_of(state: State, rows: Tensor) -> State:
    """Return some rows of a state."""
    return with_parts([part.index_select(0, rows) for part in parts_of(state)], state)


def put_rows(state: State, rows: Tensor, new: State) -> State:
    """Return a copy of a state in which `rows` are replaced by those of `new`."""
    parts = zip(parts_of(state), parts_of(new), strict=True)
    return with_parts([part.index_copy(0, rows, other) for part, other in parts], state)


def log_probs(f: Tensor, g: Tensor, joint: Joint | None) -> Tensor:
    """Return ln Pr(k|t,u) [N, K+1] of rows of f and g, in float64 (Eqs. 12-13).

    Where every output is impossible, each has probability 0, not NaN.
    """
    logits = f.double() + g.double() if joint is None else joint(f, g).double()  # Eq. 12
    log_total = logits.logsumexp(-1, keepdim=True)
    return torch.where(log_total == -torch.inf, -torch.inf, logits - log_total)  # Eq. 13
