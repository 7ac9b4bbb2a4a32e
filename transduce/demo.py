"""The demonstration: numbers in digits become Roman numerals, which are often longer."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.decoding import Hypothesis, greedy_search
from transduce.lattice.loss import (
    best_alignment,
    lattice_transitions,
    log_occupancy,
    transducer_loss,
)
from transduce.networks import Transducer

DIGITS, NUMERALS = Alphabet("0123456789"), Alphabet("IVXLCDM")
VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40}
VALUES |= {"X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1}


def roman(number: int) -> str:
    numeral = ""
    for letters, value in VALUES.items():
        count, number = divmod(number, value)
        numeral += letters * count
    return numeral


def pad(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The sequences as one tensor [B, longest], and their lengths [B]."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)
    return padded, torch.tensor([len(s) for s in sequences])


def run(steps: int, seed: int, figure: Path | None = None) -> None:
    """Train a transducer on generated pairs, and show what it makes of numbers it has not seen."""
    console = Console()
    torch.manual_seed(seed)
    numbers = random.Random(seed).sample(range(1, 4000), 3999)
    held_out, training = numbers[:400], numbers[400:]
    longer = sum(len(roman(n)) > len(str(n)) for n in numbers) / len(numbers)
    console.print(
        f"{len(training)} numbers to learn from, {len(held_out)} held out; of {longer:.0%} the "
        "output is longer than the input."
    )
    model = Transducer(input_size=len(DIGITS), num_labels=len(NUMERALS), hidden_size=64)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    shuffled = random.Random(seed)
    start = time.perf_counter()
    with console.status("compiling the kernels, once"):
        train_step(model, optimiser, training[:64])
    console.print(f"kernels ready after {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    for step in range(1, steps + 1):
        bits = train_step(model, optimiser, shuffled.sample(training, 64))
        if step % 50 == 0 or step == steps:
            rate = step / (time.perf_counter() - start)
            console.print(f"step {step:4d}   {bits:6.3f} bits a label   {rate:.0f} steps a second")
    hypotheses = transcribe(model, held_out)
    right = sum(
        text(found) == roman(number) for number, found in zip(held_out, hypotheses, strict=True)
    )
    console.print(f"{right} of {len(held_out)} held-out numbers are right ({right / 4:.1f} %)")
    table = Table("number", "transduced", "correct", "emitted at each digit")
    for number, found in list(zip(held_out, hypotheses, strict=True))[:8]:
        table.add_row(str(number), text(found), roman(number), by_digit(number, found))
    console.print(table)
    if figure is not None:
        draw(model, held_out[0], figure)
        console.print(f"the output lattice of {held_out[0]} is in {figure}")


def train_step(model: Transducer, optimiser: torch.optim.Optimizer, numbers: list[int]) -> float:
    """One step of gradient descent; returns the loss in bits a label."""
    frames, num_frames = pad([DIGITS.encode(str(n)) for n in numbers])
    labels, num_labels = pad([NUMERALS.encode(roman(n)) for n in numbers])
    transcription, prediction, num_frames = model(frames, num_frames, labels)
    loss = transducer_loss(transcription, prediction, labels, num_frames, num_labels)
    optimiser.zero_grad()
    torch.autograd.backward(loss.mean())
    optimiser.step()
    return float(loss.detach().sum() / num_labels.sum()) / 0.6931471805599453


def transcribe(model: Transducer, numbers: list[int]) -> list[Hypothesis]:
    return greedy_search(model, *pad([DIGITS.encode(str(n)) for n in numbers]))


def text(found: Hypothesis) -> str:
    return "".join(NUMERALS.decode(found.labels))


def draw(model: Transducer, number: int, figure: Path) -> None:
    """The output lattice of a number: how probable each node is, and the best alignment."""
    from matplotlib.figure import Figure

    numeral = roman(number)
    frames, num_frames = pad([DIGITS.encode(str(number))])
    labels, _ = pad([NUMERALS.encode(numeral)])
    with torch.no_grad():
        transcription, prediction, _ = model(frames, num_frames, labels)
    arrows = lattice_transitions(transcription[0], prediction[0], labels[0])
    occupancy = log_occupancy(*arrows).clamp(min=-20)
    emitted, _ = best_alignment(*arrows)
    canvas = Figure(figsize=(5, 6), layout="constrained")
    axes = canvas.subplots()
    image = axes.imshow(occupancy.T, origin="lower", cmap="viridis", aspect="auto")
    path = [(0.0, 0.0)]
    for u, t in enumerate(emitted):
        path += [(t, u), (t, u + 1)]
    path.append((len(str(number)) - 1, len(numeral)))
    axes.plot(*zip(*path, strict=True), color="red", marker=".", label="most probable alignment")
    axes.set_xticks(range(len(str(number))), list(str(number)))
    axes.set_yticks(range(len(numeral) + 1), ["∅", *numeral])
    axes.set(xlabel="input x, one frame a digit", ylabel="output y, emitted so far")
    axes.legend(loc="upper left")
    canvas.colorbar(image, label="log-probability that the alignment passes the node")
    canvas.savefig(figure, dpi=120)


def by_digit(number: int, found: Hypothesis) -> str:
    """Which letters were emitted at which digit, as 1:M 9:CM."""
    letters = text(found)
    emitted = {t: "" for t in range(len(str(number)))}
    for letter, t in zip(letters, found.frames, strict=True):
        emitted[t] += letter
    return "  ".join(f"{digit}:{emitted[t]}" for t, digit in enumerate(str(number)))
