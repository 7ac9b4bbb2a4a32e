"""Time of the functions of `transduce.analysis` at the paper's sizes: T 300, U 40.

Run it as `python benchmarks/analysis.py`.
"""

from __future__ import annotations

import torch
from measure import DEVICE, machine, medians, show

from transduce import Alphabet, Transducer
from transduce.analysis import output_bars, sensitivity, view_lattice
from transduce.architectures import NetworkConfig
from transduce.data.pairs import Notation
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature

T, U, INPUTS, LABELS = 300, 40, 26, 39


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    alphabet = Alphabet([str(k) for k in range(LABELS)])
    signature = Signature(alphabet, Notation("spaces", None))
    model = TrainedModel(Transducer(INPUTS, LABELS).to(DEVICE), NetworkConfig(), signature)
    frames, labels = torch.randn(T, INPUTS), torch.randint(1, LABELS + 1, (U,))
    view = view_lattice(model, frames, labels)
    calls = {
        "view_lattice": lambda: view_lattice(model, frames, labels),
        "output_bars": lambda: output_bars(view, T // 2, U // 2),
        "sensitivity": lambda: sensitivity(model, view, T // 2, U // 2),
    }
    times = medians(calls, 10)
    show(f"T {T}, U {U}, {INPUTS} inputs, {LABELS} labels, 128 units", ["", "ms"],
         [[name, f"{time:.1f}"] for name, time in times.items()])  # fmt: skip


if __name__ == "__main__":
    main()
