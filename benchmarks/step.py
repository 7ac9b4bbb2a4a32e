"""Time of one training step of the paper's transducer, and of its parts.

A step runs both networks and the loss forward and backward, and the momentum update. The parts are
those of the paper's online training, which adds weight noise. 128 LSTM units in each direction and
in the prediction network, 26 inputs, 39 labels, T 304, U 40. On a GPU the step is also replayed
from a CUDA graph, which suits training with few different lengths. Run it as
`python benchmarks/step.py`.
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
    """Return the model, its optimiser, (frames, num_frames, labels), and num_labels."""
    model = Transducer(INPUTS, LABELS).to(DEVICE)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    frames = torch.randn(B, T, INPUTS, device=DEVICE)
    labels = torch.randint(1, LABELS + 1, (B, U), device=DEVICE)
    num_frames, num_labels = (torch.full((B,), n, device=DEVICE) for n in (T, U))
    return model, optimiser, (frames, num_frames, labels), num_labels


def step(B: int) -> Callable[[], object]:
    """Return a call that makes one training step with a batch of B sequences."""
    model, optimiser, inputs, num_labels = problem(B)

    def call() -> None:
        transcription, prediction, num_vectors = model(*inputs)
        loss = transducer_loss(transcription, prediction, inputs[2], num_vectors, num_labels).mean()
        optimiser.zero_grad(set_to_none=False)
        loss.backward()
        optimiser.step()

    return call


def parts() -> dict[str, Callable[[], object]]:
    """Return the parts of an online step, each as a call of its own."""
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
        "add and remove the weight noise": noise,
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
        "Parts of a step, B 1, with weight noise",
        ["part", "ms"],
        [[name, f"{ms:.2f}"] for name, ms in times.items()],
    )


if __name__ == "__main__":
    main()
