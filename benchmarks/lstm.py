"""Time the peephole LSTM beside torch.nn.LSTM, which has no peepholes (on a GPU it is cuDNN's).

The layer is the paper's: bidirectional, 26 inputs, 128 units in each direction, T 304; on a GPU
there are larger ones too. Run it as `python benchmarks/lstm.py`. On a GPU,
`python benchmarks/lstm.py --precision tf32 bf16` times the layers that people train today.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partialmethod

import torch
from measure import DEVICE, captured, extra_megabytes, machine, medians, show
from torch import nn

from transduce import PeepholeLSTM

SHAPES = [(1, 304, 26, 128), (16, 304, 26, 128)]  # B, T, inputs, H
if DEVICE == "cuda":
    SHAPES += [(64, 304, 26, 128), (64, 304, 80, 256), (64, 400, 80, 512)]

LAYERS = [  # B, T, inputs, H, directions
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
    model: nn.Module, x: torch.Tensor, upstream: torch.Tensor, others: Sequence[torch.Tensor] = ()
) -> Callable[[], object]:
    """Return a function that runs the model and computes the gradients of weights and `others`."""
    weights = [*model.parameters(), *others]
    return lambda: torch.autograd.grad(model(x)[0], weights, upstream)


PRECISIONS = ("float32", "tf32", "bf16", "fp16")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=[])
    precisions = parser.parse_args().precision
    if precisions and DEVICE != "cuda":
        parser.error("--precision needs a GPU")
    print(machine())
    torch.manual_seed(0)
    for precision in precisions:
        layers(precision)
    if not precisions:
        paper()


def paper() -> None:
    """Time the paper's layer, and others, in float32."""
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


def layers(precision: str) -> None:
    """Time larger layers in one precision; the gradients are those of x and all weights.

    Under autocast PyTorch runs nn.LSTM in float16 whatever the type.
    """
    if precision in ("float32", "tf32"):
        switch = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = switch
        torch.backends.cudnn.rnn.fp32_precision = switch
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    rows = []
    for B, T, inputs, H, D in LAYERS:
        x = torch.randn(B, T, inputs, device=DEVICE, requires_grad=True)
        upstream = torch.randn(B, T, D * H, device=DEVICE)
        contenders: dict[str, nn.Module] = {
            "ours": PeepholeLSTM(inputs, H, bidirectional=D == 2),
            "theirs": nn.LSTM(inputs, H, bidirectional=D == 2, batch_first=True),
        }
        pairs = {}
        for name, model in contenders.items():
            gradient = upstream.half() if half and name == "theirs" else upstream
            pair = forward(model.to(DEVICE), x), forward_and_backward(model, x, gradient, [x])
            context = torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None)
            pairs[name] = [context(call) for call in pair]
        times = [medians({name: pair[i] for name, pair in pairs.items()}, 1) for i in (0, 1)]
        cells = [f"{times[0][name]:.2f} / {times[1][name]:.2f}" for name in contenders]
        rows.append([f"B {B}, T {T}, {inputs} -> {H} x {D}", *cells])
    columns = ["layer", "PeepholeLSTM", "nn.LSTM, no peepholes"]
    show(f"{precision}: forward / forward and backward, ms", columns, rows)


if __name__ == "__main__":
    main()
