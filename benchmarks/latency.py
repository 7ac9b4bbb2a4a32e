"""How late a streaming model emits labels: its alignments against those of another model.

`python benchmarks/latency.py STREAMER OFFLINE MANIFEST FIELD [LIMIT]`: both models align the
targets in the manifest's field by their most probable alignment. The latency of a label is the time
of its vector in the streamer less that in the other model. The sound that the streamer must have
heard by then, its algorithmic latency, comes on top.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import torch
from measure import machine, show
from torch import Tensor

from transduce import best_alignment, lattice_transitions, load
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Pair
from transduce.model.model import Model
from transduce.model.stream import vector_times


@torch.no_grad()
def emission_times(model: Model, pair: Pair) -> Tensor:
    """Return the seconds at which the most probable alignment emits each label."""
    example = model.signature.example(pair, with_labels=True)
    f, _ = model.network.transcription_network(example.frames[None])
    g = model.network.prediction_network(example.labels[None])
    frames, _ = best_alignment(*lattice_transitions(f[0], g[0], example.labels))
    times = vector_times(model)
    assert times is not None
    step, first = times
    return first + step * (torch.as_tensor(frames) + 0.5)


def main() -> None:
    print(machine())
    if len(sys.argv) not in (5, 6):
        sys.exit(__doc__)
    streamer, offline, manifest, field, *limit = sys.argv[1:]
    models = load(streamer), load(offline)
    pairs = read_manifest(Path(manifest), models[0].signature.target_notation, field)
    late = [
        emission_times(models[0], pair) - emission_times(models[1], pair)
        for pair in pairs[: int(limit[0]) if limit else None]
    ]
    every = 1000 * torch.cat(late)
    quantiles = [float(every.quantile(q)) for q in (0.05, 0.5, 0.95)]
    columns = ["labels", "mean, ms", "5 %", "median", "95 %", "algorithmic, ms"]
    row = [len(every), mean(every.tolist()), *quantiles, 1000 * (models[0].latency or 0.0)]
    show(f"Emissions of {streamer} after those of {offline}", columns, [[f"{x:.0f}" for x in row]])


if __name__ == "__main__":
    main()
