"""Exported models in onnxruntime against ours: outputs, logits, error rates and sizes.

python benchmarks/export.py MODEL FILE [FIELD] [LIMIT]

MODEL is a run or a model that ships, FILE a manifest (.jsonl) or a .tsv file of pairs, FIELD the
manifest's field of the target, and LIMIT the number of pairs to read.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import machine, show
from torch import Tensor

from transduce.audio.cache import FrameReader
from transduce.cli.runs import read_pairs
from transduce.data.pairs import Pair
from transduce.decoding.options import SearchOptions
from transduce.decoding.search import eval_mode
from transduce.evaluation import error_rate
from transduce.export import export_onnx
from transduce.model.model import Model, load

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from onnxruntime_greedy import MOST_LABELS, Exported


def inputs_of(model: Model, pairs: list[Pair]) -> list[tuple[Tensor, np.ndarray]]:
    """Return the input of our network and that of the exported one, for each pair."""
    signature = model.signature
    if signature.sources is not None:
        ids = [example.frames for example in signature.examples(pairs, with_labels=False)]
        return [(one, (one - 1).numpy() % (len(signature.sources) + 1)) for one in ids]
    assert signature.statistics is not None
    read = FrameReader(signature.features, convert=True)
    frames = [read(pair) for pair in pairs]
    return [(signature.statistics.normalise(one), one.numpy()) for one in frames]


@torch.no_grad()
def main() -> None:
    name, file, *rest = sys.argv[1:]
    field, limit = (rest + ["text", "50"][len(rest) :])[:2]
    model = load(name)
    pairs = list(read_pairs(Path(file), model.signature, field))[: int(limit)]
    targets = [pair.target for pair in pairs]
    inputs = inputs_of(model, pairs)
    print(machine())
    options = SearchOptions(1, with_timings=False, max_labels_per_frame=MOST_LABELS)
    ours = [found.symbols for found in model.transcripts(pairs, options, unknown="null")]
    rows = [["ours", "", "", f"{100 * error_rate(ours, targets).rate:.2f} %", "", ""]]
    for int8 in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out"
            export_onnx(model, path, int8=int8)
            size = sum(part.stat().st_size for part in path.iterdir()) / 1e6
            exported = Exported(path)
        start = time.perf_counter()
        f = [exported.transcription(given) for _, given in inputs]
        found = [tuple(exported.symbols(exported.greedy(one))) for one in f]
        milliseconds = 1000 * (time.perf_counter() - start) / len(inputs)
        with eval_mode(model.network):
            exact = [model.network.transcription_network(x[None])[0][0] for x, _ in inputs]
        differences = [
            float((torch.from_numpy(theirs) - own.roll(-1, -1)).abs().max())
            for theirs, own in zip(f, exact, strict=True)
        ]
        same = sum(a == b for a, b in zip(found, ours, strict=True))
        rows.append(
            [
                "onnxruntime, int8" if int8 else "onnxruntime",
                f"{same} of {len(ours)}",
                f"{max(differences):.1e}",
                f"{100 * error_rate(found, targets).rate:.2f} %",
                f"{size:.1f} MB",
                f"{milliseconds:.0f} ms",
            ]
        )
    title = f"{name}, {len(pairs)} pairs of {Path(file).name}, greedy search"
    columns = ["", "same output", "largest difference of f", "error rate", "files", "an input"]
    show(title, columns, rows)


if __name__ == "__main__":
    main()
