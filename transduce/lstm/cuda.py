"""The peephole LSTM on the GPU: CUDA C++ compiled by NVRTC, and cuBLAS products (Eqs. 4-8).

One product before the loop over the frames computes the inputs' part of all sums; products after it
compute the weights' gradients. The loop is one kernel, which keeps the recurrent weights on the
chip. Triton can neither keep them there from frame to frame nor let one block wait for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from transduce.kernels.nvrtc import (
    Kernel,
    aligned,
    current,
    current_stream,
    kernels,
    set_all_bits,
    shared_memory,
    without_autocast,
)
from transduce.lstm.reference import cast

SOURCE = Path(__file__).with_name("lstm.cu").read_text()
HELPERS = ("look_up", "look_up_gradient", "without_padding")
NAMES = {1: ("lstm_forward", *HELPERS), 4: ("lstm_backward", *HELPERS)}
THREADS = 256  # of a block, as in lstm.cu
# Units of a block: more units mean fewer blocks that wait for each other, but more weights and more
# work in each block.
UNITS = (64, 32, 16, 8)
# Registers of a thread for weights, of its 255: with more the compiler spills its other values to
# memory; with fewer larger layers read their weights from the cache at every frame.
REGISTERS = 128
# Sequences that a block takes at a time, by `Plan.parts`: more use each weight more often, but need
# more registers for their sums.
CHUNKS = {1: (8, 4, 2, 1), 4: (4, 2, 1)}
# The cost of one wait for the other blocks, in multiply-adds of a block: a larger value prefers
# fewer, larger chunks.
WAIT = 16_000


@dataclass(frozen=True)
class Plan:
    """The distribution of a layer's units and sequences over the blocks, for one pass."""

    parts: int  # numbers that a unit sends to the others: 1 in the forward pass, 4 in the backward
    units: int  # units of a block
    blocks: int  # blocks of a group, which have all units between them
    rows: int  # sequences of a group
    groups: int  # groups of a direction
    chunk: int  # sequences that a block takes at a time
    resident: bool  # whether the weights stay in registers
    directions: int  # directions that run at once
    width: int  # units, padded to whole vectors

    def shared(self, size: int) -> int:
        """Return the bytes of shared memory that a block needs: two buffers and the lengths."""
        rows = -(-self.rows // self.chunk) * self.chunk
        return size * 2 * self.chunk * self.parts * self.width + 4 * rows


@cache
def plan(parts: int, B: int, D: int, H: int, size: int, processors: int, shared: int) -> Plan:
    """Return the plan with the least work for a block.

    Numbers have `size` bytes; the GPU has `processors` multiprocessors, each with `shared` bytes of
    shared memory.
    """
    plans = []
    for units in UNITS:
        lanes, blocks = THREADS // units, -(-H // units)
        width = -(-H // (4 * lanes)) * 4 * lanes
        directions = D if D * blocks <= processors else 1
        groups = min(B, processors // (directions * blocks))
        if groups == 0:
            continue
        rows = -(-B // groups)
        resident = 4 * width // lanes * (size // 4) <= REGISTERS
        for chunk in (c for c in CHUNKS[parts] if c <= lanes and c < 2 * rows):
            p = Plan(parts, units, blocks, rows, -(-B // rows), chunk, resident, directions, width)
            if p.shared(size) <= shared:
                plans.append(p)
    if not plans:
        raise ValueError(
            f"a layer of {H} units and {B} sequences is too large for a GPU of {processors} "
            "multiprocessors; use fewer units or a smaller batch"
        )

    def work(p: Plan) -> tuple[bool, int, int]:
        # Each chunk costs its multiply-adds and one wait.
        turns = -(-D // p.directions) * -(-p.rows // p.chunk)
        return not p.resident, turns * (p.chunk * p.units * p.width + WAIT), p.blocks

    return min(plans, key=work)


def options(p: Plan, H: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler options of a plan."""
    number = ("-DDOUBLE", "-Dreal=double") if dtype == torch.float64 else ("-Dreal=float",)
    sizes = (f"-DH={H}", f"-DV={p.units}", f"-DRC={p.chunk}", f"-DPARTS={p.parts}")
    return *number, *sizes, f"-DRESIDENT={int(p.resident)}"


def helpers(device: int) -> dict[str, Kernel]:
    """Return the kernels for ids and padding in float32, which do not depend on a plan."""
    smallest = options(plan(1, 1, 1, 1, 4, 1, 64 << 10), 1, torch.float32)
    return dict(zip(HELPERS, kernels(SOURCE, smallest, HELPERS, device), strict=True))


class _Launches:
    """The kernels of one pass through a layer, and their launches."""

    def __init__(self, parts: int, B: int, D: int, H: int, dtype: torch.dtype, device: int) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.B, self.D, self.device = B, D, device
        p = self.plan = plan(parts, B, D, H, dtype.itemsize, processors, shared_memory(device))
        self.blocks, self.shared = p.directions * p.groups * p.blocks, p.shared(dtype.itemsize)
        loaded = kernels(SOURCE, options(p, H, dtype), NAMES[parts], device)
        self.kernels: dict[str, Kernel] = dict(zip(NAMES[parts], loaded, strict=True))

    def through_time(self, stream: int, N: int, *arguments: Tensor | None) -> None:
        """Launch the kernel that loops over the N frames."""
        p = self.plan
        for first in range(0, self.D, p.directions):
            self.kernels[NAMES[p.parts][0]](
                (self.blocks, 1),
                THREADS,
                (*arguments, self.B, N, self.D, p.rows, p.groups, first),
                shared=self.shared,
                together=True,
                stream=stream,
            )

    def __call__(
        self, name: str, stream: int, grid: tuple[int, int], *arguments: Tensor | int | None
    ) -> None:
        """Launch another kernel."""
        self.kernels[name](grid, THREADS, arguments, stream=stream)


# Launches are kept for repeated shapes: to make them costs as much as a launch.
_launches = lru_cache(maxsize=4096)(_Launches)


def forward(
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one layer of D directions in float32 or float64; `cpu.forward` documents the results."""
    dtype = torch.promote_types(biases.dtype, torch.float32)
    input_weights, hidden_weights, peepholes, biases = (
        _operand(weights, dtype) for weights in (input_weights, hidden_weights, peepholes, biases)
    )
    h, s = (None if part is None else _operand(part, dtype) for part in (h, s))
    x = _operand(x, dtype if x.is_floating_point() else torch.int64)
    (B, N), (D, columns, inputs) = x.shape[:2], input_weights.shape
    H = columns // 4
    with current(x.device), without_autocast():
        run = _launches(1, B, D, H, dtype, x.get_device())
        stream = current_stream(run.device)
        if x.ndim == 2:
            gates = biases.new_empty(B * N, D * columns)
            run(
                "look_up", stream, (B * N, 1),
                x, lengths, input_weights, biases, gates, N, D * columns, inputs,
            )  # fmt: skip
        else:
            rows = x.view(B * N, inputs)
            gates = torch.addmm(biases.view(-1), rows, input_weights.view(-1, inputs).T)
        output = biases.new_empty(B, N, D * H)
        set_all_bits(output, stream)
        states = biases.new_empty(B, N, D, H) if with_gradients else None
        last_h, last_s = biases.new_empty(D, B, H), biases.new_empty(D, B, H)
        run.through_time(
            stream, N,
            gates, hidden_weights, peepholes, lengths, h, s, output, states, last_h, last_s,
        )  # fmt: skip
    if states is None:
        return (
            output,
            last_h,
            last_s,
            gates.new_empty(B, 0, D, columns),
            gates.new_empty(B, 0, D, H),
        )
    return output, last_h, last_s, gates.view(B, N, D, columns), states


def backward(
    grad_output: Tensor | None,
    grad_last_h: Tensor | None,
    grad_last_s: Tensor | None,
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    output: Tensor,
    gates: Tensor,
    states: Tensor,
    with_x: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (None unless `with_x`), the four weights, and the first h and s."""
    dtype = gates.dtype
    input_weights, hidden_weights, peepholes, output, gates, states = (
        _operand(tensor, dtype)
        for tensor in (input_weights, hidden_weights, peepholes, output, gates, states)
    )
    h, s, *upstream = (
        None if tensor is None else _operand(tensor, dtype)
        for tensor in (h, s, grad_output, grad_last_h, grad_last_s)
    )
    x = _operand(x, dtype if x.is_floating_point() else torch.int64)
    (B, N), (D, columns, inputs) = x.shape[:2], input_weights.shape
    H, num_rows = columns // 4, B * N
    with current(x.device), without_autocast():
        run = _launches(4, B, D, H, dtype, x.get_device())
        stream = current_stream(run.device)
        grad_sums = peepholes.new_empty(num_rows, D, columns)
        set_all_bits(grad_sums, stream)
        before = peepholes.new_empty(num_rows, D, H)
        grad_h, grad_s = peepholes.new_empty(D, B, H), peepholes.new_empty(D, B, H)
        rest = peepholes.new_empty(run.plan.groups, D, 7, H)
        transposed = hidden_weights.view(D, 4, H, H).transpose(2, 3).contiguous()
        run.through_time(
            stream, N, gates, transposed, peepholes, lengths, h, s, output, states, *upstream,
            grad_sums, before, grad_h, grad_s, rest,
        )  # fmt: skip
        # One product for each direction: cuBLAS splits a long sum, but not in a batched product.
        grad_hidden = torch.empty_like(hidden_weights)
        for d in range(D):
            torch.mm(grad_sums[:, d].T, before[:, d], out=grad_hidden[d])
        grad_peepholes, grad_biases = rest[:, :, :3].sum(0), rest[:, :, 3:].sum(0).flatten(1)
        flat, grad_x = grad_sums.view(num_rows, D * columns), None
        if x.ndim == 2:
            grad_input = torch.empty_like(input_weights)
            run(
                "look_up_gradient", stream, (inputs, -(-D * columns // THREADS)),
                x, flat, grad_input, num_rows, D * columns, inputs,
            )  # fmt: skip
        else:
            clean = x
            if lengths is not None:
                clean = torch.empty_like(x)
                run(
                    "without_padding", stream, (-(-x.numel() // THREADS), 1),
                    x, lengths, clean, N, inputs, x.numel(),
                )  # fmt: skip
            grad_input = (flat.T @ clean.view(num_rows, inputs)).view_as(input_weights)
            if with_x:
                grad_x = (flat @ input_weights.view(-1, inputs)).view_as(x)
    return grad_x, grad_input, grad_hidden, grad_peepholes, grad_biases, grad_h, grad_s


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor contiguous, aligned and in `dtype`, as the kernels take it."""
    return aligned(cast(tensor.detach() if tensor.requires_grad else tensor, dtype))
