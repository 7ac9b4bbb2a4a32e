"""The peephole LSTM on the CPU, compiled by Numba: Eqs. 4-8 and backpropagation through time.

Each share of the work takes some sequences of one direction from their first frame to their last,
so that no share waits for another. A share's sequences are sorted by length, longest first, so that
those that have not ended are its first rows. The product with the hidden weights is the only large
one of a step; it reads them packed. All other products take a block of steps at a time, while their
operands are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.simd.functions import sigmoid, tanh
from transduce.kernels.simd.int8 import int8_rows
from transduce.kernels.simd.options import VECTOR_BYTES, compiled
from transduce.kernels.simd.products import DEPTH, GROUP, multiply, multiply_packed, noinline, pack
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lstm.reference import cast, fill_defaults

LANES = VECTOR_BYTES // 4  # float32 numbers of a vector; every gate is padded to whole vectors
# Rows, of several sequences and steps, of one product. More rows use each weight more often while
# it is in registers; fewer leave the block's operands in the second-level cache.
BLOCK = 128
NO_IDS = np.empty((0, 0), np.int64)


class Shares(NamedTuple):
    """The sequences and the direction of each share."""

    directions: np.ndarray  # [shares]
    rows: np.ndarray  # the sequences of all shares, one share after the other
    starts: np.ndarray  # [shares + 1], the index of each share's first sequence in `rows`


class Sequences(NamedTuple):
    """The input: either `frames` or `ids` is empty."""

    lengths: np.ndarray  # [B]
    frames: np.ndarray  # [B, N, I]
    ids: np.ndarray  # [B, N]


class LayerWeights(NamedTuple):
    """The weights, or the float64 or float32 sums of their gradients in each share."""

    inputs: np.ndarray  # [D, 4 H, I]; gradients [shares, I, 4 H]
    hidden: np.ndarray  # [D, 4 H, H]
    peepholes: np.ndarray  # [D, 3, H]
    biases: np.ndarray  # [D, 4 H]


class PackedLayer(NamedTuple):
    """The weights of one direction in the kernel's layout.

    Each gate's columns are padded to `wide`. Packed weights are int8, with a scale for each column,
    where that is exact.
    """

    inputs: np.ndarray  # [I, 4 wide], for ids; empty where the input is never ids
    panels: np.ndarray  # [I x 4 wide], the same, packed DEPTH rows at a time, for frames
    panel_scales: np.ndarray | None  # [4 wide]
    hidden: np.ndarray  # [H x 4 wide], packed
    hidden_scales: np.ndarray | None  # [4 wide]
    biases: np.ndarray  # [4 wide]
    peepholes: np.ndarray  # [3, H]


class State(NamedTuple):
    """h and s, or their gradients, before the first frame or after the last."""

    h: np.ndarray  # [D, B, H]
    s: np.ndarray  # [D, B, H]


class Kept(NamedTuple):
    """The values of the forward pass that the backward pass needs; N is 0 without gradients."""

    gates: np.ndarray  # [B, N, D, 4 H], in the order of Eqs. 4-7
    states: np.ndarray  # [B, N, D, H]


class Block(NamedTuple):
    """Rows of the backward pass whose products are computed together."""

    items: np.ndarray  # [BLOCK], the row's sequence
    times: np.ndarray  # [BLOCK], its frame
    grad_sums: np.ndarray  # [BLOCK, 4 H + LANES], the gradients of the four sums
    hidden: np.ndarray  # [BLOCK, H], h(n-1)


def forward(
    x: Tensor,  # [B, N, I], or ids [B, N]
    lengths: Tensor | None,  # [B]; None: all N
    input_weights: Tensor,  # [D, 4 H, I]
    hidden_weights: Tensor,  # [D, 4 H, H]
    peepholes: Tensor,  # [D, 3, H]
    biases: Tensor,  # [D, 4 H]
    h: Tensor | None,  # [D, B, H], the state before the first frame; None: zero
    s: Tensor | None,  # [D, B, H]
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one layer of D directions in float32 or float64.

    Return its outputs [B, N, D H], the last h and s [D, B, H], and for `backward` the gates
    [B, N, D, 4 H] and states [B, N, D, H], which have no frames unless `with_gradients`.
    """
    lengths, h, s = fill_defaults(x, lengths, peepholes, h, s)
    dtype = torch.promote_types(biases.dtype, torch.float32)
    (B, N), (D, _, H) = x.shape[:2], peepholes.shape
    kept = N if with_gradients else 0
    gates = torch.empty(B, kept, D, 4 * H, dtype=dtype)
    states = torch.empty(B, kept, D, H, dtype=dtype)
    output = torch.empty(B, N, D * H, dtype=dtype)
    last_h, last_s = torch.empty(D, B, H, dtype=dtype), torch.empty(D, B, H, dtype=dtype)
    shares = _shares(lengths.numpy().tobytes(), D, num_threads())
    _pack_and_forward_shares(
        team(len(shares.directions)),
        (
            shares,
            _sequences(x, lengths, dtype),
            LayerWeights(*_arrays(dtype, input_weights, hidden_weights, peepholes, biases)),
            State(*_arrays(dtype, h, s)),
            Kept(gates.numpy(), states.numpy()),
            output.numpy(),
            State(last_h.numpy(), last_s.numpy()),
        ),
    )
    return output, last_h, last_s, gates, states


class PackedLSTM:
    """The layers of a forward LSTM, packed once for many short calls without gradients.

    A call's results are bit for bit those of `forward`, and those of one sequence do not depend on
    the others. It runs in the calling thread alone: threads would wait for each other in every
    layer for longer than they compute, above all on a busy machine.
    """

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        self.layers: list[PackedLayer] = []
        for weights in layers:
            dtype = torch.promote_types(weights[3].dtype, torch.float32)
            inputs, hidden, peepholes, biases = (x[0] for x in _arrays(dtype, *weights))
            columns = gate_columns(inputs)
            packed = PackedLayer(
                columns[:0] if self.layers else columns,
                *_packed(inputs, DEPTH),
                *_packed(hidden, hidden.shape[1]),
                gate_columns(biases[:, None])[0],
                peepholes.copy(),
            )
            self.layers.append(packed)
        self.hidden_size, self.dtype = peepholes.shape[1], peepholes.dtype

    def __call__(
        self, x: np.ndarray, lengths: np.ndarray, state: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return the outputs [B, N, H] of x [B, N, I], or ids [B, N], and the next state.

        h and s of the state are [num_layers, B, H].
        """
        (B, N), number = x.shape[:2], self.dtype
        last_h, last_s = np.empty_like(state[0]), np.empty_like(state[1])
        shares, alone = _shares(lengths.tobytes(), 1, 1), team(1)
        none = np.empty((B, 0, 1, 0), number)
        sequences = Sequences(lengths, none[0], x)
        if x.ndim == 3:
            sequences = Sequences(lengths, x.astype(number, copy=False), NO_IDS)
        for i, layer in enumerate(self.layers):
            output = np.empty((B, N, self.hidden_size), number)
            before = State(state[0][i : i + 1], state[1][i : i + 1])
            after = State(last_h[i : i + 1], last_s[i : i + 1])
            _forward_shares(
                alone, (shares, sequences, layer, before, Kept(none, none), output, after)
            )
            sequences = Sequences(lengths, output, NO_IDS)
        return output, (last_h, last_s)


def gate_columns(rows: np.ndarray) -> np.ndarray:
    """Return the rows [4 H, N] of four gates as columns [N, 4 wide], padded with zeros."""
    H = len(rows) // 4
    columns = np.zeros((rows.shape[1], 4, -(-H // LANES) * LANES), rows.dtype)
    columns[:, :, :H] = rows.reshape(4, H, -1).transpose(2, 0, 1)
    return columns.reshape(len(columns), -1)


def _packed(rows: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Pack rows [4 H, N], `depth` columns at a time: in int8, with scales, where that is exact."""
    found = int8_rows(rows)
    exact = np.ascontiguousarray(rows if found is None else found[0])
    packed = np.empty(gate_columns(exact).size, exact.dtype)
    _pack_rows(exact, depth, packed)
    return packed, None if found is None else gate_columns(found[1][:, None])[0]


def backward(
    grad_output: Tensor | None,  # [B, N, D H]; None: zero
    grad_last_h: Tensor | None,  # [D, B, H]
    grad_last_s: Tensor | None,  # [D, B, H]
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    output: Tensor,  # as `forward` returned them
    gates: Tensor,
    states: Tensor,
    with_x: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (None unless `with_x`), the four weights, and the first h and s."""
    lengths, h, s = fill_defaults(x, lengths, peepholes, h, s)
    dtype, (B, N, D, columns) = gates.dtype, gates.shape
    H, num_inputs = columns // 4, input_weights.shape[2]
    upstream = [
        torch.zeros_like(like) if grad is None else grad
        for grad, like in ((grad_output, output), (grad_last_h, h), (grad_last_s, s))
    ]
    grad_output, *grad_last = upstream
    # Each direction writes its own part of the gradient of x; `backward` adds them at the end.
    grad_x = torch.empty(D, B, N if with_x else 0, num_inputs, dtype=dtype)
    first_h, first_s = torch.empty(D, B, H, dtype=dtype), torch.empty(D, B, H, dtype=dtype)
    shares = _shares(lengths.numpy().tobytes(), D, num_threads())
    number, num_shares = gates.numpy().dtype, len(shares.directions)
    # The sums of the peepholes and biases have many terms and are no products: float64.
    sums = LayerWeights(
        np.zeros((num_shares, num_inputs, 4 * H), number),
        np.zeros((num_shares, 4 * H, H), number),
        np.zeros((num_shares, 3, H), np.float64),
        np.zeros((num_shares, 4 * H), np.float64),
    )
    _backward_shares(
        team(num_shares),
        (
            shares,
            _sequences(x, lengths, dtype),
            LayerWeights(*_arrays(dtype, input_weights, hidden_weights, peepholes, biases)),
            State(*_arrays(dtype, h, s)),
            Kept(gates.numpy(), states.numpy()),
            *_arrays(dtype, output, grad_output),
            State(*_arrays(dtype, *grad_last)),
            sums,
            grad_x.numpy(),
            State(first_h.numpy(), first_s.numpy()),
        ),
    )
    # The shares of a direction are neighbours.
    inputs, *rest = (torch.from_numpy(part.reshape(D, -1, *part.shape[1:]).sum(1)) for part in sums)
    return (
        grad_x.sum(0) if with_x else None,
        inputs.mT.contiguous(), rest[0], rest[1], rest[2], first_h, first_s,
    )  # fmt: skip


def _arrays(dtype: torch.dtype, *tensors: Tensor) -> list[np.ndarray]:
    """Return the tensors as contiguous arrays of one type."""
    return [cast(tensor.detach(), dtype).contiguous().numpy() for tensor in tensors]


def _sequences(x: Tensor, lengths: Tensor, dtype: torch.dtype) -> Sequences:
    frames, ids = x, x.new_empty(0, 0)
    if x.ndim == 2:
        frames, ids = x.new_empty(0, 0, 0), x
    return Sequences(lengths.numpy(), *_arrays(dtype, frames), *_arrays(torch.int64, ids))


@lru_cache(maxsize=64)  # the backward pass, and batches of the same lengths, find it there
def _shares(lengths: bytes, num_directions: int, num_threads: int) -> Shares:
    """Cut each direction's sequences, longest first, into as many shares as it has threads.

    The shares are the same in every call, so that the sums over them are too.
    """
    rows, starts = shares_of(np.frombuffer(lengths, np.int64), num_threads // num_directions)
    directions = np.repeat(np.arange(num_directions), len(starts) - 1)
    later = [starts[1:] + d * len(rows) for d in range(num_directions)]
    return Shares(directions, np.tile(rows, num_directions), np.concatenate([[0], *later]))


@compiled
def _frame(d, n, length):
    """Return the frame that step n reads: the second direction begins at the last frame."""
    return n if d == 0 else length - 1 - n


@compiled
def _project(
    d, steps, rows, sequences, input_weights, panels, panel_scales, biases, vectors, projected
):  # fmt: skip
    """Compute the inputs' part of the four sums, biases included, for all rows of some steps.

    `input_weights` is [I, columns], of one direction, for ids; `panels` are the same, packed, for
    frames. `projected` becomes [steps x rows, columns]. Rows whose sequence has ended get the
    biases alone.
    """
    lengths, frames, ids = sequences.lengths, sequences.frames, sequences.ids
    first, last = steps
    size = (last - first) * rows.size
    for k in range(size):
        projected[k] = biases
        n, b = first + k // rows.size, rows[k % rows.size]
        if n < lengths[b]:
            t = _frame(d, n, lengths[b])
            if ids.size == 0:
                vectors[k] = frames[b, t]
            elif ids[b, t] > 0:
                row, column = projected[k], input_weights[ids[b, t] - 1]
                for j in range(row.size):
                    row[j] += column[j]
        elif ids.size == 0:
            vectors[k] = 0
    if ids.size == 0:
        columns = biases.size
        for k in range(0, vectors.shape[1], DEPTH):
            part = vectors[:size, k : k + DEPTH]
            panel = panels[k * columns : (k + part.shape[1]) * columns]
            multiply_packed(part, size, panel, columns, projected[:size], True, panel_scales)


@compiled
def _gate(sums, peephole, state, gate):
    """Set `gate` to the sigmoid of its sums plus peepholes (Eqs. 4, 5 and 7)."""
    for j in range(gate.size):
        gate[j] = sigmoid(sums[j] + peephole[j] * state[j])


@compiled
def step(H, wide, sums, peepholes, h, s, gates):
    """Replace h(n-1) and s(n-1) of one sequence by h(n) and s(n); write its gates [4 H].

    `sums` [4 wide] holds the weights' terms of the four sums, biases included.
    """
    noinline()
    input_gate, forget_gate = gates[:H], gates[H : 2 * H]
    squashed, output_gate = gates[2 * H : 3 * H], gates[3 * H :]
    _gate(sums[:wide], peepholes[0], s, input_gate)  # Eq. 4
    _gate(sums[wide : 2 * wide], peepholes[1], s, forget_gate)  # Eq. 5
    to_state = sums[2 * wide : 3 * wide]
    for j in range(H):
        squashed[j] = tanh(to_state[j])
    for j in range(H):
        s[j] = forget_gate[j] * s[j] + input_gate[j] * squashed[j]  # Eq. 6
    _gate(sums[3 * wide :], peepholes[2], s, output_gate)  # Eq. 7
    for j in range(H):
        h[j] = output_gate[j] * tanh(s[j])  # Eq. 8


@compiled
def _pack_rows(rows, depth, packed):
    """Pack the rows [4 H, N] of four gates as `pack` does their columns, `depth` of N at a time.

    The gates are padded as in `gate_columns`. It goes through squares of LANES x LANES numbers,
    which stay in the cache while they are transposed.
    """
    H, N = rows.shape[0] // 4, rows.shape[1]
    wide = (H + LANES - 1) // LANES * LANES
    across = GROUP * VECTOR_BYTES // max(rows.itemsize, 4)
    if wide > H:
        packed[:] = 0
    for first in range(0, N, depth):
        size = min(depth, N - first)
        for gate in range(4):
            for low in range(0, H, LANES):
                column = gate * wide + low
                group = column // across * across  # the first column of its group of vectors
                width = min(across, 4 * wide - group)
                at = first * 4 * wide + group * size + column - group
                for start in range(0, size, LANES):
                    for j in range(min(LANES, H - low)):
                        row = rows[gate * H + low + j]
                        for k in range(start, min(start + LANES, size)):
                            packed[at + k * width + j] = row[first + k]


@compiled
def _pack_direction(d, weights, of_ids):
    """Return the weights of a direction as a `PackedLayer`, for ids or for frames."""
    H, num_inputs = weights.peepholes.shape[2], weights.inputs.shape[2]
    wide, dtype = (H + LANES - 1) // LANES * LANES, weights.biases.dtype
    inputs = np.zeros((num_inputs if of_ids else 0, 4 * wide), dtype)
    panels = np.empty(0 if of_ids else num_inputs * 4 * wide, dtype)
    hidden, biases = np.empty(H * 4 * wide, dtype), np.zeros(4 * wide, dtype)
    for gate in range(4):
        here, there = slice(gate * H, (gate + 1) * H), slice(gate * wide, gate * wide + H)
        if of_ids:
            inputs[:, there] = weights.inputs[d, here].T
        biases[there] = weights.biases[d, here]
    if not of_ids:
        _pack_rows(weights.inputs[d], DEPTH, panels)
    _pack_rows(weights.hidden[d], H, hidden)
    return PackedLayer(inputs, panels, None, hidden, None, biases, weights.peepholes[d])


@compiled
def _forward(share, shares, sequences, layer, first, kept, output, last):
    """Compute Eqs. 4-8 for one share; the second direction starts at each sequence's last frame.

    Gates and states are kept if `kept` has frames.
    """
    d, rows = shares.directions[share], shares.rows[shares.starts[share] : shares.starts[share + 1]]
    lengths, H = sequences.lengths, layer.peepholes.shape[1]
    wide, dtype = layer.biases.size // 4, output.dtype
    num_inputs = max(layer.inputs.shape[0], layer.panels.size // layer.biases.size)
    h, s = np.empty((rows.size, H), dtype), np.empty((rows.size, H), dtype)
    num_steps = max(1, min(BLOCK // rows.size, lengths[rows[0]]))
    sums = np.empty((num_steps * rows.size, 4 * wide), dtype)
    vectors = np.empty((num_steps * rows.size, num_inputs), dtype)
    for r in range(rows.size):
        h[r] = first.h[d, rows[r]]
        s[r] = first.s[d, rows[r]]
    keep, gates = kept.gates.shape[1] > 0, np.empty(4 * H, dtype)
    num_rows = rows.size
    for n in range(lengths[rows[0]]):
        while lengths[rows[num_rows - 1]] <= n:
            num_rows -= 1
        if n % num_steps == 0:
            steps = (n, min(n + num_steps, lengths[rows[0]]))
            _project(
                d, steps, rows, sequences, layer.inputs, layer.panels, layer.panel_scales,
                layer.biases, vectors, sums,
            )  # fmt: skip
        start = n % num_steps * rows.size
        multiply_packed(
            h, num_rows, layer.hidden, 4 * wide, sums[start:], True, layer.hidden_scales
        )
        for r in range(num_rows):
            b = rows[r]
            t = _frame(d, n, lengths[b])
            if keep:
                gates = kept.gates[b, t, d]
            step(H, wide, sums[start + r], layer.peepholes, h[r], s[r], gates)
            if keep:
                kept.states[b, t, d] = s[r]
            output[b, t, d * H : (d + 1) * H] = h[r]
    for r in range(rows.size):
        b = rows[r]
        last.h[d, b] = h[r]
        last.s[d, b] = s[r]
        output[b, lengths[b] :, d * H : (d + 1) * H] = 0
        if keep:
            kept.gates[b, lengths[b] :, d] = 0
            kept.states[b, lengths[b] :, d] = 0


_share_forward = sharing(_forward)


@compiled
def _forward_shares(team, arguments):
    _share_forward(team, arguments)


@compiled
def _pack_and_forward(share, shares, sequences, weights, first, kept, output, last):
    """Pack the weights of a share's direction, and compute Eqs. 4-8."""
    layer = _pack_direction(shares.directions[share], weights, sequences.ids.size > 0)
    _forward(share, shares, sequences, layer, first, kept, output, last)


_share_pack_and_forward = sharing(_pack_and_forward)


@compiled
def _pack_and_forward_shares(team, arguments):
    _share_pack_and_forward(team, arguments)


@compiled
def _step_back(
    H, gates, before, state, peepholes, above, grad_h, grad_s, grad_sums, sum_peepholes,
    tanh_state, total,
):  # fmt: skip
    """Turn ∂L/∂h(n) and ∂L/∂s(n) into the gradients of the four sums and, in place, of s(n-1).

    `before` is s(n-1); `above` is the gradient of the output, `grad_h` that from step n+1;
    `tanh_state` and `total` [H] are scratch space.
    """
    noinline()
    one = gates.dtype.type(1)
    input_gate, forget_gate = gates[:H], gates[H : 2 * H]
    squashed, output_gate = gates[2 * H : 3 * H], gates[3 * H :]
    grad_input, grad_forget = grad_sums[:H], grad_sums[H : 2 * H]
    grad_squashed, grad_out = grad_sums[2 * H : 3 * H], grad_sums[3 * H :]
    to_input_gate, to_forget_gate, to_output_gate = peepholes[0], peepholes[1], peepholes[2]
    for j in range(H):
        total[j] = above[j] + grad_h[j]
    for j in range(H):
        tanh_state[j] = tanh(state[j])
    for j in range(H):
        grad_out[j] = total[j] * tanh_state[j] * (output_gate[j] * (one - output_gate[j]))
    for j in range(H):
        squash = one - tanh_state[j] * tanh_state[j]
        grad_s[j] += total[j] * output_gate[j] * squash + grad_out[j] * to_output_gate[j]
    for j in range(H):
        grad_squashed[j] = grad_s[j] * input_gate[j] * (one - squashed[j] * squashed[j])
        grad_input[j] = grad_s[j] * squashed[j] * (input_gate[j] * (one - input_gate[j]))
    for j in range(H):
        grad_forget[j] = grad_s[j] * before[j] * (forget_gate[j] * (one - forget_gate[j]))
    for j in range(H):
        through_gates = grad_input[j] * to_input_gate[j] + grad_forget[j] * to_forget_gate[j]
        grad_s[j] = grad_s[j] * forget_gate[j] + through_gates
    _add_products(sum_peepholes[0], grad_input, before)
    _add_products(sum_peepholes[1], grad_forget, before)
    _add_products(sum_peepholes[2], grad_out, state)


@compiled
def _add_products(sums, left, right):
    for j in range(sums.size):
        sums[j] += left[j] * right[j]


@compiled
def _backward(
    share, shares, sequences, weights, first, kept, output, grad_output, grad_last, all_sums,
    grad_x, grad_first,
):  # fmt: skip
    """Backpropagate through time for one share (docs/derivations.md).

    `all_sums` gets the share's part of the weights' gradients, those of the inputs transposed.
    """
    d, rows = shares.directions[share], shares.rows[shares.starts[share] : shares.starts[share + 1]]
    sums = LayerWeights(
        all_sums.inputs[share], all_sums.hidden[share],
        all_sums.peepholes[share], all_sums.biases[share],
    )  # fmt: skip
    lengths, H = sequences.lengths, weights.peepholes.shape[2]
    wide, dtype = (H + LANES - 1) // LANES * LANES, output.dtype
    packed = np.empty(wide * 4 * H, dtype)
    pack(weights.hidden[d], wide, packed)
    grad_h, grad_s = np.empty((rows.size, wide), dtype), np.empty((rows.size, H), dtype)
    tanh_state, total = np.empty(H, dtype), np.empty(H, dtype)
    # Rows of `grad_sums` are padded, because rows a power of two apart compete for cache lines.
    size = max(BLOCK, rows.size)
    block = Block(
        np.empty(size, np.int64), np.empty(size, np.int64),
        np.empty((size, 4 * H + LANES), dtype), np.empty((size, H), dtype),
    )  # fmt: skip
    block_peepholes = np.zeros((3, H), dtype)
    for r in range(rows.size):
        grad_h[r, :H] = grad_last.h[d, rows[r]]
        grad_s[r] = grad_last.s[d, rows[r]]
        if grad_x.size > 0:
            grad_x[d, rows[r], lengths[rows[r]] :] = 0
    num_rows, filled = 0, 0
    for n in range(lengths[rows[0]] - 1, -1, -1):
        while num_rows < rows.size and lengths[rows[num_rows]] > n:
            num_rows += 1
        if filled + num_rows > size:
            _add_block(d, filled, block, sequences, weights.inputs, sums, grad_x)
            _add_and_clear(sums.peepholes, block_peepholes)
            filled = 0
        for r in range(num_rows):
            b, k = rows[r], filled + r
            t, t_before = _frame(d, n, lengths[b]), _frame(d, n - 1, lengths[b])
            block.items[k], block.times[k] = b, t
            above = grad_output[b, t, d * H : (d + 1) * H]
            s_before = first.s[d, b] if n == 0 else kept.states[b, t_before, d]
            h_before = first.h[d, b] if n == 0 else output[b, t_before, d * H : (d + 1) * H]
            block.hidden[k] = h_before
            _step_back(
                H, kept.gates[b, t, d], s_before, kept.states[b, t, d], weights.peepholes[d], above,
                grad_h[r], grad_s[r], block.grad_sums[k], block_peepholes, tanh_state, total,
            )  # fmt: skip
        multiply_packed(block.grad_sums[filled:, : 4 * H], num_rows, packed, wide, grad_h, False)
        filled += num_rows
    _add_block(d, filled, block, sequences, weights.inputs, sums, grad_x)
    _add_and_clear(sums.peepholes, block_peepholes)
    for r in range(rows.size):
        grad_first.h[d, rows[r]] = grad_h[r, :H]
        grad_first.s[d, rows[r]] = grad_s[r]


@compiled
def _add_and_clear(sums, parts):
    sums += parts
    parts[:] = 0


@compiled
def _add_block(d, filled, block, sequences, input_weights, sums, grad_x):
    """Add a block's part of the weights' gradients; write the gradients of its inputs."""
    frames, ids, columns = sequences.frames, sequences.ids, sums.biases.size
    items, times, grad_sums = block.items, block.times, block.grad_sums
    grads = grad_sums[:filled, :columns]
    multiply(grads.T, block.hidden[:filled], sums.hidden, True)
    biases = np.zeros(columns, grad_sums.dtype)
    for k in range(filled):
        row = grad_sums[k]
        for j in range(columns):
            biases[j] += row[j]
    sum_biases = sums.biases
    sum_biases += biases
    if ids.size > 0:
        for k in range(filled):
            label = ids[items[k], times[k]]
            if label > 0:
                row, column = grad_sums[k], sums.inputs[label - 1]
                for j in range(columns):
                    column[j] += row[j]
        return
    vectors = np.empty((filled, frames.shape[2]), grad_sums.dtype)
    for k in range(filled):
        vectors[k] = frames[items[k], times[k]]
    multiply(vectors.T, grads, sums.inputs, True)
    if grad_x.size > 0:
        multiply(grads, input_weights[d], vectors, False)
        for k in range(filled):
            grad_x[d, items[k], times[k]] = vectors[k]


_share_backward = sharing(_backward)


@compiled
def _backward_shares(team, arguments):
    _share_backward(team, arguments)
