"""The transcription network in steps: the vectors f of an input that comes in pieces (Eqs. 9, 11).

However an input is cut into pieces, and whatever other inputs are computed beside it, its vectors
are bit for bit those of `TranscriptionNetwork.forward_one_by_one` on the CPU. Between the kernels
this is NumPy, whose operations on few numbers take a third of the time of PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from transduce.lstm.layer import PeepholeLSTM
from transduce.networks import TranscriptionNetwork

if TYPE_CHECKING:  # what needs Numba is imported when it is used
    from transduce.lstm.cpu import PackedLSTM

State = tuple[np.ndarray, np.ndarray]  # h and s, each [layers, 1, H]


@dataclass
class TranscriptionState:
    """The state of a transcription network between two pieces of an input."""

    waiting: np.ndarray  # [n, D], or ids [n]: frames whose lookahead is still to come
    unpooled: np.ndarray  # [m, H], m < pooling: outputs of the first layer not averaged yet
    lower: State  # of the layers before pooling
    upper: State | None  # of those after it


class PackedTranscription:
    """A forward transcription network on the CPU, packed for steps without gradients."""

    def __init__(self, network: TranscriptionNetwork) -> None:
        from transduce.kernels.simd.affine import PackedAffine

        if network.lstm.num_directions != 1:
            raise ValueError("a bidirectional network needs the whole input; it has no steps")
        self.input_size, self.lookahead = network.input_size, network.lookahead
        self.pooling = network.pooling
        self.lower = _packed(network.lstm)
        self.upper = None if network.upper_lstm is None else _packed(network.upper_lstm)
        self.output = PackedAffine(network.output)

    def start(self, of_ids: bool) -> TranscriptionState:
        """Return the state before the first frame."""
        return TranscriptionState(
            np.empty(0, np.int64) if of_ids else np.empty((0, self.input_size), np.float32),
            np.empty((0, self.lower.hidden_size), self.lower.dtype),
            _zeros(self.lower),
            None if self.upper is None else _zeros(self.upper),
        )

    def advance(
        self,
        states: Sequence[TranscriptionState],
        frames: Sequence[Tensor],  # of each input, [n, D] or ids [n]; n may be 0
        is_last: Sequence[bool],
    ) -> list[Tensor]:
        """Return the further vectors f [m, K+1] of each input, and advance its state.

        The last piece of an input gets all vectors that are left.
        """
        inputs = [
            self._stacked(state, new.numpy(), last)
            for state, new, last in zip(states, frames, is_last, strict=True)
        ]
        hidden = _run(self.lower, inputs, [state.lower for state in states])
        for state, (_, after) in zip(states, hidden, strict=True):
            state.lower = after
        pooled = [
            self._pooled(state, outputs, last)
            for state, (outputs, _), last in zip(states, hidden, is_last, strict=True)
        ]
        if self.upper is not None:
            befores = [state.upper for state in states if state.upper is not None]
            found = _run(self.upper, pooled, befores)
            pooled = [outputs for outputs, _ in found]
            for state, (_, after) in zip(states, found, strict=True):
                state.upper = after
        f = torch.from_numpy(self.output.rows(_joined(pooled)))
        return list(torch.split(f, [len(outputs) for outputs in pooled]))

    def _stacked(self, state: TranscriptionState, new: np.ndarray, is_last: bool) -> np.ndarray:
        """Return the input of the first layer at the frames whose lookahead is there.

        It is that of `networks.stack_frames`.
        """
        if self.lookahead == 0:
            return new
        parts = [state.waiting, new]
        if is_last:  # frames past the end count as zeros
            parts.append(np.zeros((self.lookahead, self.input_size), new.dtype))
        frames = np.concatenate(parts)
        ready = max(0, len(frames) - self.lookahead)
        state.waiting = frames[ready:].copy()
        # A stacked frame is a frame and those after it as they lie in memory.
        shape = (ready, (1 + self.lookahead) * self.input_size)
        return np.ndarray(shape, frames.dtype, frames, 0, frames.strides)

    def _pooled(self, state: TranscriptionState, outputs: np.ndarray, is_last: bool) -> np.ndarray:
        """Return the averages of every `pooling` outputs; at the end also that of the rest.

        They are those of `networks.average_frames`.
        """
        if (n := self.pooling) == 1:
            return outputs
        outputs = np.concatenate([state.unpooled, outputs])
        missing = -len(outputs) % n if is_last else 0
        if missing:
            outputs = np.concatenate(
                [outputs, np.zeros((missing, outputs.shape[1]), outputs.dtype)]
            )
        whole = len(outputs) // n * n
        state.unpooled = outputs[whole:].copy()
        sums = outputs[:whole:n]
        for i in range(1, n):  # in this order
            sums = sums + outputs[i:whole:n]
        averages: np.ndarray = sums / outputs.dtype.type(n)
        if missing:
            averages[-1] = sums[-1] / outputs.dtype.type(n - missing)
        return averages


def _packed(lstm: PeepholeLSTM) -> PackedLSTM:
    from transduce.lstm.cpu import PackedLSTM

    with torch.no_grad():
        return PackedLSTM(layer.weights() for layer in lstm.layers)  # type: ignore[operator]


def _zeros(lstm: PackedLSTM) -> State:
    zeros = np.zeros((len(lstm.layers), 1, lstm.hidden_size), lstm.dtype)
    return zeros, zeros


def _joined(arrays: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
    """Concatenate arrays; one alone needs no copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


def _run(
    lstm: PackedLSTM, inputs: Sequence[np.ndarray], states: Sequence[State]
) -> list[tuple[np.ndarray, State]]:
    """Run an LSTM on several inputs at once; return the outputs and the state of each."""
    rows = [b for b, frames in enumerate(inputs) if len(frames)]
    found = [(np.empty((0, lstm.hidden_size), lstm.dtype), state) for state in states]
    if not rows:
        return found
    lengths = np.array([len(inputs[b]) for b in rows])
    first = inputs[rows[0]]
    x = np.zeros((len(rows), lengths.max(), *first.shape[1:]), first.dtype)
    for i, b in enumerate(rows):
        x[i, : lengths[i]] = inputs[b]
    before = (_joined([states[b][0] for b in rows], 1), _joined([states[b][1] for b in rows], 1))
    outputs, (h, s) = lstm(x, lengths, before)
    for i, b in enumerate(rows):
        after = (h[:, i : i + 1].copy(), s[:, i : i + 1].copy())
        found[b] = outputs[i, : lengths[i]], after
    return found
