"""Training steps with one process and two, and a model of the time with 1 to 64 GPUs.

`python benchmarks/scaling.py` compares one process and two, of one thread each, which share the
sequences of a step over Gloo. `--device cuda` measures one process on the GPU at several batch
sizes instead, in under a minute. Both then print the model: a step takes the measured time of its
sequences, and the ring all-reduce of its gradients, 2 (n-1)/n x bytes / bandwidth and 2 (n-1)
times the latency, of which nothing is hidden behind the backward pass.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
from measure import machine, medians, show
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from transduce.architectures import NetworkConfig, build_network
from transduce.data.batches import Batch

GPUS_IN_A_MACHINE = 8
NVLINK, NETWORK = 450e9, 25e9  # bytes a second, in one direction, of each GPU
NVLINK_LATENCY, NETWORK_LATENCY = 5e-6, 20e-6  # seconds for each step of the ring
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# The paper's network and that of the recipe speech-transducer; inputs, frames and labels.
NETWORKS = {
    "paper": (NetworkConfig(), 26, (304, 40)),
    "speech": (
        NetworkConfig(hidden_size=320, num_layers=4, pooling=2, prediction_size=128),
        40,
        (800, 60),
    ),
}
NUM_LABELS = 39
# Seconds of a step with 32 sequences on an H200, if this run does not measure them:
# docs/scaling.md, of `--device cuda`.
KNOWN = {"paper": 3.48e-3, "speech": 44.7e-3}


class Objective(nn.Module):
    """The mean loss of a batch as a module, which DistributedDataParallel wraps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config, inputs, _ = NETWORKS[name]
        self.network = build_network(config, inputs, NUM_LABELS)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.network.training_losses(Batch((), *tensors))[1].mean()


def random_batch(name: str, B: int, device: str) -> tuple[Tensor, ...]:
    """Return the tensors of a batch of random frames and labels."""
    _, inputs, (T, U) = NETWORKS[name]
    frames, labels = torch.randn(B, T, inputs), torch.randint(1, NUM_LABELS + 1, (B, U))
    num_frames, num_labels = torch.full((B,), T), torch.full((B,), U)
    batch = Batch((), frames, num_frames, labels, num_labels).to(torch.device(device))
    return batch.tensors


def step(objective: nn.Module, tensors: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a call that makes one training step."""
    optimiser = torch.optim.AdamW(objective.parameters(), 1e-4)

    def call() -> None:
        objective(*tensors).backward()
        optimiser.step()
        optimiser.zero_grad()

    return call


def one_gpu() -> dict[str, float]:
    """Print the steps a second of one process on a GPU; return the seconds of a step at B 32."""
    rows, seconds = [], {}
    for name in NETWORKS:
        objective = Objective(name).cuda()
        for B in (1, 8, 32, 128):
            call = step(objective, random_batch(name, B, "cuda"))
            ms = medians({name: call}, seconds=2)[name]
            rows.append([name, str(B), f"{ms:.2f}", f"{1e3 / ms:.1f}", f"{B * 1e3 / ms:,.0f}"])
            if B == 32:
                seconds[name] = ms / 1e3
    columns = ["network", "sequences", "ms a step", "steps / s", "sequences / s"]
    show("One process on a GPU, float32", columns, rows)
    return seconds


def work(rank: int, port: int, B: int, rounds: int, results: multiprocessing.Queue) -> None:
    """Measure steps of B sequences in this process alone, and shared with the other, in turn."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    alone, shared = Objective("paper"), Objective("paper")
    calls = {
        "alone": step(alone, random_batch("paper", B, "cpu")),
        "shared": step(DistributedDataParallel(shared), random_batch("paper", B // 2, "cpu")),
    }
    times: dict[str, list[float]] = {f"{name}{of}": [] for name in calls for of in ("", ", CPU")}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            distributed.barrier()
            start, computed = time.perf_counter(), time.process_time()
            if name == "shared" or rank == 0:
                call()
            times[name].append(time.perf_counter() - start)
            times[f"{name}, CPU"].append(time.process_time() - computed)
    distributed.barrier()
    if rank == 0:
        results.put({name: median(seconds[1:]) for name, seconds in times.items()})
    distributed.destroy_process_group()


def two_processes() -> None:
    """Print the time of steps in one process and in two, in turn."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for B in (2, 8, 32):
        results = spawn.Queue()
        arguments = (29_511 + B, B, 15, results)
        multiprocessing.spawn(work, arguments, nprocs=2)
        found, row = results.get(), [str(B)]
        for of in ("", ", CPU"):
            alone, shared = (1e3 * found[f"{name}{of}"] for name in ("alone", "shared"))
            row += [f"{alone:.1f}", f"{shared:.1f}", f"{alone / shared:.2f}"]
        rows.append(row)
    columns = ["sequences", "one process, ms", "two, ms", "ratio", "CPU, ms", "CPU of one of two"]
    title = "The paper's network on the CPU, one thread each, over Gloo, medians"
    show(title, [*columns, "ratio"], rows)


def all_reduce(num_bytes: float, n: int) -> float:
    """Return the seconds of a ring all-reduce between n GPUs."""
    within = n <= GPUS_IN_A_MACHINE
    bandwidth, latency = (NVLINK, NVLINK_LATENCY) if within else (NETWORK, NETWORK_LATENCY)
    return 2 * (n - 1) / n * num_bytes / bandwidth + 2 * (n - 1) * latency


def model(seconds: dict[str, float]) -> None:
    """Print the step times that the model predicts, with 32 sequences on each GPU."""
    rows = []
    for name, alone in seconds.items():
        num_bytes = 4 * sum(weights.numel() for weights in Objective(name).parameters())
        for n in WIDTHS:
            exchange = all_reduce(num_bytes, n)
            rate, share = 32 * n / (alone + exchange), alone / (alone + exchange)
            rows.append(
                [
                    *(name if n == 1 else "", f"{num_bytes / 1e6:.1f}" if n == 1 else "", str(n)),
                    *(f"{1e3 * exchange:.2f}", f"{1e3 * (alone + exchange):.2f}"),
                    *(f"{rate:,.0f}", f"{100 * share:.0f} %"),
                ]
            )
    columns = ["network", "gradients, MB", "GPUs", "all-reduce, ms", "step, ms", "sequences / s"]
    title = (
        f"Model: 32 sequences on each GPU, {GPUS_IN_A_MACHINE} GPUs in a machine, NVLink "
        f"{NVLINK / 1e9:.0f} GB/s, between machines {NETWORK / 1e9:.0f} GB/s"
    )
    show(title, [*columns, "efficiency"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(machine())
    print(f"{os.getloadavg()[0]:.1f} processes wanted to run in the last minute")
    if options.device == "cuda":
        model(KNOWN | one_gpu())
    else:
        two_processes()
        model(KNOWN)


if __name__ == "__main__":
    main()
