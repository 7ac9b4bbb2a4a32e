"""The output lattice on the GPU: CUDA C++ compiled by NVRTC, and cuBLAS's products (Eqs. 12-22).

Triton has no way to hand a value to the neighbouring column of a diagonal without going through
memory, which would take most of a step's time; a warp's shuffle takes nanoseconds. No function here
waits for the GPU: an item whose numbers, lengths or labels are not valid has loss NaN.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.kernels.nvrtc import (
    Kernel,
    aligned,
    current,
    current_stream,
    full_float32_matmul,
    kernels,
)
from transduce.kernels.sentinels import cuda_options, never

SOURCE = Path(__file__).with_name("lattice.cu").read_text()
NAMES = (
    *("exponentials", "transitions", "variables", "flow", "gradients"),
    *("joint_transitions", "joint_gradient", "skew_arrows", "occupancies"),
)
INPUTS = {torch.float16: 16, torch.bfloat16: 17, torch.float32: 32, torch.float64: 64}
# Threads of a block in the kernels without a recurrence: fewer leave processors idle in large
# blocks' tails, more leave a kernel fewer registers.
THREADS = 256
MAX_ITEMS = 65_535  # blocks in a launch's second dimension, a limit of CUDA


def options(dtype: torch.dtype, threads: int, per_thread: int) -> tuple[str, ...]:
    """Return the compiler's options for logits of a type and blocks of so many threads, each with
    `per_thread` columns of the lattice."""
    double = dtype == torch.float64
    return (
        "-DDOUBLE" if double else "-DSINGLE",
        f"-Dreal={'double' if double else 'float'}",
        f"-DINPUT={INPUTS[dtype]}",
        f"-DE={per_thread}",
        # Diagonals loaded ahead: more hide the memory's latency, fewer need less registers.
        f"-DAHEAD={max(2, min(8, 16 // per_thread))}",
        f"-DTHREADS={next(most for most in (32, 128, 512, 1024) if threads <= most)}",
        *cuda_options(double),
    )


@cache
def _kernels(dtype: torch.dtype, threads: int, per_thread: int, device: int) -> dict[str, Kernel]:
    loaded = kernels(SOURCE, options(dtype, threads, per_thread), NAMES, device)
    return dict(zip(NAMES, loaded, strict=True))


def threads_for(num_labels: int) -> tuple[int, int]:
    """Return the threads of the block that has a lattice's columns, and the columns of each."""
    per_thread = 1  # a step is shortest so, until a block's 1024 threads are too few
    while 1024 * per_thread <= num_labels:
        per_thread *= 2
    return -(-(num_labels + 1) // (32 * per_thread)) * 32, per_thread


# --- Memory -------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The sizes of a batch's skewed arrays."""

    B: int
    T: int
    U: int
    itemsize: int  # bytes of a number along the lattice
    threads: int
    per_thread: int
    rows: int
    columns: int

    @property
    def nodes(self) -> int:
        return self.B * self.rows * self.columns

    def lattice(self) -> tuple[int, ...]:
        """Return the bytes of ln Pr(y|x) and of the null and the label arrow of each node."""
        size = self.nodes * self.itemsize
        return 8 * self.B, size, size

    def variables(self, with_beta: bool) -> tuple[int, ...]:
        """Return the bytes of α and, if asked for, of β, each in two parts."""
        return (self.nodes * self.itemsize, self.nodes * 2) * (2 if with_beta else 1)

    def vectors(self) -> tuple[int, ...]:
        """Return the bytes of each vector's largest number and of its flag for weak totals (of all
        f, then of all g), and of the labels' chains."""
        vectors = self.B * (self.T + self.U + 1)
        return vectors * self.itemsize, vectors * 4, self.B * self.U * 8


def _layout(B: int, T: int, U: int, dtype: torch.dtype) -> _Layout:
    threads, per_thread = threads_for(U)
    columns = -(-(U + 1) // per_thread) * per_thread
    itemsize = torch.promote_types(dtype, torch.float32).itemsize
    return _Layout(B, T, U, itemsize, threads, per_thread, T + U, columns)


def _allocate(like: Tensor, *sizes: int) -> Tensor:
    """Allocate several arrays of so many bytes at once, each aligned to 16 bytes."""
    return like.new_empty(sum(-(-size // 16) * 16 for size in sizes), dtype=torch.uint8)


def _addresses(space: Tensor, *sizes: int) -> list[int]:
    """Return the addresses of the arrays of an allocation."""
    starts = accumulate((-(-size // 16) * 16 for size in sizes[:-1]), initial=space.data_ptr())
    return list(starts)


# --- Launches -----------------------------------------------------------------------------------


class _Lattice:
    """A batch's lattice: its sizes, its kernels, and the addresses of its skewed arrays."""

    def __init__(
        self,
        lengths: tuple[Tensor, Tensor],  # num_frames, num_labels, [B]
        labels: Tensor | None,  # [B, U]; None where the arrows are given
        layout: _Layout,
        num_outputs: int,
        dtype: torch.dtype,  # of the logits
        arrays: list[int],  # addresses of layout.lattice()
        null: int = 0,
    ) -> None:
        if layout.B > MAX_ITEMS:
            raise ValueError(
                f"a batch on a GPU may have at most {MAX_ITEMS} items, not {layout.B}; split it"
            )
        self.lengths, self.labels, self.layout, self.null = lengths, labels, layout, null
        self.B, self.T, self.U, self.K = layout.B, layout.T, layout.U, num_outputs
        self.skew = (layout.rows, layout.columns)
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.evidence, *self.arrows = arrays
        device = lengths[0].get_device()
        self.kernels = _kernels(dtype, layout.threads, layout.per_thread, device)
        self.stream = current_stream(device)

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: tuple[Tensor | int | float | None, ...],
    ) -> None:
        self.kernels[name](grid, threads, arguments, stream=self.stream)

    def by_nodes(self, per_block: int = THREADS) -> int:
        """Return the blocks that have all skewed nodes of an item."""
        return -(-self.layout.rows * self.layout.columns // per_block)

    def variables(self, starts: list[int]) -> Tensor:
        """Compute α, and β where there are addresses for it (Eqs. 16-18); return the loss [B]."""
        loss = self.lengths[0].new_empty(self.B, dtype=self.dtype)
        self.launch(
            "variables",
            (self.B, len(starts) // 2),
            self.layout.threads,
            (
                *self.arrows, self.labels, *self.lengths, *(starts * 2)[:4], self.evidence, loss,
                self.T, self.U, self.K, self.null, *self.skew,
            ),
        )  # fmt: skip
        return loss


class _Additive:
    """The additive density's part of a lattice: the vectors of f and of g.

    With gradients, the occupancy of each node and its part that leaves by the label take the
    arrows' place.
    """

    def __init__(self, lattice: _Lattice, f: Tensor, g: Tensor, arrays: list[int]) -> None:
        self.lattice, self.f, self.g = lattice, f, g
        self.num_vectors = lattice.B * (lattice.T + lattice.U + 1)
        self.tops, self.weak_rows, self.chain = arrays  # addresses of layout.vectors()

    def exponentials(self, known: bool) -> tuple[Tensor, Tensor]:
        """Return e^(x - its vector's largest) of f and g; find the largest unless known already."""
        lattice = self.lattice
        exp_f, exp_g = torch.empty_like(self.f), torch.empty_like(self.g)
        lattice.launch(
            "exponentials",
            (-(-self.num_vectors // (THREADS // 32)), 1),
            THREADS,
            (
                self.f, self.g, *lattice.lengths, exp_f, exp_g, self.tops, self.weak_rows,
                lattice.B, lattice.T, lattice.U, lattice.K, int(known),
            ),
        )  # fmt: skip
        return exp_f, exp_g

    def transitions(self, total: Tensor) -> None:
        """Fill the arrows (Eqs. 12-15) and the totals [B, T, U+1]."""
        lattice = self.lattice
        exp_f, exp_g = self.exponentials(known=False)
        full_float32_matmul(exp_f, exp_g.mT, out=total)  # Eq. 13's denominator
        info = torch.finfo(self.f.dtype)
        lattice.launch(
            "transitions",
            (lattice.by_nodes() + 1, lattice.B),
            THREADS,
            (
                self.f, self.g, lattice.labels, *lattice.lengths, self.tops, total,
                *lattice.arrows, self.weak_rows, self.chain,
                lattice.B, lattice.T, lattice.U, lattice.K, *lattice.skew,
                lattice.K * info.tiny / info.eps,
            ),
        )  # fmt: skip


def _additive(
    f: Tensor, g: Tensor, labels: Tensor, lengths: tuple[Tensor, Tensor], kept: Tensor
) -> _Additive:
    layout = _layout(len(f), f.shape[1], g.shape[1] - 1, f.dtype)
    arrays = _addresses(kept, *layout.lattice(), *layout.vectors())
    lattice = _Lattice(lengths, labels, layout, f.shape[2], f.dtype, arrays[:3])
    return _Additive(lattice, f, g, arrays[3:])


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of the additive density, and two tensors for its gradients."""
    with current(f.device):
        f, g = aligned(f), aligned(g)
        total, kept = additive_saved(f, g, with_gradients)
        additive = _additive(f, g, labels, (num_frames, num_labels), kept)
        lattice = additive.lattice
        additive.transitions(total)
        sizes = lattice.layout.variables(with_gradients)
        space = _allocate(f, *sizes)
        log_variables = _addresses(space, *sizes)
        loss = lattice.variables(log_variables)
        if with_gradients:
            lattice.launch(
                "flow",
                (lattice.by_nodes(), lattice.B),
                THREADS,
                (
                    *log_variables, *lattice.arrows, lattice.evidence, *lattice.lengths, total,
                    lattice.T, lattice.U, *lattice.skew,
                ),
            )  # fmt: skip
        return loss, total, kept


def additive_saved(f: Tensor, g: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate the totals [B, T, U+1], which become occupancies over totals, and the arrays of the
    lattice and of the vectors."""
    B, T, columns = f.shape[0], f.shape[1], g.shape[1]
    layout = _layout(B, T, columns - 1, f.dtype)
    return f.new_empty((B, T, columns)), _allocate(f, *layout.lattice(), *layout.vectors())


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    weights: Tensor,  # [B, T, U+1], occupancy over the total
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to f and g (Eqs. 20-22), times upstream [B]."""
    with current(f.device):
        f, g = aligned(f), aligned(g)
        additive = _additive(f, g, labels, (num_frames, num_labels), kept)
        lattice = additive.lattice
        # Computing the exponentials again is cheaper than keeping them until now; the memory of
        # f's becomes that of its gradient.
        exp_f, exp_g = additive.exponentials(known=True)
        grad_g = full_float32_matmul(weights.mT, exp_f)
        grad_f = full_float32_matmul(weights, exp_g, out=exp_f)
        lattice.launch(
            "gradients",
            (additive.num_vectors, 1),
            min(THREADS, -(-lattice.K // 32) * 32),
            (
                f, g, additive.tops, labels, additive.chain, *lattice.lengths, lattice.evidence,
                *lattice.arrows, weights, additive.weak_rows, upstream.contiguous(), grad_f, grad_g,
                lattice.B, lattice.T, lattice.U, lattice.K, *lattice.skew,
            ),
        )  # fmt: skip
        return grad_f, grad_g


def joint_forward(
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of any joint network's logits [B, T, U+1, K+1], and two tensors for its
    gradient."""
    with current(logits.device):
        logits = logits.contiguous()
        B, T, columns, K = logits.shape
        layout = _layout(B, T, columns - 1, logits.dtype)
        log_total, kept = joint_saved(logits, with_gradients)
        arrays = _addresses(kept, *layout.lattice(), *layout.variables(with_gradients))
        lengths = (num_frames, num_labels)
        lattice = _Lattice(lengths, labels, layout, K, logits.dtype, arrays[:3], null)
        lattice.launch(
            "joint_transitions",
            (lattice.by_nodes(THREADS // 32), B),
            THREADS,
            (
                logits, labels, num_frames, num_labels, log_total, *lattice.arrows,
                T, columns - 1, K, *lattice.skew, null, int(fused),
            ),
        )  # fmt: skip
        return lattice.variables(arrays[3:]), log_total, kept


def joint_saved(logits: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate ln of the sums of the logits' exponentials [B, T, U+1], and the arrays of the
    lattice and of its variables."""
    B, T, columns, _ = logits.shape
    layout = _layout(B, T, columns - 1, logits.dtype)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    kept = _allocate(logits, *layout.lattice(), *layout.variables(with_gradients))
    return logits.new_empty((B, T, columns), dtype=dtype), kept


def joint_backward(
    upstream: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    clamp: float,
    log_total: Tensor,
    kept: Tensor,
) -> Tensor:
    """Return the gradient with respect to the logits, clamped before `upstream` scales it."""
    with current(logits.device):
        logits = logits.contiguous()
        B, T, columns, K = logits.shape
        layout = _layout(B, T, columns - 1, logits.dtype)
        arrays = _addresses(kept, *layout.lattice(), *layout.variables(True))
        lengths = (num_frames, num_labels)
        lattice = _Lattice(lengths, labels, layout, K, logits.dtype, arrays[:3], null)
        grad = torch.empty_like(logits)
        lattice.launch(
            "joint_gradient",
            (-(-T * columns // (THREADS // 32)), B),
            THREADS,
            (
                logits, log_total, labels, num_frames, num_labels, *arrays[3:],
                lattice.arrows[1], lattice.evidence, upstream.contiguous(), grad,
                T, columns - 1, K, *lattice.skew, null, int(fused), float(clamp),
            ),
        )  # fmt: skip
        return grad


# --- Given arrows -------------------------------------------------------------------------------


def _given_arrows(
    log_null: Tensor, log_label: Tensor, lengths: tuple[Tensor, Tensor], with_beta: bool
) -> tuple[_Lattice, Tensor, Tensor, list[int]]:
    """Return the lattice of arrows [B, T, U+1] and [B, T, U], its loss [B], the allocation of its
    arrays, and the addresses of α and β."""
    B, T, columns = log_null.shape
    layout = _layout(B, T, columns - 1, log_null.dtype)
    sizes = (*layout.lattice(), *layout.variables(with_beta))
    space = _allocate(log_null, *sizes)
    arrays = _addresses(space, *sizes)
    lattice = _Lattice(lengths, None, layout, 2, log_null.dtype, arrays[:3])
    lattice.launch(
        "skew_arrows",
        (lattice.by_nodes(), B),
        THREADS,
        (log_null, log_label, *lengths, *lattice.arrows, T, columns - 1, *lattice.skew),
    )
    return lattice, lattice.variables(arrays[3:]), space, arrays[3:]


def lattice_forward(
    log_null: Tensor,
    log_label: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_occupancies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of given arrows, and their occupancies if asked for."""
    with current(log_null.device):
        log_null, log_label = log_null.contiguous(), log_label.contiguous()
        lengths = (num_frames, num_labels)
        found = _given_arrows(log_null, log_label, lengths, with_occupancies)
        lattice, loss, _space, log_variables = found
        items = lattice.B if with_occupancies else 0
        null, label = (x.new_empty((items, *x.shape[1:])) for x in (log_null, log_label))
        if with_occupancies:
            lattice.launch(
                "occupancies",
                (-(-log_null[0].numel() // THREADS), lattice.B),
                THREADS,
                (
                    *log_variables, *lattice.arrows, lattice.evidence, *lengths, null, label,
                    lattice.T, lattice.U, *lattice.skew,
                ),
            )  # fmt: skip
        return loss, null, label


# --- The parts, of one utterance ----------------------------------------------------------------


def _nodes(layout: _Layout, space: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """Return the nodes (t, u) of the skewed array at an address, [T, U+1]."""
    first = start - space.data_ptr()
    part = space[first : first + layout.nodes * dtype.itemsize].view(dtype)
    u = torch.arange(layout.U + 1, device=space.device)
    t = torch.arange(layout.T, device=space.device)[:, None]
    return part.view(layout.rows, layout.columns)[t + u, u.expand(layout.T, -1)]


def _or_never(x: Tensor) -> Tensor:
    """Replace the kernels' large negative numbers by -inf."""
    return torch.where(x <= never(x.dtype == torch.float64), -torch.inf, x)


def _one_item(like: Tensor, *lengths: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([n], device=like.device) for n in lengths)


def lattice_transitions(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] (Eqs. 12-15)."""
    with current(f.device):
        f, g = aligned(f[None]), aligned(g[None])
        total, kept = additive_saved(f, g, with_gradients=False)
        T, U = _one_item(f, f.shape[1], len(labels))
        additive = _additive(f, g, labels[None].contiguous(), (T, U), kept)
        additive.transitions(total)
        lattice = additive.lattice
        log_null, log_label = (
            _or_never(_nodes(lattice.layout, kept, start, f.dtype)) for start in lattice.arrows
        )
        return log_null, log_label[:, :-1].contiguous()


def _variables(log_null: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return α and β [T, U+1] and ln Pr(y|x), in float64."""
    dtype = log_null.dtype
    with current(log_null.device):
        T, U = _one_item(log_null, *log_label.shape)
        arrows = (log_null[None].contiguous(), log_label[None].contiguous())
        lattice, _, space, starts = _given_arrows(*arrows, (T, U), with_beta=True)
        results = []
        for high, low in (starts[:2], starts[2:]):
            whole = _or_never(_nodes(lattice.layout, space, high, dtype)).double()
            if dtype == torch.float32:
                whole += _nodes(lattice.layout, space, low, torch.bfloat16).double()
            results.append(whole)
        evidence = space[:8].view(torch.float64)[0]
        return results[0], results[1], evidence


def forward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return ln α(t,u) [T, U+1] (Eq. 16)."""
    return _variables(log_null, log_label)[0].to(log_null.dtype)


def backward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return ln β(t,u) [T, U+1] (Eq. 18)."""
    return _variables(log_null, log_label)[1].to(log_null.dtype)


def log_occupancy(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return ln α(t,u) β(t,u) / Pr(y|x) [T, U+1]; -inf everywhere where y is impossible."""
    log_alpha, log_beta, evidence = _variables(log_null, log_label)
    return (log_alpha + log_beta - evidence).to(log_null.dtype)
