"""Time the transducer's loss and gradient: ours, pure PyTorch, and the peers that are installed.

All contenders get f and g and return the gradients with respect to both; those that need the joint
tensor f + g build it. Run it as `python benchmarks/loss.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from measure import DEVICE, captured, extra_megabytes, machine, medians, show
from torch import Tensor
from torch.nn.functional import pad

from transduce import rnnt_loss, transducer_loss
from transduce.kernels.sentinels import IMPOSSIBLE_FLOAT32 as LOW
from transduce.lattice.loss import lattice_loss

SHAPES = {"S1": (1, 304, 40, 40), "S2": (16, 304, 40, 40), "S3": (8, 400, 100, 500)}
if DEVICE == "cuda":
    SHAPES["S4"] = (32, 500, 100, 1024)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Batch:
    f: Tensor
    g: Tensor
    labels: Tensor
    num_frames: Tensor
    num_labels: Tensor

    def gradients(self, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed loss and its gradients with respect to f and g."""
        total = loss(self.f, self.g, self.labels, self.num_frames, self.num_labels).sum()
        return total.detach(), *torch.autograd.grad(total, (self.f, self.g))

    def with_integers(self, dtype: torch.dtype) -> Batch:
        """Return the batch with labels and lengths of another integer type."""
        integers = (x.to(dtype) for x in (self.labels, self.num_frames, self.num_labels))
        return Batch(self.f, self.g, *integers)

    def double(self) -> Batch:
        """Return the batch with f and g in float64."""
        f, g = (x.detach().double().requires_grad_() for x in (self.f, self.g))
        return Batch(f, g, self.labels, self.num_frames, self.num_labels)


def batch(B: int, T: int, U: int, K1: int) -> Batch:
    """Draw a batch without padding; f and g are standard normal."""
    torch.manual_seed(0)
    f, g = torch.randn(B, T, K1, device=DEVICE), torch.randn(B, U + 1, K1, device=DEVICE)
    labels = torch.randint(1, K1, (B, U), device=DEVICE)
    lengths = (torch.full((B,), n, device=DEVICE) for n in (T, U))
    return Batch(f.requires_grad_(), g.requires_grad_(), labels, *lengths)


# --- Pure PyTorch -------------------------------------------------------------------------------


def transitions(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln ∅ [B, T, U+1] and ln y [B, T, U], with the normaliser as a matrix product."""
    top_f, top_g = f.detach().amax(2, keepdim=True), g.detach().amax(2, keepdim=True)
    total = torch.bmm((f - top_f).exp(), (g - top_g).exp().transpose(1, 2))
    log_total = total.log() + top_f + top_g.transpose(1, 2)
    log_null = f[:, :, None, 0] + g[:, None, :, 0] - log_total
    label_f = f.gather(2, labels[:, None, :].expand(-1, f.shape[1], -1))
    label_g = g[:, :-1].gather(2, labels[..., None])[..., 0]
    return log_null, label_f + label_g[:, None] - log_total[:, :, :-1]


def by_diagonals(f: Tensor, g: Tensor, labels: Tensor, T: Tensor, U: Tensor) -> Tensor:
    """Return the loss by T+U steps, each a vector over u, differentiated by autograd."""
    log_null, log_label = transitions(f, g, labels)
    B, max_T, columns = log_null.shape

    def diagonals(x: Tensor) -> tuple[Tensor, ...]:
        skewed = pad(x.transpose(1, 2), (0, columns), value=LOW).reshape(B, -1)
        length = max_T + columns - 1
        return skewed[:, : columns * length].reshape(B, columns, length).unbind(2)

    null, label = diagonals(log_null), diagonals(pad(log_label, (0, 1), value=LOW))
    alpha = f.new_full((B, columns), LOW)
    alpha[:, 0] = 0
    alphas = [alpha]
    for n in range(1, max_T + columns - 1):
        up = pad((alpha + label[n - 1])[:, :-1], (1, 0), value=LOW)
        alpha = torch.logaddexp(alpha + null[n - 1], up)
        alphas.append(alpha)
    item = torch.arange(B, device=f.device)
    return -(torch.stack(alphas, 1)[item, T + U - 1, U] + log_null[item, T - 1, U])


def by_labels(f: Tensor, g: Tensor, labels: Tensor, T: Tensor, U: Tensor) -> Tensor:
    """Return the loss by U+1 steps, each a cumulative sum over t.

    The steps are fewer, but large sums cancel in float32.
    """
    log_null, log_label = transitions(f, g, labels)
    nulls = pad(log_null.cumsum(1), (0, 0, 1, 0))[:, :-1]  # ln of the product of all nulls before t
    alpha = nulls[:, :, 0]
    alphas = [alpha]
    for u in range(1, log_null.shape[2]):
        entered = alpha + log_label[:, :, u - 1] - nulls[:, :, u]
        alpha = entered.logcumsumexp(1) + nulls[:, :, u]
        alphas.append(alpha)
    item = torch.arange(len(f), device=f.device)
    return -(torch.stack(alphas, 2)[item, T - 1, U] + log_null[item, T - 1, U])


# --- Peers, where they can be imported ----------------------------------------------------------


def joint(f: Tensor, g: Tensor) -> Tensor:
    return f[:, :, None] + g[:, None]


def peers() -> dict[str, tuple[Loss, torch.dtype]]:
    """Return the installed peers, each with the integer type that it needs."""
    found: dict[str, tuple[Loss, torch.dtype]] = {}
    if fast_rnnt := _module("fast_rnnt"):
        found["fast_rnnt simple"] = (
            lambda f, g, y, T, U: fast_rnnt.rnnt_loss_simple(
                g, f, y, 0, torch.stack([0 * U, 0 * T, U, T], 1), reduction="none"
            ),
            torch.int64,
        )
    if awni := _module("transducer.torch_binding"):
        found["awni/transducer"] = (
            lambda f, g, y, T, U: awni.TransducerLoss()(f, g, y.flatten(), T, U),
            torch.int32,
        )
    for name, loss in peers_of_logits().items():
        found[name] = (lambda f, g, *rest, loss=loss: loss(joint(f, g), *rest), torch.int32)
    return found


def peers_of_logits() -> dict[str, Callable[..., Tensor]]:
    """Return the installed peers that take a joint network's logits; their integers are int32."""
    found: dict[str, Callable[..., Tensor]] = {}
    for name, module in (
        ("warp-transducer", "warprnnt_pytorch"),
        ("torchaudio", "torchaudio.functional"),
    ):
        if peer := _module(module):
            found[name] = partial(peer.rnnt_loss, blank=0, reduction="none")
    if DEVICE == "cuda" and (warp_rnnt := _module("warp_rnnt")):  # it has no CPU version
        found["warp_rnnt"] = lambda logits, *rest: warp_rnnt.rnnt_loss(
            logits.log_softmax(-1), *rest, gather=True
        )
    return found


@cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        print(f"{name} is not installed: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def logits_gradient(loss: Callable[..., Tensor], data: Batch) -> Callable[[], object]:
    """Return a call that computes a loss of given logits and its gradient."""
    logits = joint(data.f, data.g).detach().requires_grad_()
    rest = data.labels, data.num_frames, data.num_labels
    return lambda: torch.autograd.grad(loss(logits, *rest).sum(), logits)


def arrows_gradient(data: Batch) -> Callable[[], object]:
    """Return a call that computes `lattice_loss` of given arrows and its gradients."""
    with torch.no_grad():
        arrows = [x.requires_grad_() for x in transitions(data.f, data.g, data.labels)]
    lengths = data.num_frames, data.num_labels
    return lambda: torch.autograd.grad(lattice_loss(*arrows, *lengths).sum(), arrows)


def graphs(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Return the replays of all calls that can be captured in a CUDA graph; none on the CPU."""
    found: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items() if DEVICE == "cuda" else ():
        try:
            found[f"{name}, in a graph"] = captured(call)
        except RuntimeError as error:
            print(f"{name} cannot be captured: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def table(title: str, calls: dict[str, Callable[[], Any]], exact: Tensor | None) -> None:
    """Print the contenders' times, memory and, where the loss is known exactly, its error."""
    first = next(iter(calls))
    times = medians(calls, seconds=10 if DEVICE == "cpu" else 3)
    rows = []
    for name, call in calls.items():
        row = (times[name], extra_megabytes(call), times[name] / times[first])
        rows.append([name, *(f"{x:.{d}f}" for x, d in zip(row, (3, 1, 1), strict=True))])
        replayed = exact is None or name.endswith("a graph")
        rows[-1].append("" if replayed else f"{abs(float(call()[0] / exact) - 1):.0e}")
    show(title, ["contender", "ms", "MiB", "times ours", "error of the loss"], rows)


def main() -> None:
    print(machine())
    ours: dict[str, Loss] = {
        "transducer_loss": transducer_loss,
        "rnnt_loss, of the joint tensor": lambda f, g, y, T, U: rnnt_loss(
            joint(f, g), y, T, U, blank=0, reduction="none"
        ),
        "pure PyTorch, by diagonals": by_diagonals,
        "pure PyTorch, by labels": by_labels,
    }
    of_logits = {"rnnt_loss": partial(rnnt_loss, blank=0, reduction="none")}
    for name, (B, T, U, K1) in SHAPES.items():
        data = batch(B, T, U, K1)
        calls = {which: partial(data.gradients, loss) for which, loss in ours.items()}
        for which, (loss, dtype) in peers().items():
            calls[which] = partial(data.with_integers(dtype).gradients, loss)
        calls |= graphs({which: call for which, call in calls.items() if "pure" not in which})
        exact = data.double().gradients(transducer_loss)[0]
        size = f"{name}: B {B}, T {T}, U {U}, K+1 {K1}, float32"
        table(f"{size}, loss and gradient from f and g", calls, exact)
        calls = {which: logits_gradient(loss, data) for which, loss in of_logits.items()}
        narrow = data.with_integers(torch.int32)
        for which, peer in peers_of_logits().items():
            calls[which] = logits_gradient(peer, narrow)
        calls["lattice_loss, from arrows"] = arrows_gradient(data)
        calls |= graphs(calls)
        table(f"{size}, loss and gradient from logits", calls, None)


if __name__ == "__main__":
    main()
