"""Time the peephole LSTM beside torch.nn.LSTM, which has no peepholes (on a GPU it is cuDNN's).

The layer is the paper's: bidirectional, 26 inputs, 128 units in each direction, T 304; on a GPU
there are larger ones too. Run it as `python benchmarks/lstm.py`.
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


if __name__ == "__main__":
    main()
