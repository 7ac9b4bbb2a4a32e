"""Time of a training step with a teacher's targets, beside one without.

The steps are those of the recipe letters-transducer, from the padding of a batch to the update, and
of the paper's sizes (benchmarks/step.py) with 16 sequences. The targets are computed beforehand, as
in training. The eager loss is the one of a GPU. Run it as `python benchmarks/distil.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from measure import DEVICE, machine, medians, show
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce import Transducer, transducer_loss
from transduce.data.batches import Batch, Batches, Example
from transduce.kernels.backends import Backend
from transduce.lattice.distillation import distillation_loss
from transduce.training.corpus import read_corpus
from transduce.training.recipe import read_recipe, shipped_recipes

T, U, INPUTS, LABELS, B = 304, 40, 26, 39, 16
BACKENDS: tuple[Backend, ...] = ("cpu", "eager") if DEVICE == "cpu" else ("eager",)


def targets_of(example: Example, num_labels: int) -> Tensor:
    """Draw the targets of an example, [U+1, K+1]."""
    return torch.randn(example.num_labels + 1, num_labels + 1).softmax(-1).half()


def step(
    network: Transducer,
    batches: Sequence[Sequence[Example]],
    targets: dict[int, Tensor] | None,
    backend: Backend = "auto",
) -> Callable[[], object]:
    """Return a call that makes one training step; without targets, the plain one."""
    optimiser = torch.optim.AdamW(network.parameters(), 1e-4)
    turns = cycle(batches)

    def call() -> None:
        examples = next(turns)
        batch = Batch.of(examples)
        if targets is not None:
            padded = pad_sequence([targets[id(one)] for one in examples], batch_first=True)
            batch = replace(batch, targets=padded)
        batch = batch.to(DEVICE)
        lattice = network._outputs(batch)
        if batch.targets is None:
            losses = transducer_loss(*lattice)
        else:
            losses = distillation_loss(*(*lattice, batch.targets), backend=backend)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimiser.step()
        optimiser.zero_grad()

    return call


def rows(name: str, network: Transducer, batches: Sequence[Sequence[Example]]) -> list[list[str]]:
    """Time the steps; return the rows of a table."""
    num_labels = network.prediction_network.output.out_features - 1
    targets = {id(one): targets_of(one, num_labels) for batch in batches for one in batch}
    calls = {"without a teacher": step(network, batches, None)}
    calls |= {f"with, {one}": step(network, batches, targets, one) for one in BACKENDS}
    times = medians(calls, seconds=20 if DEVICE == "cpu" else 5)
    plain = times["without a teacher"]
    return [[name, call, f"{ms:.2f}", f"{ms / plain:.2f}"] for call, ms in times.items()]


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    recipe = read_recipe(shipped_recipes()["letters-transducer"], {"data.num_training": "2000"})
    corpus = read_corpus(recipe.data)
    sizes = (corpus.signature.input_size, len(corpus.signature.targets))
    most = recipe.train.max_sequences
    order = Batches(corpus.training, 10**6, 0, max_sequences=most).epoch(0)
    batches = [[corpus.training[i] for i in ids] for ids in order]
    table = rows("letters-transducer, B 64", Transducer(*sizes).to(DEVICE), batches)
    drawn = [(torch.randn(T, INPUTS), torch.randint(1, LABELS + 1, (U,))) for _ in range(B)]
    speech = [Example(corpus.training[0].pair, *one) for one in drawn]
    table += rows(f"T {T}, U {U}, B {B}", Transducer(INPUTS, LABELS).to(DEVICE), [speech])
    show("A training step, float32", ["task", "teacher", "ms", "ratio"], table)


if __name__ == "__main__":
    main()
