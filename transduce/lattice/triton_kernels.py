"""The output lattice on the GPU: CUDA C++ compiled by NVRTC, and cuBLAS's products (Eqs. 12-22).

Triton has no way to hand a value to the neighbouring column of a diagonal without going through
memory, which is most of a step's time; a warp's shuffle takes nanoseconds. Nothing here waits for
the GPU: an item whose numbers, lengths or labels are not valid has loss NaN.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from transduce.nvrtc import Kernel, kernels

SOURCE = Path(__file__).with_name("lattice.cu").read_text()
NAMES = (
    *("exponentials", "transitions", "variables", "losses", "flow", "gradients"),
    *("joint_transitions", "joint_gradient"),
)
INPUTS = {torch.float16: 16, torch.bfloat16: 17, torch.float32: 32, torch.float64: 64}


def _load(
    dtype: torch.dtype, threads: int, per_thread: int, device: torch.device
) -> dict[str, Kernel]:
    """The kernels for logits of a type, and lattices of so many columns."""
    wide = dtype == torch.float64
    most = next(most for most in (128, 512, 1024) if threads <= most)
    options = (
        "-DDOUBLE" if wide else "-DSINGLE",
        f"-Dreal={'double' if wide else 'float'}",
        f"-DINPUT={INPUTS[dtype]}",
        f"-DE={per_thread}",
        f"-DAHEAD={max(2, 8 // per_thread)}",
        f"-DTHREADS={most}",
    )
    index = device.index if device.index is not None else torch.cuda.current_device()
    return dict(zip(NAMES, kernels(SOURCE, options, NAMES, index), strict=True))


class _Lattice:
    """A batch's lattice: its sizes, its kernels, and its skewed arrays, new or those saved."""

    def __init__(
        self,
        labels: Tensor,
        num_frames: Tensor,
        num_labels: Tensor,
        sizes: tuple[int, int, int],  # T, U, K+1
        dtype: torch.dtype,  # of the logits
        null: int = 0,
        saved: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.labels, self.lengths = labels, (num_frames, num_labels)
        self.B, (self.T, self.U, self.K), self.null = len(labels), sizes, null
        per_thread = 1  # a step is short, until a block's 1024 threads are too few
        while 1024 * per_thread < self.U + 1:
            per_thread *= 2
        self.threads = -(-(self.U + 1) // (32 * per_thread)) * 32
        self.rows, self.columns = self.T + self.U + 1, self.threads * per_thread
        self.kernels = _load(dtype, self.threads, per_thread, labels.device)
        if saved is None:
            shape, wide = (
                (self.B, self.rows, self.columns),
                torch.promote_types(dtype, torch.float32),
            )
            saved = (
                labels.new_empty(shape, dtype=wide),
                labels.new_empty(shape, dtype=torch.float64),
                labels.new_empty(shape, dtype=torch.float64),
                labels.new_empty(self.B, dtype=torch.float64),
                labels.new_empty(self.B, self.U, 2, dtype=torch.int32),
            )
        self.log_label, self.log_alpha, self.log_beta, self.evidence, self.chain = self.saved = (
            saved
        )
        self.log_null = torch.empty_like(self.log_label)
        self.loss = self.log_label.new_empty(self.B)

    def run(self, name: str, blocks: int, threads: int, *arguments: Tensor | int | float) -> None:
        self.kernels[name]((blocks, 1), threads, arguments)

    def variables(self, with_beta: bool) -> None:
        """α, β and the loss (Eqs. 16-18)."""
        self.kernels["variables"](
            (self.B, 2 if with_beta else 1),
            self.threads,
            (
                *(self.log_null, self.log_label, *self.lengths),
                *(self.log_alpha, self.log_beta, self.evidence),
                *(self.T, self.U, self.rows, self.columns),
            ),
        )
        self.run(
            "losses", self.B, 128, self.labels, *self.lengths, self.evidence, self.loss, self.chain,
            self.T, self.U, self.K, self.null,
        )  # fmt: skip

    def flow(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Occupancies [B, T, U+1], over the total if there is one; the labels' part, skewed."""
        passed = self.log_null.new_empty(self.B, self.T, self.U + 1)
        by_label = torch.empty_like(self.log_label)
        self.run(
            "flow", -(-passed.numel() // 256), 256,
            self.log_alpha, self.log_beta, self.log_label, self.evidence, *self.lengths,
            passed if total is None else total, passed, by_label,
            self.B, self.T, self.U, self.rows, self.columns, int(total is not None),
        )  # fmt: skip
        return passed, by_label


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The batched product in full float32, whatever PyTorch was told of TF32."""
    if not torch.backends.cuda.matmul.allow_tf32:
        return torch.bmm(a, b)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.bmm(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of the additive density, and what its gradients will need."""
    with torch.cuda.device(f.device):
        f, g = f.contiguous(), g.contiguous()
        B, T, K = f.shape
        U = g.shape[1] - 1
        lattice = _Lattice(labels, num_frames, num_labels, (T, U, K), f.dtype)
        exp_f, exp_g = torch.empty_like(f), torch.empty_like(g)
        top_f, top_g = f.new_empty(B, T), f.new_empty(B, U + 1)
        weak_rows = labels.new_zeros(B * (T + U + 1), dtype=torch.int32)
        lattice.run(
            "exponentials", B * (T + U + 1), _threads(K),
            f, g, num_frames, num_labels, exp_f, exp_g, top_f, top_g, B, T, U, K,
        )  # fmt: skip
        total = _product(exp_f, exp_g.transpose(1, 2))  # Eq. 13's denominator
        info = torch.finfo(f.dtype)
        lattice.run(
            "transitions", -(-lattice.log_null.numel() // 256), 256,
            f, g, labels, num_frames, num_labels, top_f, top_g, total,
            lattice.log_null, lattice.log_label, weak_rows,
            B, T, U, K, lattice.rows, lattice.columns, K * info.tiny / info.eps,
        )  # fmt: skip
        lattice.variables(with_gradients)
        lengths = (labels, num_frames, num_labels)
        return lattice.loss, (f, g, *lengths, exp_f, exp_g, total, weak_rows, *lattice.saved)


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    exp_f: Tensor,
    exp_g: Tensor,
    total: Tensor,
    weak_rows: Tensor,
    *lattice_saved: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to f and g (Eqs. 20-22), times upstream [B]."""
    with torch.cuda.device(f.device):
        sizes = (f.shape[1], g.shape[1] - 1, f.shape[2])
        lattice = _Lattice(labels, num_frames, num_labels, sizes, f.dtype, saved=lattice_saved)
        passed, by_label = lattice.flow(total)
        grad_f, grad_g = _product(passed, exp_g), _product(passed.transpose(1, 2), exp_f)
        lattice.run(
            "gradients", lattice.B * lattice.rows, _threads(lattice.K),
            f, g, exp_f, exp_g, lattice.labels, lattice.chain, *lattice.lengths,
            lattice.log_alpha, lattice.log_beta, lattice.evidence, by_label, passed,
            weak_rows, upstream.contiguous(), grad_f, grad_g,
            lattice.B, lattice.T, lattice.U, lattice.K, lattice.rows, lattice.columns,
        )  # fmt: skip
        return grad_f, grad_g


def _threads(num_outputs: int) -> int:
    return min(256, -(-num_outputs // 32) * 32)


def _joint_lattice(
    logits: Tensor, labels: Tensor, num_frames: Tensor, num_labels: Tensor, null: int, fused: bool
) -> tuple[_Lattice, Tensor]:
    B, T, columns, K = logits.shape
    sizes = (T, columns - 1, K)
    lattice = _Lattice(labels, num_frames, num_labels, sizes, logits.dtype, null)
    log_total = lattice.loss.new_empty(B, T, columns)
    lattice.run(
        "joint_transitions", -(-lattice.log_null.numel() // 8), 256,
        logits, labels, num_frames, num_labels, log_total, lattice.log_null, lattice.log_label,
        B, T, columns - 1, K, lattice.rows, lattice.columns, null, int(fused),
    )  # fmt: skip
    return lattice, log_total


def joint_forward(
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """The loss [B] of any joint network's logits [B, T, U+1, K+1]."""
    with torch.cuda.device(logits.device):
        logits = logits.contiguous()
        lattice, log_total = _joint_lattice(logits, labels, num_frames, num_labels, null, fused)
        lattice.variables(with_beta=False)
        return lattice.loss, log_total


def joint_backward(
    upstream: Tensor,
    logits: Tensor,
    log_total: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    clamp: float,
) -> Tensor:
    """The gradient with respect to the logits, clamped before it is scaled by `upstream`."""
    with torch.cuda.device(logits.device):
        logits = logits.contiguous()
        B, T, columns, K = logits.shape
        lattice, log_total = _joint_lattice(logits, labels, num_frames, num_labels, null, fused)
        lattice.variables(with_beta=True)
        occupancy, by_label = lattice.flow(None)
        grad = torch.empty_like(logits)
        lattice.run(
            "joint_gradient", -(-log_total.numel() // 8), 256,
            logits, log_total, labels, num_frames, num_labels, occupancy, by_label,
            lattice.evidence, upstream.contiguous(), grad,
            B, T, columns - 1, K, lattice.rows, lattice.columns, null, int(fused), float(clamp),
        )  # fmt: skip
        return grad
