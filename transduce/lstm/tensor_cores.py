"""The peephole LSTM on a GPU's tensor cores: float16, bfloat16 and TF32 products (Eqs. 4-8).

The products round what they multiply: the inputs, h(n-1), the weights and the gradients of the four
sums. The state, the peepholes, the gates and all sums are float32. As in `lstm.cuda`, one product
precedes the loop over the frames, a kernel runs the loop, and products follow the loop backwards.

A type of products is float16, bfloat16, or float32, which stands for TF32: the kernels round, and
PyTorch's own products follow its switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
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
from transduce.lstm.cuda import THREADS, helpers
from transduce.lstm.reference import cast

SOURCE = Path(__file__).with_name("tensor_cores.cu").read_text()
NAMES = {1: "tensor_core_forward", 4: "tensor_core_backward"}
HALF_TYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)  # the first whose tensor cores multiply bfloat16 and TF32 numbers
WIDTH = 32  # the units are padded to a multiple of it
STEP = 64  # bytes of a sequence's numbers in a step of the kernels' products
UNITS = {1: 4, 4: 16}  # units of a block are a multiple of it: the rows of a tile of weights
MOST_UNITS = 64
CHUNKS = (8, 16, 24, 32, 48, 64)
WARPS = 8  # of a block, as in tensor_cores.cu
AHEAD = (16, 8, 4)
# Registers of a thread, of its 255, by the bytes of a number that is multiplied: with more the
# compiler spills values to memory.
REGISTERS = {2: 250, 4: 236}


@dataclass(frozen=True)
class Layout:
    """The distribution of a layer's units and sequences over the blocks, for one pass."""

    parts: int  # numbers that a unit sends to the others: 1 in the forward pass, 4 in the backward
    H: int  # units, padded
    size: int  # bytes of a number that is multiplied
    units: int  # units of a block
    chunk: int  # sequences that a block takes at a time
    ahead: int  # loads of a thread in a batch; two batches are in flight
    resident: int  # steps whose weights stay in registers; those of the others, in shared memory
    directions: int  # directions that run at once
    rows: int  # sequences of a group
    groups: int  # groups of a direction

    @property
    def blocks(self) -> int:
        """The blocks of a group, which have all units between them."""
        return self.H // self.units

    @property
    def tiles(self) -> int:
        """The tiles of 16 rows that a warp multiplies."""
        return self.units * (4 if self.parts == 1 else 1) // 16

    @property
    def share(self) -> int:
        """The steps of the sums that a warp takes."""
        return share(self.parts, self.H, self.size)

    @property
    def chunks(self) -> int:
        """The chunks of a group."""
        return -(-self.rows // self.chunk)

    @property
    def loads(self) -> int:
        """The loads of a thread for a chunk."""
        return self.share * self.chunk // 8

    @property
    def patient(self) -> bool:
        """Whether a block polls for a few numbers first; with more chunks it waits for none."""
        return self.chunks == 1 and self.loads > 3

    @property
    def registers(self) -> int:
        """An estimate of a thread's registers."""
        weights = 8 * self.tiles * (self.resident + (self.resident < self.share))
        columns = self.chunk // 8
        loads = 8 * min(self.ahead, -(-self.loads // 2))
        turns = -(-(self.units + 7) // 8 * 4 * self.chunk // (32 * WARPS))
        own = turns * (24 if self.parts == 1 else 36)
        return weights + 4 * self.tiles * columns + loads + own + 2 * columns + 24

    @property
    def stored(self) -> int:
        """The bytes of the weights in shared memory."""
        return 1024 * WARPS * (self.share - self.resident) * self.tiles

    @property
    def shared(self) -> int:
        """The bytes of shared memory of a block."""
        stride = self.chunk + 8 if self.chunk % 16 == 0 else self.chunk
        sums = 2 * 4 * WARPS * self.tiles * 16 * stride
        return sums + self.stored + 4 * self.chunks * (self.chunk + 1)


def share(parts: int, H: int, size: int) -> int:
    """Return the steps of the sums that each of the warps takes."""
    return -(-parts * H * size // STEP // WARPS)


def layouts(
    parts: int, B: int, D: int, H: int, size: int, processors: int, shared: int
) -> list[Layout]:
    """Return the layouts that a GPU of `processors` multiprocessors can run."""
    found = []
    steps = share(parts, H, size)
    # The costs of half types were measured without weights in both places.
    residents = (steps, 0) if size == 2 else [steps * part // 4 for part in range(4, -1, -1)]
    for units in range(UNITS[parts], MOST_UNITS + 1, UNITS[parts]):
        if H % units:
            continue
        blocks = H // units
        directions = D if D * blocks <= processors else 1
        groups = min(-(-B // 8), processors // (directions * blocks))
        if groups == 0:
            continue
        rows = -(-B // groups)
        for chunk, ahead, resident in product(CHUNKS, AHEAD, residents):
            layout = Layout(
                parts, H, size, units, chunk, ahead, resident, directions, rows, -(-B // rows)
            )
            if chunk < rows + 8 and layout.registers <= REGISTERS[size] and layout.shared <= shared:
                found.append(layout)
    return found


# The cost of a step in microseconds, measured on an H200 for the forward and the backward pass: of
# a step, a chunk, 10 MB read from the cache, 100 KB of sums and of weights in shared memory, 100
# products of a warp, 100 blocks, and a batch of loads.
COSTS = {
    1: (0.15, 0.75, 1.4, 1.1, 0.3, 0.0, 0.6, 0.02),
    4: (1.2, 0.37, 0.44, 1.2, 0.07, 4.4, 0.0, 0.14),
}


def cost(layout: Layout, D: int) -> float:
    """Estimate the time of a step of all directions, in microseconds."""
    blocks = layout.groups * layout.blocks * layout.directions
    chunks, rows = layout.chunks, layout.chunks * layout.chunk
    amounts = (
        1,
        chunks,
        blocks * rows * layout.parts * layout.H * layout.size / 1e7,
        WARPS * layout.tiles * 16 * rows * 8 / 1e5,
        chunks * layout.stored / 1e5,
        rows / 8 * layout.share * layout.tiles / 100,
        blocks / 100,
        chunks * -(-layout.loads // layout.ahead),
    )
    rounds = -(-D // layout.directions)
    return rounds * sum(a * c for a, c in zip(amounts, COSTS[layout.parts], strict=True))


@cache
def layout_for(
    parts: int, B: int, D: int, H: int, size: int, processors: int, shared: int
) -> Layout | None:
    """Return the layout with the least cost, or None if no layout fits."""
    fitting = layouts(parts, B, D, H, size, processors, shared)
    return min(fitting, key=lambda layout: cost(layout, D), default=None)


@cache
def fits(H: int, D: int, size: int, device: int) -> bool:
    """Return whether a GPU has the tensor cores and the room for a layer of H units.

    The numbers that are multiplied have `size` bytes.
    """
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    room = shared_memory(device)
    return all(layout_for(parts, 1, D, padded(H), size, processors, room) for parts in NAMES)


def padded(H: int) -> int:
    """Return the number of units with padding."""
    return -(-H // WIDTH) * WIDTH


def options(layout: Layout, product_type: torch.dtype, half_output: bool) -> tuple[str, ...]:
    """Return the compiler options of a layout."""
    sizes = (
        f"-DH={layout.H}", f"-DPARTS={layout.parts}", f"-DUNITS={layout.units}",
        f"-DCHUNK={layout.chunk}", f"-DAHEAD={layout.ahead}",
        f"-DRESIDENT={layout.resident}", f"-DPATIENT={int(layout.patient)}",
    )  # fmt: skip
    kinds = {torch.bfloat16: ("-DBFLOAT16",), torch.float32: ("-DTF32",)}
    return *sizes, *kinds.get(product_type, ()), *(("-DHALF_OUTPUT",) if half_output else ())


def _through_time(
    layout: Layout, product_type: torch.dtype, half_output: bool, B: int, N: int, D: int,
    device: int, stream: int, arguments: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Launch the kernel that loops over the frames."""
    kernel, shared = _kernel(layout, product_type, half_output, device)
    for first in range(0, D, layout.directions):
        kernel(
            (layout.directions * layout.groups * layout.blocks, 1),
            32 * WARPS,
            (*arguments, B, N, D, layout.rows, layout.groups, first),
            shared=shared,
            together=True,
            stream=stream,
        )


@cache
def _kernel(
    layout: Layout, product_type: torch.dtype, half_output: bool, device: int
) -> tuple[Kernel, int]:
    """Return the kernel of a layout and the bytes of its shared memory."""
    chosen = options(layout, product_type, half_output)
    [kernel] = kernels(SOURCE, chosen, (NAMES[layout.parts],), device)
    return kernel, layout.shared


@cache
def _layout(parts: int, B: int, D: int, H: int, size: int, device: int) -> Layout:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    layout = layout_for(parts, B, D, H, size, processors, shared_memory(device))
    if layout is None:  # `fits` asks for one sequence
        raise ValueError(f"an LSTM layer of {H} units cannot run {B} sequences at once; give fewer")
    return layout


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
    product_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one layer of D directions whose products multiply numbers of type `product_type`.

    The output has the type of the biases; the last h and s, the gates and the states are float32.
    The last result is h(n-1) at each frame, in that type. Gates, states and h(n-1) have padded
    units, and no frames unless `with_gradients`.
    """
    (B, N), (D, columns, inputs) = x.shape[:2], input_weights.shape
    H, device = columns // 4, x.get_device()
    P = padded(H)
    with current(x.device), without_autocast():
        layout = _layout(1, B, D, P, product_type.itemsize, device)
        stream = current_stream(device)
        biases_, peepholes_ = _pad(biases.reshape(D, 4, H), P), _pad(peepholes, P)
        columns_of_x = _pad_rows(input_weights.reshape(D, 4, H, inputs), P)
        if x.ndim == 2:
            gates = _look_up(x, lengths, columns_of_x, biases_)
            added = None
        else:
            rows = x.view(B * N, inputs) if x.is_contiguous() else x.reshape(B * N, inputs)
            gates = _product(
                cast(rows, product_type), cast(columns_of_x, product_type).view(-1, inputs).T
            )
            added = biases_
        recurrent = _pad(_pad_rows(hidden_weights.reshape(D, 4, H, H), P), P, product_type)
        half_output = biases.dtype in HALF_TYPES
        output = biases.new_empty(B, N, D, P, dtype=product_type if half_output else torch.float32)
        before = biases.new_empty(B, N, D, P, dtype=product_type)
        set_all_bits(before, stream)
        states = gates.new_empty(B, N, D, P) if with_gradients else None
        last_h, last_s = gates.new_empty(D, B, P), gates.new_empty(D, B, P)
        h, s = (None if part is None else _pad(part, P) for part in (h, s))
        _through_time(
            layout, product_type, half_output, B, N, D, device, stream,
            (gates, recurrent, peepholes_, added, lengths, h, s, output, before, states, last_h,
             last_s),
        )  # fmt: skip
    output, last_h, last_s = (part[..., :H].contiguous() for part in (output, last_h, last_s))
    output, gates = output.view(B, N, D * H), gates.view(B, N, D, 4 * P)
    if states is None:
        gates, before = gates.new_empty(B, 0, D, 4 * P), before.new_empty(B, 0, D, P)
        states = gates.new_empty(B, 0, D, P)
    return output, last_h, last_s, gates, states, before


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
    before: Tensor,
    gates: Tensor,
    states: Tensor,
    with_x: bool,
    product_type: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (None unless `with_x`), the four weights, and the first h and s."""
    (B, N), (D, columns, inputs) = x.shape[:2], input_weights.shape
    H, device = columns // 4, x.get_device()
    P, num_rows = padded(H), B * N
    with current(x.device), without_autocast():
        layout = _layout(4, B, D, P, product_type.itemsize, device)
        stream = current_stream(device)
        half_output = biases.dtype in HALF_TYPES
        above = None
        if grad_output is not None:
            kind = product_type if half_output else torch.float32
            above = _pad(grad_output.reshape(B, N, D, H), P, kind)
        upstream = (None if part is None else _pad(part, P) for part in (grad_last_h, grad_last_s))
        first_s = None if s is None else _pad(s, P)
        grad_sums = before.new_empty(num_rows, D, 4 * P)
        set_all_bits(grad_sums, stream)
        grad_h, grad_s = gates.new_empty(D, B, P), gates.new_empty(D, B, P)
        rest = gates.new_empty(layout.groups, D, 7, P)
        transposed = hidden_weights.reshape(D, 4, H, H).permute(0, 3, 1, 2)
        recurrent = _pad(
            torch.nn.functional.pad(transposed, (0, 0, 0, 0, 0, P - H)), P, product_type
        )
        _through_time(
            layout, product_type, half_output, B, N, D, device, stream,
            (gates, recurrent, _pad(peepholes, P), lengths, first_s, states, above, *upstream,
             grad_sums, grad_h, grad_s, rest),
        )  # fmt: skip
        before = before.view(num_rows, D, P)
        grad_hidden = torch.stack(
            [_product(grad_sums[:, d].T, before[:, d]) for d in range(D)]
        ).view(D, 4, P, P)
        flat, grad_x = grad_sums.view(num_rows, D * 4 * P), None
        if x.ndim == 2:
            grad_input = _look_up_gradient(x, flat, inputs)
        else:
            clean = cast(x, product_type)
            if lengths is not None:
                padding = torch.arange(N, device=x.device) >= lengths[:, None]
                clean = clean.masked_fill(padding[..., None], 0)
            grad_input = _product(flat.T, clean.reshape(num_rows, inputs))
            if with_x:
                weights = _pad_rows(input_weights.reshape(D, 4, H, inputs), P)
                grad_x = _product(flat, cast(weights, product_type).view(-1, inputs)).view_as(x)
    grads = rest.sum(0)
    return (
        grad_x,
        grad_input.view(D, 4, P, inputs)[:, :, :H].reshape(D, columns, inputs),
        grad_hidden[:, :, :H, :H].reshape(D, columns, H),
        grads[:, :3, :H].contiguous(),
        grads[:, 3:, :H].reshape(D, columns),
        grad_h[..., :H].contiguous(),
        grad_s[..., :H].contiguous(),
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices in float32."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _pad(tensor: Tensor, P: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor as the kernels take it, its last dimension padded with zeros."""
    tensor = cast(tensor.detach(), dtype)
    extra = P - tensor.shape[-1]
    return aligned(torch.nn.functional.pad(tensor, (0, extra)) if extra else tensor)


def _pad_rows(weights: Tensor, P: int) -> Tensor:
    """Return the weights [D, 4, H, K] with H padded with zeros."""
    weights, extra = weights.detach(), P - weights.shape[2]
    padded = torch.nn.functional.pad(weights, (0, 0, 0, extra)) if extra else weights
    return padded.contiguous()


def _look_up(ids: Tensor, lengths: Tensor | None, weights: Tensor, biases: Tensor) -> Tensor:
    """Return the inputs' part of the four sums [B * N, D * 4 * P] of ids [B, N], in float32."""
    sums = biases.new_empty(ids.numel(), biases.numel())
    kernel = helpers(ids.get_device())["look_up"]
    ids, (*_, inputs) = cast(ids, torch.int64).contiguous(), weights.shape
    kernel(
        (ids.numel(), 1), THREADS,
        (ids, lengths, _pad(weights, inputs), biases, sums, ids.shape[1], biases.numel(), inputs),
    )  # fmt: skip
    return sums


def _look_up_gradient(ids: Tensor, grad_sums: Tensor, inputs: int) -> Tensor:
    """Return the gradient of the input weights [D * 4 * P, inputs] of ids [B, N]."""
    columns = grad_sums.shape[1]
    grad = grad_sums.new_empty(columns, inputs, dtype=torch.float32)
    kernel = helpers(ids.get_device())["look_up_gradient"]
    ids = cast(ids, torch.int64).contiguous()
    kernel(
        (inputs, -(-columns // THREADS)), THREADS,
        (ids, grad_sums.float(), grad, ids.numel(), columns, inputs),
    )  # fmt: skip
    return grad
