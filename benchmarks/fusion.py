"""What an n-gram of the training set's targets adds to a transducer, on a manifest with targets.

`python benchmarks/fusion.py RUN TRAINING MANIFEST FIELD WIDTH ORDER WEIGHT,NULL...`, such as
`python benchmarks/fusion.py runs/speech train.jsonl dev.jsonl phones 10 4 0,0 0.2,0.5`: the labels'
log-probabilities are added with that weight, which makes long outputs less likely, and null's bias
is lowered by that number, which makes them more so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from measure import DEVICE, machine, show

from transduce import NGram, beam_search
from transduce.alphabet import NULL
from transduce.analysis.lattice import transducer_of
from transduce.data.batches import Batches
from transduce.data.manifest import read_manifest
from transduce.evaluation import ErrorRate, error_rate
from transduce.model.checkpoint import load_model

CELLS = 1_000_000  # of padded lattice at once


@torch.no_grad()
def main() -> None:
    if len(sys.argv) < 7:
        sys.exit(__doc__)
    run, training, manifest, field, width, order, *settings = sys.argv[1:]
    model = load_model(Path(run))
    model.network.to(DEVICE)
    network, signature = transducer_of(model), model.signature
    texts, pairs = (
        read_manifest(Path(path), signature.target_notation, field) for path in (training, manifest)
    )
    targets = signature.targets
    ngram = NGram(int(order), len(targets), [targets.encode(pair.target) for pair in texts])
    batches = Batches(signature.examples(pairs), max_cells=CELLS, seed=0)
    bias = network.transcription_network.output.bias
    learnt = float(bias[NULL])

    def evaluated(weight: float, null: float) -> ErrorRate:
        bias[NULL] = learnt - null
        fusion = {"fusion": ngram, "fusion_weight": weight} if weight else {}
        found, wanted = [], []
        for batch in batches.load(batches.by_length()):
            inputs = (batch.frames.to(DEVICE), batch.num_frames.to(DEVICE))
            for best in beam_search(
                network, *inputs, beam_width=int(width), with_timings=False, **fusion
            ):
                found.append(targets.decode(best[0].labels))
            wanted += [pair.target for pair in batch.pairs]
        return error_rate(found, wanted)

    rows = []
    for weight, null in (map(float, setting.split(",")) for setting in settings):
        rate = evaluated(weight, null)
        counts = [rate.substitutions, rate.insertions, rate.deletions]
        rows.append([f"{weight}", f"{null}", f"{100 * rate.rate:.2f}", rate.interval, *counts])
        print(*rows[-1], file=sys.stderr)
    print(machine())
    show(
        f"{Path(manifest).name}, width {width}, {order}-gram of {len(texts)} targets, {run}",
        ["weight", "null", "errors, %", "95 %", "substituted", "inserted", "deleted"],
        [list(map(str, row)) for row in rows],
    )


if __name__ == "__main__":
    main()
