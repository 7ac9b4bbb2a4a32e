"""The peephole LSTM on the CPU, compiled by Numba: Eqs. 4-8 forwards, and back through time.

A share of the work is some sequences of one direction from their first frame to their last, so
nothing waits inside. Sequences stand sorted by length, longest first: those that have not ended are
the first rows. The product with the hidden weights, a step's only large one, reads them packed. All
other products are taken for a block of steps at a time, while what they need is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.simd.functions import sigmoid, tanh
from transduce.kernels.simd.options import VECTOR_BYTES, compiled
from transduce.kernels.simd.products import apart, multiply, multiply_packed, pack
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lstm.reference import fill_defaults

LANES = VECTOR_BYTES // 4
BLOCK = 128  # rows, of several sequences and steps, whose products are taken at once


def layer(
    x: Tensor,  # [B, N, I], or ids [B, N]
    lengths: Tensor | None,  # [B]; or all N
    input_weights: Tensor,  # [D, 4 H, I]
    hidden_weights: Tensor,  # [D, 4 H, H]
    peepholes: Tensor,  # [D, 3, H]
    biases: Tensor,  # [D, 4 H]
    h: Tensor | None,  # [D, B, H], before the first frame; or zero
    s: Tensor | None,  # [D, B, H]
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of D directions: its outputs [B, N, D H] and the last h and s, each [D, B, H]."""
    lengths, h, s = fill_defaults(x, lengths, peepholes, h, s)
    arguments = (x, lengths, input_weights, hidden_weights, peepholes, biases, h, s)
    if torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments):
        result: tuple[Tensor, Tensor, Tensor] = _Layer.apply(*arguments)
        return result
    output, last_h, last_s = _through_time(*arguments, with_gradients=False)[0]
    return output, last_h, last_s


def _through_time(
    x: Tensor, lengths: Tensor, *weights: Tensor, with_gradients: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs and the last h and s, and what the way back needs."""
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    tensors = [t.detach().to(dtype).contiguous() for t in weights]
    peepholes, h, s = tensors[2], tensors[4], tensors[5]
    (B, N), (D, _, H) = x.shape[:2], peepholes.shape
    frames, ids = _frames_and_ids(x.detach(), dtype)
    kept = N if with_gradients else 0
    gates = torch.empty(B, kept, D, 4 * H, dtype=dtype)  # the four of Eqs. 4-7, in their order
    states = torch.empty(B, kept, D, H, dtype=dtype)
    output = torch.empty(B, N, D * H, dtype=dtype)
    last_h, last_s = torch.empty_like(h), torch.empty_like(s)
    shares = _shares(lengths.numpy(), D)
    arguments = [lengths, frames, ids, *tensors, gates, states, output, last_h, last_s]
    arrays = [argument.numpy() for argument in arguments]
    _forward_shares(team(len(shares[0])), (*shares, *arrays))
    results = tuple(t.to(weights[0].dtype) for t in (output, last_h, last_s))
    return results, (x, lengths, *tensors, gates, states, output)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> tuple[Tensor, ...]:
        results, saved = _through_time(*arguments, with_gradients=True)
        ctx.save_for_backward(*saved)
        ctx.dtype = results[0].dtype
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, lengths, *saved = ctx.saved_tensors
        input_weights, _, _, _, h, s, gates, *_ = saved
        dtype, (D, B, H) = gates.dtype, h.shape
        num_inputs = input_weights.shape[2]
        frames, ids = _frames_and_ids(x.detach(), dtype)
        # Each direction has its own part of the inputs' gradient; they are added at the end.
        with_x = ctx.needs_input_grad[0]
        grad_x = torch.empty(D, B, gates.shape[1] if with_x else 0, num_inputs, dtype=dtype)
        first_h, first_s = torch.empty_like(h), torch.empty_like(s)
        shares = _shares(lengths.numpy(), D)
        # The sums over all steps; those that are not products are float64, being of many terms.
        sums = [
            np.zeros((len(shares[0]), *shape), kind)
            for shape, kind in (
                ((num_inputs, 4 * H), gates.numpy().dtype),
                ((4 * H, H), gates.numpy().dtype),
                ((3, H), np.float64),
                ((4 * H,), np.float64),
            )
        ]
        incoming = [g.to(dtype).contiguous() for g in upstream]
        arguments = [lengths, frames, ids, *saved, *incoming, grad_x, first_h, first_s]
        arrays = [argument.detach().numpy() for argument in arguments]
        _backward_shares(team(len(shares[0])), (*shares, *sums, *arrays))
        # The shares of a direction stand side by side.
        grad_input_weights, *rest = (
            torch.from_numpy(part.reshape(D, -1, *part.shape[1:]).sum(1)) for part in sums
        )
        results = [grad_input_weights.transpose(1, 2), *rest, first_h, first_s]
        return (
            grad_x.sum(0).to(x.dtype) if with_x else None,
            None,
            *(t.to(ctx.dtype) for t in results),
        )


def _frames_and_ids(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as it is used: one of the two is empty."""
    if x.ndim == 2:
        return torch.empty(0, 0, 0, dtype=dtype), x.long().contiguous()
    return x.to(dtype).contiguous(), torch.empty(0, 0, dtype=torch.int64)


def _shares(lengths: np.ndarray, num_directions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shares' directions, their sequences one after the other, and where each share starts.

    Each direction's sequences, longest first, are cut into as many shares as there are threads for
    it; the same every time, so that sums over shares are too.
    """
    rows, starts = shares_of(lengths, num_threads() // num_directions)
    directions = np.repeat(np.arange(num_directions), len(starts) - 1)
    later = [starts[1:] + d * len(rows) for d in range(num_directions)]
    return directions, np.tile(rows, num_directions), np.concatenate([[0], *later])


@compiled
def _frame(d, n, length):
    """The frame that step n reads: the second direction begins at the sequence's last."""
    return n if d == 0 else length - 1 - n


@compiled
def _project(d, steps, rows, lengths, frames, ids, input_weights, biases, vectors, projected):
    """The inputs' part of the four sums, with the biases, for all rows of some steps.

    input_weights is [I, columns], one direction's; projected becomes [steps x rows, columns]. Rows
    whose sequence has ended get the biases alone.
    """
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
        multiply(vectors[:size], input_weights, projected[:size], True)


@compiled
def _gate(sums, peephole, state, gate):
    """σ of a gate's terms (Eqs. 4, 5 and 7)."""
    for j in range(gate.size):
        gate[j] = sigmoid(sums[j] + peephole[j] * state[j])


@compiled
def step(H, wide, sums, peepholes, h, s, gates):
    """h(n) and s(n) of one sequence, in place of h(n-1) and s(n-1), and its gates [4 H].

    sums [4 wide] are the weights' terms of the four, with the biases.
    """
    apart()
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
def _forward(
    share, directions, all_rows, starts, lengths, frames, ids,
    all_input_weights, hidden_weights, peepholes, biases, first_h, first_s,
    gates, states, output, last_h, last_s,
):  # fmt: skip
    """Eqs. 4-8 for one share; the second direction runs from each sequence's last frame.

    Gates and states are kept for the way back if there is room for them.
    """
    d, rows = directions[share], all_rows[starts[share] : starts[share + 1]]
    H = peepholes.shape[2]
    wide = (H + LANES - 1) // LANES * LANES
    # Each gate's columns are padded to whole vectors.
    input_weights = np.zeros((all_input_weights.shape[2], 4 * wide), gates.dtype)
    packed = np.empty(4 * wide * H, gates.dtype)
    padded_biases = np.zeros(4 * wide, gates.dtype)
    for gate in range(4):
        here, there = slice(gate * H, (gate + 1) * H), slice(gate * wide, gate * wide + H)
        input_weights[:, there] = all_input_weights[d, here].T
        padded_biases[there] = biases[d, here]
        pack(hidden_weights[d, here].T, wide, packed[gate * wide * H : (gate + 1) * wide * H])
    h, s = np.empty((rows.size, H), gates.dtype), np.empty((rows.size, H), gates.dtype)
    num_steps = max(1, BLOCK // rows.size)
    sums = np.empty((num_steps * rows.size, 4 * wide), gates.dtype)
    vectors = np.empty((num_steps * rows.size, input_weights.shape[0]), gates.dtype)
    for r in range(rows.size):
        h[r] = first_h[d, rows[r]]
        s[r] = first_s[d, rows[r]]
    kept, gates_here = gates.shape[1] > 0, np.empty(4 * H, gates.dtype)
    num_rows = rows.size
    for n in range(lengths[rows[0]]):
        while lengths[rows[num_rows - 1]] <= n:
            num_rows -= 1
        if n % num_steps == 0:
            steps = (n, min(n + num_steps, lengths[rows[0]]))
            _project(
                d, steps, rows, lengths, frames, ids, input_weights, padded_biases, vectors, sums
            )
        first = n % num_steps * rows.size
        multiply_packed(h, num_rows, packed, 4 * wide, sums[first:], True)
        for r in range(num_rows):
            b = rows[r]
            t = _frame(d, n, lengths[b])
            if kept:
                gates_here = gates[b, t, d]
            step(H, wide, sums[first + r], peepholes[d], h[r], s[r], gates_here)
            if kept:
                states[b, t, d] = s[r]
            output[b, t, d * H : (d + 1) * H] = h[r]
    for r in range(rows.size):
        b = rows[r]
        last_h[d, b] = h[r]
        last_s[d, b] = s[r]
        output[b, lengths[b] :, d * H : (d + 1) * H] = 0


_share_forward = sharing(_forward)


@compiled
def _forward_shares(team, arguments):
    _share_forward(team, arguments)


@compiled
def _step_back(
    H, gates, before, state, peepholes, above, grad_h, grad_s, grad_sums, sum_peepholes,
    tanh_state, total,
):  # fmt: skip
    """From ∂L/∂h(n), ∂L/∂s(n) to those of the four sums and of s(n-1), in place of s(n)'s.

    `before` is s(n-1); `above` comes from the outputs, grad_h from the step after; the last two
    arguments are space to work in.
    """
    apart()
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
    share, directions, all_rows, starts, all_sum_input, all_sum_hidden, all_sum_peepholes,
    all_sum_biases, lengths, frames, ids,
    input_weights, hidden_weights, peepholes, biases, first_h, first_s, gates, states, output,
    grad_output, grad_last_h, grad_last_s, grad_x, grad_first_h, grad_first_s,
):  # fmt: skip
    """Back through time for one share. The derivation is in docs/derivations.md.

    The sums are the share's part of the weights' gradients; the input weights' is transposed.
    """
    d, rows = directions[share], all_rows[starts[share] : starts[share + 1]]
    sum_input, sum_hidden = all_sum_input[share], all_sum_hidden[share]
    sum_peepholes, sum_biases = all_sum_peepholes[share], all_sum_biases[share]
    H = peepholes.shape[2]
    wide = (H + LANES - 1) // LANES * LANES
    packed = np.empty(wide * 4 * H, gates.dtype)
    pack(hidden_weights[d], wide, packed)
    grad_h, grad_s = np.empty((rows.size, wide), gates.dtype), np.empty((rows.size, H), gates.dtype)
    tanh_state, total = np.empty(H, gates.dtype), np.empty(H, gates.dtype)
    # A block of rows: the gradients of their four sums, their h(n-1), and where they belong. The
    # rows are a little longer than they need be, because a power of two would share cache lines.
    size = max(BLOCK, rows.size)
    grad_sums = np.empty((size, 4 * H + LANES), gates.dtype)
    hidden = np.empty((size, H), gates.dtype)
    items, times = np.empty(size, np.int64), np.empty(size, np.int64)
    block_peepholes = np.zeros((3, H), gates.dtype)
    for r in range(rows.size):
        grad_h[r, :H] = grad_last_h[d, rows[r]]
        grad_s[r] = grad_last_s[d, rows[r]]
        if grad_x.size > 0:
            grad_x[d, rows[r], lengths[rows[r]] :] = 0
    num_rows, filled = 0, 0
    for n in range(lengths[rows[0]] - 1, -1, -1):
        while num_rows < rows.size and lengths[rows[num_rows]] > n:
            num_rows += 1
        if filled + num_rows > size:
            _add_block(
                d, filled, items, times, frames, ids, input_weights, grad_sums, hidden,
                sum_input, sum_hidden, sum_biases, grad_x,
            )  # fmt: skip
            sum_peepholes += block_peepholes
            block_peepholes[:] = 0
            filled = 0
        for r in range(num_rows):
            b, k = rows[r], filled + r
            t, t_before = _frame(d, n, lengths[b]), _frame(d, n - 1, lengths[b])
            items[k], times[k] = b, t
            above = grad_output[b, t, d * H : (d + 1) * H]
            s_before = first_s[d, b] if n == 0 else states[b, t_before, d]
            h_before = first_h[d, b] if n == 0 else output[b, t_before, d * H : (d + 1) * H]
            hidden[k] = h_before
            _step_back(
                H, gates[b, t, d], s_before, states[b, t, d], peepholes[d], above,
                grad_h[r], grad_s[r], grad_sums[k], block_peepholes, tanh_state, total,
            )  # fmt: skip
        multiply_packed(grad_sums[filled:, : 4 * H], num_rows, packed, wide, grad_h, False)
        filled += num_rows
    _add_block(
        d, filled, items, times, frames, ids, input_weights, grad_sums, hidden,
        sum_input, sum_hidden, sum_biases, grad_x,
    )  # fmt: skip
    sum_peepholes += block_peepholes
    for r in range(rows.size):
        grad_first_h[d, rows[r]] = grad_h[r, :H]
        grad_first_s[d, rows[r]] = grad_s[r]


@compiled
def _add_block(
    d, filled, items, times, frames, ids, input_weights, grad_sums, hidden,
    sum_input, sum_hidden, sum_biases, grad_x,
):  # fmt: skip
    """Add a block's part of the weights' gradients, and write that of its inputs."""
    columns = sum_biases.size
    grads = grad_sums[:filled, :columns]
    multiply(grads.T, hidden[:filled], sum_hidden, True)
    biases = np.zeros(columns, grad_sums.dtype)
    for k in range(filled):
        row = grad_sums[k]
        for j in range(columns):
            biases[j] += row[j]
    sum_biases += biases
    if ids.size > 0:
        for k in range(filled):
            label = ids[items[k], times[k]]
            if label > 0:
                row, sums = grad_sums[k], sum_input[label - 1]
                for j in range(columns):
                    sums[j] += row[j]
        return
    vectors = np.empty((filled, frames.shape[2]), grad_sums.dtype)
    for k in range(filled):
        vectors[k] = frames[items[k], times[k]]
    multiply(vectors.T, grads, sum_input, True)
    if grad_x.size > 0:
        multiply(grads, input_weights[d], vectors, False)
        for k in range(filled):
            grad_x[d, items[k], times[k]] = vectors[k]


_share_backward = sharing(_backward)


@compiled
def _backward_shares(team, arguments):
    _share_backward(team, arguments)
