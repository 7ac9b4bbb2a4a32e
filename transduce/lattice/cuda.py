"""The output lattice on the GPU: CUDA C++ compiled by NVRTC, and cuBLAS's products (Eqs. 12-22).

Triton has no way to hand a value to the neighbouring column of a diagonal without going through
memory, which is most of a step's time; a warp's shuffle takes nanoseconds. Nothing here waits for
the GPU: an item whose numbers, lengths or labels are not valid has loss NaN.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from transduce.kernels.nvrtc import Kernel, aligned, current, full_float32, kernels

SOURCE = Path(__file__).with_name("lattice.cu").read_text()
NAMES = (
    *("exponentials", "transitions", "variables", "flow", "gradients"),
    *("joint_transitions", "joint_gradient"),
)
INPUTS = {torch.float16: 16, torch.bfloat16: 17, torch.float32: 32, torch.float64: 64}
THREADS = 256
MAX_ITEMS = 65_535  # the blocks that a launch has in its second dimension


def options(dtype: torch.dtype, threads: int, per_thread: int) -> tuple[str, ...]:
    """The compiler's, for logits of a type and blocks that have so many columns of the lattice."""
    wide = dtype == torch.float64
    return (
        "-DDOUBLE" if wide else "-DSINGLE",
        f"-Dreal={'double' if wide else 'float'}",
        f"-DINPUT={INPUTS[dtype]}",
        f"-DE={per_thread}",
        f"-DAHEAD={max(2, min(8, 16 // per_thread))}",
        f"-DTHREADS={next(most for most in (32, 128, 512, 1024) if threads <= most)}",
    )


@cache
def _kernels(dtype: torch.dtype, threads: int, per_thread: int, device: int) -> dict[str, Kernel]:
    loaded = kernels(SOURCE, options(dtype, threads, per_thread), NAMES, device)
    return dict(zip(NAMES, loaded, strict=True))


def threads_for(num_labels: int) -> tuple[int, int]:
    """Of a block that has a lattice's columns, and how many columns each has."""
    per_thread = 1  # a step is short, until a block's 1024 threads are too few
    while 1024 * per_thread <= num_labels:
        per_thread *= 2
    return -(-(num_labels + 1) // (32 * per_thread)) * 32, per_thread


def arrays(like: Tensor, *sizes: int) -> tuple[Tensor, list[int]]:
    """One allocation for several arrays of so many bytes, and where each begins."""
    ends = list(accumulate(-(-size // 16) * 16 for size in sizes))
    space = like.new_empty(ends[-1], dtype=torch.uint8)
    return space, addresses(space, *sizes)


def addresses(space: Tensor, *sizes: int) -> list[int]:
    """Where the arrays of an allocation begin."""
    starts = accumulate((-(-size // 16) * 16 for size in sizes[:-1]), initial=space.data_ptr())
    return list(starts)


class _Lattice:
    """A batch's lattice: its sizes, its kernels, and its skewed arrays.

    `kept` has ln Pr(y|x) of each item and, of each node, the null arrow and the label arrow.
    """

    def __init__(
        self,
        labels: Tensor,
        num_frames: Tensor,
        num_labels: Tensor,
        sizes: tuple[int, int, int],  # T, U, K+1
        dtype: torch.dtype,  # of the logits
        null: int = 0,
        kept: Tensor | None = None,
    ) -> None:
        self.labels, self.lengths = labels, (num_frames, num_labels)
        self.B, (self.T, self.U, self.K), self.null = len(labels), sizes, null
        if self.B > MAX_ITEMS:
            raise ValueError(f"a batch on a GPU has at most {MAX_ITEMS} items, not {self.B}")
        self.threads, per_thread = threads_for(self.U)
        self.rows, self.columns = self.T + self.U, -(-(self.U + 1) // per_thread) * per_thread
        self.skew = (self.rows, self.columns)
        self.kernels = _kernels(dtype, self.threads, per_thread, labels.get_device())
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.nodes = self.B * self.rows * self.columns
        size = self.nodes * self.dtype.itemsize
        places = (8 * self.B, size, size)
        if kept is None:
            self.kept, starts = arrays(labels, *places)
        else:
            self.kept, starts = kept, addresses(kept, *places)
        self.evidence, *self.arrows = starts

    def parts_of_variables(self) -> tuple[int, int, int, int]:
        """The bytes of α and of β, each in two parts."""
        return (self.nodes * self.dtype.itemsize, self.nodes * 2) * 2

    def variables(self, with_beta: bool) -> tuple[Tensor, Tensor, list[int]]:
        """The loss [B], and α and β (Eqs. 16-18): their space, and where their parts begin."""
        loss = self.labels.new_empty(self.B, dtype=self.dtype)
        space, starts = arrays(loss, *self.parts_of_variables()[: 4 if with_beta else 2])
        self.kernels["variables"](
            (self.B, 2 if with_beta else 1),
            self.threads,
            (
                *self.arrows, self.labels, *self.lengths, *(starts * 2)[:4], self.evidence, loss,
                self.T, self.U, self.K, self.null, *self.skew,
            ),
        )  # fmt: skip
        return loss, space, starts


class _Additive:
    """The additive density's part of a lattice: the rows of f and of g.

    `kept` has each row's largest number and whether it has a weak total, and the labels' chains.
    With gradients, what passes each node and what leaves it by its label take the arrows' place.
    """

    def __init__(self, lattice: _Lattice, f: Tensor, g: Tensor, kept: Tensor | None = None) -> None:
        self.lattice, self.f, self.g = lattice, f, g
        self.num_rows = lattice.B * (lattice.T + lattice.U + 1)
        places = (
            self.num_rows * f.dtype.itemsize,
            self.num_rows * 4,
            lattice.B * lattice.U * 8,
        )
        if kept is None:
            self.kept, starts = arrays(f, *places)
        else:
            self.kept, starts = kept, addresses(kept, *places)
        self.tops, self.weak_rows, self.chain = starts

    def exponentials(self, known: bool) -> tuple[Tensor, Tensor]:
        """e^(f - its row's largest), and of g; the largest are found, or known already."""
        lattice = self.lattice
        exp_f, exp_g = torch.empty_like(self.f), torch.empty_like(self.g)
        lattice.kernels["exponentials"](
            (-(-self.num_rows // (THREADS // 32)), 1),
            THREADS,
            (
                self.f, self.g, *lattice.lengths, exp_f, exp_g, self.tops, self.weak_rows,
                lattice.B, lattice.T, lattice.U, lattice.K, int(known),
            ),
        )  # fmt: skip
        return exp_f, exp_g

    def transitions(self) -> Tensor:
        """Fills the arrows (Eqs. 12-15); returns the totals [B, T, U+1]."""
        lattice = self.lattice
        exp_f, exp_g = self.exponentials(known=False)
        with full_float32():
            total = torch.bmm(exp_f, exp_g.transpose(1, 2))  # Eq. 13's denominator
        info = torch.finfo(self.f.dtype)
        lattice.kernels["transitions"](
            (-(-lattice.rows * lattice.columns // THREADS) + 1, lattice.B),
            THREADS,
            (
                self.f, self.g, lattice.labels, *lattice.lengths, self.tops, total,
                *lattice.arrows, self.weak_rows, self.chain,
                lattice.B, lattice.T, lattice.U, lattice.K, *lattice.skew,
                lattice.K * info.tiny / info.eps,
            ),
        )  # fmt: skip
        return total


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of the additive density, and what its gradients will need."""
    with current(f.device):
        f, g = aligned(f), aligned(g)
        sizes = (f.shape[1], g.shape[1] - 1, f.shape[2])
        lattice = _Lattice(labels, num_frames, num_labels, sizes, f.dtype)
        additive = _Additive(lattice, f, g)
        total = additive.transitions()
        loss, _space, log_variables = lattice.variables(with_gradients)
        if with_gradients:
            lattice.kernels["flow"](
                (-(-lattice.rows * lattice.columns // THREADS), lattice.B),
                THREADS,
                (
                    *log_variables, *lattice.arrows, lattice.evidence, *lattice.lengths, total,
                    lattice.T, lattice.U, *lattice.skew,
                ),
            )  # fmt: skip
        lengths = (labels, num_frames, num_labels)
        return loss, (f, g, *lengths, total, additive.kept, lattice.kept)


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    weights: Tensor,  # [B, T, U+1], occupancy over the total
    rows_kept: Tensor,
    lattice_kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to f and g (Eqs. 20-22), times upstream [B]."""
    with current(f.device):
        sizes = (f.shape[1], g.shape[1] - 1, f.shape[2])
        lattice = _Lattice(labels, num_frames, num_labels, sizes, f.dtype, kept=lattice_kept)
        # The exponentials again, rather than kept until now; that of f makes room for its gradient.
        additive = _Additive(lattice, f, g, rows_kept)
        exp_f, exp_g = additive.exponentials(known=True)
        with full_float32():
            grad_g = torch.bmm(weights.transpose(1, 2), exp_f)
            grad_f = torch.bmm(weights, exp_g, out=exp_f)
        lattice.kernels["gradients"](
            (additive.num_rows, 1),
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
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of any joint network's logits [B, T, U+1, K+1], and what is kept of it."""
    with current(logits.device):
        logits = logits.contiguous()
        B, T, columns, K = logits.shape
        sizes = (T, columns - 1, K)
        lattice = _Lattice(labels, num_frames, num_labels, sizes, logits.dtype, null)
        log_total = labels.new_empty((B, T, columns), dtype=lattice.dtype)
        lattice.kernels["joint_transitions"](
            (-(-lattice.rows * lattice.columns // (THREADS // 32)), B),
            THREADS,
            (
                logits, labels, num_frames, num_labels, log_total, *lattice.arrows,
                *sizes, *lattice.skew, null, int(fused),
            ),
        )  # fmt: skip
        loss, log_variables, _ = lattice.variables(with_gradients)
        return loss, (log_total, lattice.kept, log_variables)


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
    lattice_kept: Tensor,
    log_variables: Tensor,
) -> Tensor:
    """The gradient with respect to the logits, clamped before it is scaled by `upstream`."""
    with current(logits.device):
        logits = logits.contiguous()
        B, T, columns, K = logits.shape
        sizes = (T, columns - 1, K)
        lattice = _Lattice(
            labels, num_frames, num_labels, sizes, logits.dtype, null, kept=lattice_kept
        )
        grad = torch.empty_like(logits)
        lattice.kernels["joint_gradient"](
            (-(-T * columns // (THREADS // 32)), B),
            THREADS,
            (
                logits, log_total, labels, num_frames, num_labels,
                *addresses(log_variables, *lattice.parts_of_variables()),
                lattice.arrows[1], lattice.evidence, upstream.contiguous(), grad,
                *sizes, *lattice.skew, null, int(fused), float(clamp),
            ),
        )  # fmt: skip
        return grad


# --- The parts, of one utterance ----------------------------------------------------------------


class _One(_Lattice):
    """The lattice of one utterance, whose nodes are laid out and gathered here, not by a kernel."""

    def __init__(self, labels: Tensor, T: int, num_outputs: int, dtype: torch.dtype) -> None:
        U, device = len(labels), labels.device
        num_frames, num_labels = (torch.tensor([n], device=device) for n in (T, U))
        super().__init__(
            labels[None].contiguous(), num_frames, num_labels, (T, U, num_outputs), dtype
        )
        u = torch.arange(U + 1, device=device)
        self.places = (torch.arange(T, device=device)[:, None] + u, u.expand(T, -1))

    def array(self, space: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        """A skewed array of an allocation."""
        first = start - space.data_ptr()
        part = space[first : first + self.nodes * dtype.itemsize].view(dtype)
        return part.view(self.rows, self.columns)

    def nodes_of(self, space: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        """The nodes (t, u) of a skewed array, [T, U+1]; -inf for what is a large number there."""
        x = self.array(space, start, dtype)[self.places]
        never = -1e280 if dtype == torch.float64 else -1e29
        return torch.where(x <= never, -torch.inf, x)


def lattice_transitions(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] (Eqs. 12-15)."""
    with current(f.device):
        lattice = _One(labels, len(f), f.shape[1], f.dtype)
        _Additive(lattice, aligned(f[None]), aligned(g[None])).transitions()
        log_null, log_label = (
            lattice.nodes_of(lattice.kept, start, f.dtype) for start in lattice.arrows
        )
        return log_null, log_label[:, :-1].contiguous()


def _variables(log_null: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """α and β [T, U+1], and ln Pr(y|x)."""
    dtype, impossible = log_null.dtype, -1e290 if log_null.dtype == torch.float64 else -1e30
    with current(log_null.device):
        labels = torch.ones(log_label.shape[1], dtype=torch.int64, device=log_null.device)
        lattice = _One(labels, len(log_null), 2, dtype)
        padded = torch.nn.functional.pad(log_label, (0, 1), value=impossible)
        for start, arrows in zip(lattice.arrows, (log_null, padded), strict=True):
            skewed = lattice.array(lattice.kept, start, dtype)
            skewed.fill_(impossible)
            skewed[lattice.places] = arrows.clamp(min=impossible)
        _, space, starts = lattice.variables(with_beta=True)
        results = []
        for high, low in (starts[:2], starts[2:]):
            whole = lattice.nodes_of(space, high, dtype).double()
            if dtype == torch.float32:
                whole += lattice.array(space, low, torch.bfloat16)[lattice.places].double()
            results.append(whole)
        evidence = lattice.kept[:8].view(torch.float64)[0]
        return results[0], results[1], evidence


def forward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """ln α(t,u) [T, U+1] (Eq. 16)."""
    return _variables(log_null, log_label)[0].to(log_null.dtype)


def backward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """ln β(t,u) [T, U+1] (Eq. 18)."""
    return _variables(log_null, log_label)[1].to(log_null.dtype)


def log_occupancy(log_null: Tensor, log_label: Tensor) -> Tensor:
    """ln α(t,u) β(t,u) / Pr(y|x) [T, U+1]; -inf everywhere where y is impossible."""
    log_alpha, log_beta, evidence = _variables(log_null, log_label)
    return (log_alpha + log_beta - evidence).to(log_null.dtype)
