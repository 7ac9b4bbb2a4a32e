"""Time the peephole LSTM beside torch.nn.LSTM, which has no peepholes (on a GPU it is cuDNN's).

The layer is the paper's: bidirectional, 26 inputs, 128 units in each direction, T 304; on a GPU
there are larger ones too, also under autocast. Run it as `python benchmarks/lstm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod

import torch
from measure import DEVICE, captured, extra_megabytes, machine, medians, show
from torch import nn

from transduce import PeepholeLSTM

SHAPES = [(1, 304, 26, 128), (16, 304, 26, 128)]  # B, T, inputs, H
if DEVICE == "cuda":
    SHAPES += [(64, 304, 26, 128), (64, 304, 80, 256), (64, 400, 80, 512)]

HALF_SHAPES = [  # B, T, inputs, H, directions
    (16, 1024, 768, 768, 1),
    (32, 1000, 640, 640, 1),
    (64, 400, 1024, 1024, 1),
    (64, 400, 80, 512, 2),
    (32, 400, 80, 320, 2),
    (128, 500, 640, 320, 2),
    (64, 400, 1024, 1024, 2),
    (512, 20, 1024, 512, 2),
]


class Reference(PeepholeLSTM):
    """A PeepholeLSTM whose calls use the backend "reference"."""

    forward = partialmethod(PeepholeLSTM.forward, backend="reference")


class Eager(PeepholeLSTM):
    """A PeepholeLSTM whose calls use the backend "eager"."""

    forward = partialmethod(PeepholeLSTM.forward, backend="eager")


def forward(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs the model without gradients."""
    return torch.no_grad()(lambda: model(x))


def forward_and_backward(
    model: nn.Module, x: torch.Tensor, upstream: torch.Tensor
) -> Callable[[], object]:
    """Return a function that runs the model and computes the gradients of its weights."""
    weights = list(model.parameters())
    return lambda: torch.autograd.grad(model(x)[0], weights, upstream)


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    for B, T, inputs, H in SHAPES:
        models = {
            "PeepholeLSTM": PeepholeLSTM(inputs, H, bidirectional=True),
            "nn.LSTM, no peepholes": nn.LSTM(inputs, H, bidirectional=True, batch_first=True),
        }
        if T * B < 10_000:
            models["PeepholeLSTM, eager"] = Eager(inputs, H, bidirectional=True)
            models["PeepholeLSTM, reference"] = Reference(inputs, H, bidirectional=True)
        x = torch.randn(B, T, inputs, device=DEVICE)
        upstream = torch.randn(B, T, 2 * H, device=DEVICE)
        calls = {}
        for name, model in models.items():
            model.to(DEVICE)
            calls[name] = forward(model, x), forward_and_backward(model, x, upstream)
            if DEVICE == "cuda" and name == "PeepholeLSTM":
                calls[f"{name}, in a graph"] = tuple(captured(call) for call in calls[name])
        times = [
            medians({name: pair[i] for name, pair in calls.items()}, 10 if DEVICE == "cpu" else 2)
            for i in (0, 1)
        ]
        rows = []
        for name, pair in calls.items():
            ours = (times[i]["PeepholeLSTM"] for i in (0, 1))
            f, fb = times[0][name], times[1][name]
            ratios = (t / o for t, o in zip((f, fb), ours, strict=True))
            megabytes = extra_megabytes(pair[1])
            rows.append([name, *(f"{x:.2f}" for x in (f, fb, *ratios)), f"{megabytes:.1f}"])
        columns = ["forward", "and backward", "times ours", "times ours", "MiB"]
        show(
            f"B {B}: bidirectional, {inputs} -> {H} x 2, T {T}, float32, ms",
            ["contender", *columns],
            rows,
        )
    if DEVICE == "cuda":
        half_precision()


def half_precision() -> None:
    """Time layers under autocast, where PyTorch runs cuDNN's in float16 whatever the type."""
    rows = []
    for B, T, inputs, H, D in HALF_SHAPES:
        x = torch.randn(B, T, inputs, device=DEVICE)
        upstream = torch.randn(B, T, D * H, device=DEVICE)
        ours = PeepholeLSTM(inputs, H, bidirectional=D == 2).to(DEVICE)
        theirs = nn.LSTM(inputs, H, bidirectional=D == 2, batch_first=True).to(DEVICE)
        calls = []
        for model, dtype in (
            (ours, torch.bfloat16),
            (ours, torch.float16),
            (theirs, torch.float16),
        ):
            gradient = upstream.to(dtype) if model is theirs else upstream
            pair = forward(model, x), forward_and_backward(model, x, gradient)
            calls.append([torch.autocast("cuda", dtype)(call) for call in pair])
        times = [
            medians(dict(zip("abc", kind, strict=True)), 1) for kind in zip(*calls, strict=True)
        ]
        cells = [f"{f:.2f} / {fb:.2f}" for f, fb in zip(*(t.values() for t in times), strict=True)]
        rows.append([f"B {B}, T {T}, {inputs} -> {H} x {D}", *cells])
    columns = ["layer", "bfloat16", "float16", "nn.LSTM, float16"]
    show("Autocast: forward / forward and backward, ms", columns, rows)


if __name__ == "__main__":
    main()
