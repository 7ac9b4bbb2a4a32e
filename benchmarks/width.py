"""Beam width: error rate, search errors and time, on a manifest with targets.

`python benchmarks/width.py RUN MANIFEST FIELD [PLOT.png]`, such as
`python benchmarks/width.py runs/speech test.jsonl phones docs/width.png`. An utterance has a search
error if the target, or the output of another width, has a higher score than the output. The score
is ln Pr(y|x) / |y|, by which the search sorts, computed from the whole lattice.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import DEVICE, machine, show
from torch import Tensor

from transduce import SearchOptions, Transducer, transducer_loss
from transduce.analysis.lattice import transducer_of
from transduce.data.batches import Batch, Example
from transduce.data.manifest import read_manifest
from transduce.evaluation import error_rate
from transduce.model.model import load, search_examples

WIDTHS = (1, 4, 16, 64, 256, 1024, 4000)


@torch.no_grad()
def exact_score(network: Transducer, transcription: Tensor, labels: Sequence[int]) -> float:
    """Return ln Pr(y|x) / |y| from the whole lattice; -inf for the empty sequence."""
    if not labels:
        return -math.inf
    y = torch.tensor([labels], device=DEVICE)
    g = network.prediction_network(y)
    lengths = torch.tensor([transcription.shape[1]]), torch.tensor([len(labels)])
    loss = transducer_loss(transcription, g, y, *(n.to(DEVICE) for n in lengths))
    return -float(loss) / len(labels)


@torch.no_grad()
def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    run, manifest, field, *plot = sys.argv[1:]
    model = load(run).to(DEVICE)
    network = transducer_of(model)
    pairs = read_manifest(Path(manifest), model.signature.target_notation, field)
    examples = model.signature.examples(pairs)
    print(machine())
    targets = [example.labels.tolist() for example in examples]
    transcriptions = [_transcription(network, example) for example in examples]
    best = [exact_score(network, f, y) for f, y in zip(transcriptions, targets, strict=True)]
    scores, rows = {}, []
    for width in WIDTHS:
        options = SearchOptions(width, with_timings=False)
        network.search(Batch.of(examples[:2]).to(DEVICE), options)  # compile the kernels
        start = time.perf_counter()
        found = [best[0].labels for best in search_examples(model, examples, options)]
        seconds = (time.perf_counter() - start) / len(examples)
        scores[width] = [
            exact_score(network, f, y) for f, y in zip(transcriptions, found, strict=True)
        ]
        best = [max(pair) for pair in zip(best, scores[width], strict=True)]
        names = [[str(k) for k in y] for y in found], [[str(k) for k in y] for y in targets]
        rows.append((width, 100 * error_rate(*names, num_resamples=0).rate, seconds))
        print(f"W {width}: {rows[-1][1]:.2f} %, {seconds:.4f} s per utterance", file=sys.stderr)
    missed = {
        width: sum(there > here + 1e-6 for here, there in zip(scores[width], best, strict=True))
        for width in WIDTHS
    }
    show(
        f"{len(examples)} utterances of {Path(manifest).name}, {run}",
        ["W", "error rate, %", "search errors, %", "seconds per utterance"],
        [
            [str(w), f"{rate:.2f}", f"{100 * missed[w] / len(examples):.1f}", f"{seconds:.4f}"]
            for w, rate, seconds in rows
        ],
    )
    if plot:
        _draw(Path(plot[0]), rows, [100 * missed[w] / len(examples) for w in WIDTHS])


def _transcription(network: Transducer, example: Example) -> Tensor:
    """Return f [1, T, K+1]."""
    f: Tensor = network.transcription_network(example.frames[None].to(DEVICE))[0]
    return f


def _draw(path: Path, rows: list[tuple[int, float, float]], missed: list[float]) -> None:
    """Plot the three columns against the width."""
    from matplotlib import pyplot

    widths, rates, seconds = zip(*rows, strict=True)
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, values, name in zip(
        axes,
        (rates, missed, seconds),
        ("error rate, %", "search errors, %", "seconds per utterance"),
        strict=True,
    ):
        axis.plot(widths, values, marker="o", color="#0072b2")
        axis.set(xscale="log", xlabel="beam width W", title=name)
        axis.grid(alpha=0.3)
    axes[2].set_yscale("log")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
