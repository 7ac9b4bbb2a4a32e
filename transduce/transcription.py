"""The transcription network in steps: the vectors f of an input that comes in pieces (Eqs. 9, 11).

However an input is cut into pieces, and whatever other inputs are computed beside it, its vectors
are bit for bit those of `TranscriptionNetwork.forward_one_by_one` on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transduce.lstm.layer import PeepholeLSTM, State
from transduce.networks import TranscriptionNetwork, average_frames, stack_frames

if TYPE_CHECKING:  # what needs Numba is imported when it is used
    from transduce.lstm.cpu import PackedLSTM


@dataclass
class TranscriptionState:
    """The state of a transcription network between two pieces of an input."""

    waiting: Tensor  # [n, D], or ids [n]: frames whose lookahead is still to come
    unpooled: Tensor  # [m, H], m < pooling: outputs of the first layer that are not averaged yet
    lower: State  # h and s of the layers before pooling, [layers, 1, H]
    upper: State | None  # and of those after it


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
        shape = (0,) if of_ids else (0, self.input_size)
        waiting = torch.empty(shape, dtype=torch.int64 if of_ids else torch.float32)
        return TranscriptionState(
            waiting,
            torch.empty(0, self.lower.hidden_size, dtype=self.lower.dtype),
            _zeros(self.lower),
            None if self.upper is None else _zeros(self.upper),
        )

    @torch.no_grad()
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
            self._stacked(state, new, last)
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
        f = self.output(torch.cat(pooled))
        return list(torch.split(f, [len(outputs) for outputs in pooled]))

    def _stacked(self, state: TranscriptionState, new: Tensor, is_last: bool) -> Tensor:
        """Return the input of the first layer at the frames whose lookahead is there."""
        if self.lookahead == 0:
            return new
        frames = torch.cat([state.waiting, new])
        ready = len(frames) if is_last else max(0, len(frames) - self.lookahead)
        state.waiting = frames[ready:].clone()
        if ready == 0:
            return frames.new_empty(0, (1 + self.lookahead) * self.input_size)
        return stack_frames(frames[None], torch.tensor([len(frames)]), self.lookahead)[0, :ready]

    def _pooled(self, state: TranscriptionState, outputs: Tensor, is_last: bool) -> Tensor:
        """Return the averages of every `pooling` outputs; at the end also that of the rest."""
        if self.pooling == 1:
            return outputs
        outputs = torch.cat([state.unpooled, outputs])
        whole = len(outputs) if is_last else len(outputs) // self.pooling * self.pooling
        state.unpooled = outputs[whole:].clone()
        if whole == 0:
            return outputs[:0]
        return average_frames(outputs[None, :whole], torch.tensor([whole]), self.pooling)[0][0]


def _packed(lstm: PeepholeLSTM) -> PackedLSTM:
    from transduce.lstm.cpu import PackedLSTM

    return PackedLSTM(layer.weights() for layer in lstm.layers)  # type: ignore[operator]


def _zeros(lstm: PackedLSTM) -> State:
    zeros = torch.zeros(len(lstm.layers), 1, lstm.hidden_size, dtype=lstm.dtype)
    return zeros, zeros


def _run(
    lstm: PackedLSTM, inputs: Sequence[Tensor], states: Sequence[State]
) -> list[tuple[Tensor, State]]:
    """Run an LSTM on several inputs at once; return the outputs and the state of each."""
    rows = [b for b, frames in enumerate(inputs) if len(frames)]
    found = [(torch.empty(0, lstm.hidden_size, dtype=lstm.dtype), state) for state in states]
    if not rows:
        return found
    x = torch.nn.utils.rnn.pad_sequence([inputs[b] for b in rows], batch_first=True)
    lengths = torch.tensor([len(inputs[b]) for b in rows])
    before = (
        torch.cat([states[b][0] for b in rows], 1),
        torch.cat([states[b][1] for b in rows], 1),
    )
    outputs, (h, s) = lstm(x, lengths, before)
    for i, b in enumerate(rows):
        after = (h[:, i : i + 1].clone(), s[:, i : i + 1].clone())
        found[b] = outputs[i, : len(inputs[b])], after
    return found
