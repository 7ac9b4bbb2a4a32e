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

UTTERANCES, SECONDS = 256, 2.0  # of the batch; spent on each contender
FRAME = 0.01  # seconds
SHORT = 5.0  # seconds of the utterance that is searched by itself


def padded(utterances: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return frames [B, T, D] and their numbers [B] on the device."""
    frames = [torch.from_numpy(one).float() for one in utterances]
    numbers = torch.tensor([len(one) for one in frames])
    return pad_sequence(frames, batch_first=True).to(DEVICE), numbers.to(DEVICE)


def searches(network: Any, frames: Tensor, numbers: Tensor) -> dict[str, Callable[[], object]]:
    """Return the contenders, each a call."""

    def beam(width: int, timings: bool = False) -> Callable[[], object]:
        options = SearchKeywords(beam_width=width, with_timings=timings)
        return lambda: beam_search(network, frames, numbers, **options)

    return {
        "transcription network alone": lambda: network.transcription_network(frames, numbers),
        "greedy": lambda: greedy_search(network, frames, numbers),
        "W 10": beam(10),
        "W 10, timings": beam(10, True),
        "W 100": beam(100),
    }


@torch.no_grad()
def main() -> None:
    [path] = sys.argv[1:]
    arrays = list(np.load(path).values())
    batch = [arrays[i % len(arrays)] for i in range(UTTERANCES)]
    one = min(arrays, key=lambda array: abs(len(array) * FRAME - SHORT))
    network = load("english-phone-recogniser").to(DEVICE).network
    rows = []
    for utterances in (batch, [one]):
        length = sum(map(len, utterances)) * FRAME
        for name, took in medians(searches(network, *padded(utterances)), SECONDS).items():
            speed = length / (took / 1000)
            rows.append([str(len(utterances)), name, f"{took:.2f}", f"{speed:,.0f}"])
    print(machine())
    show("From frames to labels", ["utterances", "search", "ms", "times real time"], rows)


if __name__ == "__main__":
    main()
