"""Time one training step of the paper's transducer, and the parts of an online step.

A step is both networks, the loss, the backward pass and the momentum update; online training adds
noise to the weights. The networks have 128 LSTM units in each direction and in the prediction
network, 26 inputs and 39 labels; T is 304 and U 40. On a GPU the step is also timed as one CUDA
graph, which suits training on batches whose lengths repeat. Run it as `python benchmarks/step.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import DEVICE, captured, extra_megabytes, machine, medians, show
from torch import Tensor

from transduce import Transducer, transducer_loss
from transduce.training.regularisation import weight_noise

NOISE = 0.075
T, U, INPUTS, LABELS = 304, 40, 26, 39


def problem(B: int) -> tuple[Transducer, torch.optim.SGD, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the model, its optimiser, its inputs, and the numbers of labels."""
    model = Transducer(INPUTS, LABELS).to(DEVICE)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    frames = torch.randn(B, T, INPUTS, device=DEVICE)
    labels = torch.randint(1, LABELS + 1, (B, U), device=DEVICE)
    num_frames, num_labels = (torch.full((B,), n, device=DEVICE) for n in (T, U))
    return model, optimiser, (frames, num_frames, labels), num_labels


def step(B: int) -> Callable[[], object]:
    """Return a function that runs one training step on B utterances."""
    model, optimiser, inputs, num_labels = problem(B)

    def call() -> None:
        transcription, prediction, num_vectors = model(*inputs)
        loss = transducer_loss(transcription, prediction, inputs[2], num_vectors, num_labels).mean()
        optimiser.zero_grad(set_to_none=False)
        loss.backward()
        optimiser.step()

    return call


def parts() -> dict[str, Callable[[], object]]:
    """Return a function for each part of an online step."""
    model, optimiser, inputs, num_labels = problem(1)
    _, num_frames, labels = inputs
    weights, generator = list(model.parameters()), torch.Generator(DEVICE)

    def losses(f: Tensor, g: Tensor) -> Tensor:
        return transducer_loss(f, g, labels, num_frames, num_labels).sum()

    f, g, _ = model(*inputs)
    f, g = f.detach().requires_grad_(), g.detach().requires_grad_()
    upstream = torch.autograd.grad(losses(f, g), (f, g))

    def noise() -> None:
        with weight_noise(weights, NOISE, generator):
            pass

    def networks() -> None:
        outputs = model(*inputs)[:2]
        torch.autograd.backward(outputs, upstream)

    def whole() -> None:
        with weight_noise(weights, NOISE, generator):
            losses(*model(*inputs)[:2]).backward()
        optimiser.step()
        optimiser.zero_grad()

    networks()
    return {
        "add noise to the weights and remove it": noise,
        "both networks, forward": lambda: model(*inputs),
        "both networks, forward and backward": networks,
        "the loss and its gradients": lambda: torch.autograd.grad(losses(f, g), (f, g)),
        "the update": lambda: optimiser.step(),
        "the whole step": whole,
    }


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    rows = []
    for B in (1, 32):
        calls = {"step": step(B)}
        if DEVICE == "cuda":
            calls["step, in a graph"] = captured(step(B))
        for name, ms in medians(calls, seconds=20 if DEVICE == "cpu" else 3).items():
            rows.append([f"B {B}", name, f"{ms:.2f}", f"{extra_megabytes(calls[name]):.1f}"])
    show(f"T {T}, U {U}, float32", ["batch", "contender", "ms", "MiB"], rows)
    times = medians(parts(), seconds=10)
    show(
        "parts of an online step, B 1, with noise on the weights",
        ["part", "ms"],
        [[name, f"{ms:.2f}"] for name, ms in times.items()],
    )


if __name__ == "__main__":
    main()
