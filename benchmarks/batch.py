"""Times real time of the recogniser that ships, from frames to labels, for a batch and for one.

The argument is an .npz file of log-mel frames [T, 40], an array an utterance, as the model's
signature computes them from sound. The batch has 256 utterances; if the file has fewer, they come
again. Run it as `python benchmarks/batch.py frames.npz`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import DEVICE, machine, medians, show
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce import beam_search, greedy_search, load
from transduce.decoding.options import SearchKeywords
from transduce.evaluation import error_rate
from transduce.model.model import Model, Precision

UTTERANCES, SECONDS = 256, 2.0  # of the batch; spent on each contender
FRAME = 0.01  # seconds
PRECISIONS: tuple[Precision, ...] = ("bf16-mixed", "16-mixed") if DEVICE == "cuda" else ()
SHORT = 5.0  # seconds of the utterance that is searched by itself


def padded(utterances: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return frames [B, T, D] and their numbers [B] on the device."""
    frames = [torch.from_numpy(one).float() for one in utterances]
    numbers = torch.tensor([len(one) for one in frames])
    return pad_sequence(frames, batch_first=True).to(DEVICE), numbers.to(DEVICE)


def searches(model: Model, frames: Tensor, numbers: Tensor) -> dict[str, Callable[[], object]]:
    """Return the contenders, each a call."""
    network: Any = model.network

    def beam(width: int, timings: bool = False) -> Callable[[], object]:
        options = SearchKeywords(beam_width=width, with_timings=timings)
        return lambda: beam_search(network, frames, numbers, **options)

    calls: dict[str, Callable[[], object]] = {
        "transcription network alone": lambda: network.transcription_network(frames, numbers),
        "greedy": lambda: greedy_search(network, frames, numbers),
        "W 10": beam(10),
        "W 10, timings": beam(10, True),
        "W 100": beam(100),
    }
    return calls | {
        f"{name}, {precision}": in_precision(model, calls[name], precision)
        for precision in PRECISIONS
        for name in ("transcription network alone", "greedy", "W 10")
    }


def in_precision(
    model: Model, call: Callable[[], object], precision: Precision
) -> Callable[[], object]:
    """Return the call with the model in a precision, and in float32 again after it."""

    def rounded() -> object:
        model.to(DEVICE, precision)
        try:
            return call()
        finally:
            model.to(DEVICE)

    return rounded


def differences(calls: dict[str, Callable[[], object]]) -> list[list[str]]:
    """Return how many labels of the searches in each precision differ from those in float32."""
    rows = []
    for precision in PRECISIONS:
        for name in ("greedy", "W 10"):
            exact, found = (labels(calls[n]()) for n in (name, f"{name}, {precision}"))
            rate = error_rate(found, exact)
            errors = rate.substitutions + rate.insertions + rate.deletions
            share = f"{errors / rate.length:.3%}"
            rows.append([f"{name}, {precision}", str(errors), str(rate.length), share])
    return rows


def labels(found: Any) -> list[list[str]]:
    """Return the labels of the best hypothesis of each utterance."""
    best = [one[0] if isinstance(one, list) else one for one in found]
    return [[str(label) for label in one.labels] for one in best]


@torch.no_grad()
def main() -> None:
    [path] = sys.argv[1:]
    arrays = list(np.load(path).values())
    batch = [arrays[i % len(arrays)] for i in range(UTTERANCES)]
    one = min(arrays, key=lambda array: abs(len(array) * FRAME - SHORT))
    model = load("english-phone-recogniser").to(DEVICE)
    rows = []
    for utterances in (batch, [one]):
        length = sum(map(len, utterances)) * FRAME
        for name, took in medians(searches(model, *padded(utterances)), SECONDS).items():
            speed = length / (took / 1000)
            rows.append([str(len(utterances)), name, f"{took:.2f}", f"{speed:,.0f}"])
    print(machine())
    show("From frames to labels", ["utterances", "search", "ms", "times real time"], rows)
    if PRECISIONS:
        columns = ["search", "labels that differ", "labels in float32", "share"]
        show(
            "Against float32, insertions and deletions included",
            columns,
            differences(searches(model, *padded(arrays))),
        )


if __name__ == "__main__":
    main()
