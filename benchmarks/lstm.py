"""The peephole LSTM on the CPU beside torch.nn.LSTM, which has no peepholes.

Bidirectional, 26 inputs, 128 units in each direction, T 304, as in the paper's experiment. Run it
as `python benchmarks/lstm.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import extra_megabytes, machine, medians, show
from torch import nn

from transduce import PeepholeLSTM

T, INPUTS, HIDDEN = 304, 26, 128


def forward(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: model(x)


def forward_and_backward(
    model: nn.Module, x: torch.Tensor, upstream: torch.Tensor
) -> Callable[[], object]:
    weights = list(model.parameters())
    return lambda: torch.autograd.grad(model(x)[0], weights, upstream)


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    models = {
        "PeepholeLSTM": PeepholeLSTM(INPUTS, HIDDEN, bidirectional=True),
        "PeepholeLSTM, reference": PeepholeLSTM(
            INPUTS, HIDDEN, bidirectional=True, backend="reference"
        ),
        "nn.LSTM, no peepholes": nn.LSTM(INPUTS, HIDDEN, bidirectional=True, batch_first=True),
    }
    for B in (1, 16):
        x, upstream = torch.randn(B, T, INPUTS), torch.randn(B, T, 2 * HIDDEN)
        calls = {f"{name}|f": forward(model, x) for name, model in models.items()}
        calls |= {
            f"{name}|fb": forward_and_backward(model, x, upstream) for name, model in models.items()
        }
        times = medians(calls, seconds=20)
        rows = []
        for name in models:
            f, fb = times[f"{name}|f"], times[f"{name}|fb"]
            ratios = f / times["PeepholeLSTM|f"], fb / times["PeepholeLSTM|fb"]
            megabytes = extra_megabytes(calls[f"{name}|fb"])
            rows.append([name, *(f"{x:.2f}" for x in (f, fb, *ratios)), f"{megabytes:.1f}"])
        columns = ["forward", "and backward", "times ours", "times ours", "MB"]
        show(
            f"B {B}: bidirectional, {INPUTS} -> {HIDDEN} x 2, T {T}, float32, ms",
            ["contender", *columns],
            rows,
        )


if __name__ == "__main__":
    main()
