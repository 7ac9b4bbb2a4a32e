"""The output lattice on the GPU: CUDA C++ compiled by NVRTC, and cuBLAS's products (Eqs. 12-22).

Triton has no way to hand a value to the neighbouring column of a diagonal without going through
memory, which would take most of a step's time; a warp's shuffle takes nanoseconds. No function here
waits for the GPU: an item whose numbers, lengths or labels are not valid has loss NaN.
"""

from __future__ import annotations

from functools import cache, lru_cache
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
    *("few_transitions", "few_gradients"),
    *("joint_transitions", "joint_gradient", "skew_arrows", "occupancies"),
)
INPUTS = {torch.float16: 16, torch.bfloat16: 17, torch.float32: 32, torch.float64: 64}
# Threads of a block in the kernels without a recurrence: fewer leave processors idle in large
# blocks' tails, more leave a kernel fewer registers.
THREADS = 256
TILE = 8  # warps of a block in the kernels for few outputs, as in lattice.cu
# Outputs, K+1, up to which the kernels multiply themselves: cuBLAS multiplies faster, but each of
# its three products costs a launch.
FEW = 64
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
        f"-DFEW={FEW}",
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

    def additive(self, num_outputs: int, with_gradients: bool) -> tuple[int, ...]:
        """Return the bytes of what the additive density's forward pass keeps; for few outputs these
        are also the variables, since `few_gradients` reads them."""
        few = num_outputs <= FEW
        return (
            *self.lattice(),
            *self.vectors(),
            *(self.variables(with_gradients) if few else ()),
        )


def _layout(B: int, T: int, U: int, dtype: torch.dtype) -> _Layout:
    threads, per_thread = threads_for(U)
    columns = -(-(U + 1) // per_thread) * per_thread
    itemsize = torch.promote_types(dtype, torch.float32).itemsize
    return _Layout(B, T, U, itemsize, threads, per_thread, T + U, columns)


class _Arrays:
    """Several arrays in one allocation, each aligned to 16 bytes."""

    def __init__(self, *sizes: int) -> None:
        ends = list(accumulate(-(-size // 16) * 16 for size in sizes))
        self.size, self.starts = ends[-1], (0, *ends[:-1])

    def allocate(self, like: Tensor) -> Tensor:
        return like.new_empty(self.size, dtype=torch.uint8)

    def addresses(self, space: Tensor) -> list[int]:
        first = space.data_ptr()
        return [first + start for start in self.starts]


# --- Launches -----------------------------------------------------------------------------------


class _Lattice:
    """The sizes, the kernels and the launches of all lattices of one shape on one GPU."""

    def __init__(self, B: int, T: int, U: int, K: int, dtype: torch.dtype, device: int) -> None:
        if B > MAX_ITEMS:
            raise ValueError(
                f"a batch on a GPU may have at most {MAX_ITEMS} items, not {B}; split it"
            )
        layout = self.layout = _layout(B, T, U, dtype)
        self.B, self.T, self.U, self.K, self.device = B, T, U, K, device
        self.skew = (layout.rows, layout.columns)
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.kernels = _kernels(dtype, layout.threads, layout.per_thread, device)
        # Each without and with the arrays for gradients.
        both = (False, True)
        self.log_variables = [_Arrays(*layout.variables(beta)) for beta in both]
        self.whole = [_Arrays(*layout.lattice(), *layout.variables(beta)) for beta in both]
        self.additive = [_Arrays(*layout.additive(K, beta)) for beta in both]
        self.num_vectors = B * (T + U + 1)
        info = torch.finfo(self.dtype)
        self.threshold = K * info.tiny / info.eps  # smaller totals are not trusted

    def by_nodes(self, per_block: int = THREADS) -> int:
        """Return the blocks that have all skewed nodes of an item."""
        return -(-self.layout.rows * self.layout.columns // per_block)

    def variables(
        self,
        lattice: list[int],  # addresses of layout.lattice(), and perhaps of others
        labels: Tensor | None,  # [B, U]; None where the arrows are given
        lengths: tuple[Tensor, Tensor],  # num_frames, num_labels, [B]
        starts: list[int],  # addresses of layout.variables()
        stream: int,
        null: int = 0,
    ) -> Tensor:
        """Compute α, and β where there are addresses for it (Eqs. 16-18); return the loss [B]."""
        evidence, *arrows = lattice[:3]
        loss = lengths[0].new_empty(self.B, dtype=self.dtype)
        self.kernels["variables"](
            (self.B, len(starts) // 2),
            self.layout.threads,
            (
                *arrows, labels, *lengths, *(starts * 2)[:4], evidence, loss,
                self.T, self.U, self.K, null, *self.skew,
            ),
            stream=stream,
        )  # fmt: skip
        return loss

    def exponentials(
        self,
        f: Tensor,
        g: Tensor,
        lengths: tuple[Tensor, Tensor],
        vectors: list[int],  # addresses of the vectors' largest numbers and flags
        stream: int,
        known: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return e^(x - its vector's largest) of f and g; find the largest unless known already."""
        exp_f, exp_g = torch.empty_like(f), torch.empty_like(g)
        self.kernels["exponentials"](
            (-(-self.num_vectors // (THREADS // 32)), 1),
            THREADS,
            (
                f, g, *lengths, exp_f, exp_g, vectors[0], vectors[1],
                self.B, self.T, self.U, self.K, int(known),
            ),
            stream=stream,
        )  # fmt: skip
        return exp_f, exp_g

    def transitions(
        self,
        f: Tensor,
        g: Tensor,
        labels: Tensor,
        lengths: tuple[Tensor, Tensor],
        total: Tensor,
        arrays: list[int],  # addresses of self.additive
        stream: int,
    ) -> None:
        """Fill the arrows (Eqs. 12-15) and the totals [B, T, U+1]."""
        _, null, label, tops, weak_rows, chain = arrays[:6]
        sizes = (self.B, self.T, self.U, self.K, *self.skew, self.threshold)
        if self.K <= FEW:
            self.kernels["few_transitions"](
                (-(-(sum(self.skew) - 1) // TILE), self.B),
                32 * TILE,
                (f, g, labels, *lengths, tops, total, null, label, *sizes),
                stream=stream,
            )
            return
        exp_f, exp_g = self.exponentials(f, g, lengths, arrays[3:5], stream, known=False)
        full_float32_matmul(exp_f, exp_g.mT, out=total)  # Eq. 13's denominator
        self.kernels["transitions"](
            (self.by_nodes() + 1, self.B),
            THREADS,
            (
                f, g, labels, *lengths, tops, total, null, label, weak_rows, chain, *sizes,
            ),
            stream=stream,
        )  # fmt: skip


# Lattices are kept for repeated shapes: to make one costs as much as two launches.
_lattice = lru_cache(maxsize=4096)(_Lattice)


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of the additive density, and two tensors for its gradients.

    With gradients and many outputs, the occupancy of each node and its part that leaves by the
    label take the arrows' place, and the occupancy over the total that of the total.
    """
    with current(f.device):
        f, g, lengths = aligned(f), aligned(g), (num_frames, num_labels)
        (B, T, K), columns = f.shape, g.shape[1]
        lattice = _lattice(B, T, columns - 1, K, f.dtype, f.get_device())
        stream = current_stream(lattice.device)
        total, kept = f.new_empty((B, T, columns)), lattice.additive[with_gradients].allocate(f)
        arrays = lattice.additive[with_gradients].addresses(kept)
        lattice.transitions(f, g, labels, lengths, total, arrays, stream)
        if K <= FEW:
            return lattice.variables(arrays, labels, lengths, arrays[6:], stream), total, kept
        space = lattice.log_variables[with_gradients].allocate(f)
        starts = lattice.log_variables[with_gradients].addresses(space)
        loss = lattice.variables(arrays, labels, lengths, starts, stream)
        if with_gradients:
            lattice.kernels["flow"](
                (lattice.by_nodes(), B),
                THREADS,
                (
                    *starts, arrays[1], arrays[2], arrays[0], *lengths, total,
                    T, columns - 1, *lattice.skew,
                ),
                stream=stream,
            )  # fmt: skip
        return loss, total, kept


def additive_saved(f: Tensor, g: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate the totals [B, T, U+1] and the other arrays that `additive_forward` keeps."""
    B, T, columns = f.shape[0], f.shape[1], g.shape[1]
    layout = _layout(B, T, columns - 1, f.dtype)
    arrays = _Arrays(*layout.additive(f.shape[2], with_gradients))
    return f.new_empty((B, T, columns)), arrays.allocate(f)


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    total: Tensor,  # [B, T, U+1]; for many outputs occupancy over the total
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to f and g (Eqs. 20-22), times upstream [B]."""
    with current(f.device):
        f, g, lengths = aligned(f), aligned(g), (num_frames, num_labels)
        (B, T, K), U = f.shape, g.shape[1] - 1
        lattice = _lattice(B, T, U, K, f.dtype, f.get_device())
        stream = current_stream(lattice.device)
        arrays = lattice.additive[True].addresses(kept)
        evidence, passed, emitted, tops, weak_rows, chain = arrays[:6]
        sizes = (B, T, U, K, *lattice.skew, upstream.stride(0))
        if K <= FEW:
            grad_f, grad_g = torch.empty_like(f), torch.empty_like(g)
            lattice.kernels["few_gradients"](
                (-(-T // TILE) + U + 1, B),
                32 * TILE,
                (
                    f, g, tops, labels, *lengths, evidence, arrays[2], *arrays[6:], total,
                    upstream, grad_f, grad_g, *sizes,
                ),
                stream=stream,
            )  # fmt: skip
            return grad_f, grad_g
        weights = total
        # Computing the exponentials again is cheaper than keeping them until now; the memory of
        # f's becomes that of its gradient.
        exp_f, exp_g = lattice.exponentials(f, g, lengths, arrays[3:5], stream, known=True)
        grad_g = full_float32_matmul(weights.mT, exp_f)
        grad_f = full_float32_matmul(weights, exp_g, out=exp_f)
        lattice.kernels["gradients"](
            (lattice.num_vectors, 1),
            min(THREADS, -(-K // 32) * 32),
            (
                f, g, tops, labels, chain, *lengths, evidence, passed, emitted, weights, weak_rows,
                upstream, grad_f, grad_g, *sizes,
            ),
            stream=stream,
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
        logits, lengths = logits.contiguous(), (num_frames, num_labels)
        B, T, columns, K = logits.shape
        lattice = _lattice(B, T, columns - 1, K, logits.dtype, logits.get_device())
        stream = current_stream(lattice.device)
        log_total = logits.new_empty((B, T, columns), dtype=lattice.dtype)
        kept = lattice.whole[with_gradients].allocate(logits)
        arrays = lattice.whole[with_gradients].addresses(kept)
        lattice.kernels["joint_transitions"](
            (lattice.by_nodes(THREADS // 32), B),
            THREADS,
            (
                logits, labels, *lengths, log_total, arrays[1], arrays[2],
                T, columns - 1, K, *lattice.skew, null, int(fused),
            ),
            stream=stream,
        )  # fmt: skip
        loss = lattice.variables(arrays, labels, lengths, arrays[3:], stream, null)
        return loss, log_total, kept


def joint_saved(logits: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate ln of the sums of the logits' exponentials [B, T, U+1], and the arrays of the
    lattice and of its variables."""
    B, T, columns, _ = logits.shape
    layout = _layout(B, T, columns - 1, logits.dtype)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    arrays = _Arrays(*layout.lattice(), *layout.variables(with_gradients))
    return logits.new_empty((B, T, columns), dtype=dtype), arrays.allocate(logits)


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
        lattice = _lattice(B, T, columns - 1, K, logits.dtype, logits.get_device())
        evidence, _, label, *variables = lattice.whole[True].addresses(kept)
        grad = torch.empty_like(logits)
        lattice.kernels["joint_gradient"](
            (-(-T * columns // (THREADS // 32)), B),
            THREADS,
            (
                logits, log_total, labels, num_frames, num_labels, *variables, label, evidence,
                upstream, grad, T, columns - 1, K, *lattice.skew, null, int(fused), float(clamp),
                upstream.stride(0),
            ),
        )  # fmt: skip
        return grad


# --- Given arrows -------------------------------------------------------------------------------


def _given_arrows(
    log_null: Tensor, log_label: Tensor, lengths: tuple[Tensor, Tensor], with_beta: bool
) -> tuple[_Lattice, Tensor, Tensor, list[int]]:
    """Return the lattice of arrows [B, T, U+1] and [B, T, U], its loss [B], the allocation of its
    arrays, and their addresses."""
    B, T, columns = log_null.shape
    lattice = _lattice(B, T, columns - 1, 2, log_null.dtype, log_null.get_device())
    stream = current_stream(lattice.device)
    space = lattice.whole[with_beta].allocate(log_null)
    arrays = lattice.whole[with_beta].addresses(space)
    lattice.kernels["skew_arrows"](
        (lattice.by_nodes(), B),
        THREADS,
        (log_null, log_label, *lengths, arrays[1], arrays[2], T, columns - 1, *lattice.skew),
        stream=stream,
    )
    loss = lattice.variables(arrays, None, lengths, arrays[3:], stream)
    return lattice, loss, space, arrays


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
        lattice, loss, _space, (evidence, null_arrows, label_arrows, *variables) = found
        items = lattice.B if with_occupancies else 0
        null, label = (x.new_empty((items, *x.shape[1:])) for x in (log_null, log_label))
        if with_occupancies:
            lattice.kernels["occupancies"](
                (-(-lattice.T * (lattice.U + 1) // THREADS), lattice.B),
                THREADS,
                (
                    *variables, null_arrows, label_arrows, evidence, *lengths, null, label,
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


def _one_item(like: Tensor, T: int, U: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([T], device=like.device), torch.tensor([U], device=like.device)


def lattice_transitions(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] (Eqs. 12-15)."""
    with current(f.device):
        f, g = aligned(f[None]), aligned(g[None])
        (_, T, K), U = f.shape, len(labels)
        lattice = _lattice(1, T, U, K, f.dtype, f.get_device())
        total, kept = f.new_empty((1, T, U + 1)), lattice.additive[False].allocate(f)
        arrays, lengths = lattice.additive[False].addresses(kept), _one_item(f, T, U)
        stream = current_stream(lattice.device)
        lattice.transitions(f, g, labels[None].contiguous(), lengths, total, arrays, stream)
        log_null, log_label = (
            _or_never(_nodes(lattice.layout, kept, start, f.dtype)) for start in arrays[1:3]
        )
        return log_null, log_label[:, :-1].contiguous()


def _variables(log_null: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return α and β [T, U+1] and ln Pr(y|x), in float64."""
    dtype = log_null.dtype
    with current(log_null.device):
        lengths = _one_item(log_null, *log_label.shape)
        arrows = (log_null[None].contiguous(), log_label[None].contiguous())
        lattice, _, space, arrays = _given_arrows(*arrows, lengths, with_beta=True)
        results = []
        for high, low in (arrays[3:5], arrays[5:]):
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
