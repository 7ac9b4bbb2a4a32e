"""Error rates by speaker: how much a model depends on the voice.

`python benchmarks/speakers.py MODEL MANIFEST [--target phones] [--beam-width 10]`. The lines of the
manifest have a field `speaker`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from measure import machine, show

from transduce.data.manifest import read_manifest
from transduce.data.pairs import Notation, Pair
from transduce.decoding.options import SearchOptions
from transduce.model.evaluate import evaluate
from transduce.model.model import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--target", default="phones")
    parser.add_argument("--beam-width", type=int, default=10)
    arguments = parser.parse_args()
    model = load(arguments.model)
    options = SearchOptions(beam_width=arguments.beam_width, with_timings=False)
    pairs = read_manifest(arguments.manifest, Notation("spaces", None), arguments.target)
    lines = arguments.manifest.read_text(encoding="utf-8").splitlines()
    by_speaker: dict[str, list[Pair]] = defaultdict(list)
    for pair, line in zip(pairs, lines, strict=True):
        by_speaker[json.loads(line)["speaker"]].append(pair)
    rates = {
        speaker: 100 * evaluate(model, said, options).error for speaker, said in by_speaker.items()
    }
    print(machine())
    show(
        f"{arguments.model}, width {arguments.beam_width}: errors by speaker, %",
        ["speaker", "utterances", "errors"],
        [
            [speaker, str(len(by_speaker[speaker])), f"{rate:.1f}"]
            for speaker, rate in sorted(rates.items(), key=lambda item: item[1])
        ],
    )
    values = sorted(rates.values())
    print(
        f"{len(values)} speakers: {values[0]:.1f} to {values[-1]:.1f}, mean {mean(values):.1f}, "
        f"standard deviation {stdev(values):.1f}"
    )


if __name__ == "__main__":
    main()
