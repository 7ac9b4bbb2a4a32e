"""Word error rate in each language of SIGMORPHON 2020, and its mean: of a model of all of them, or
of several as an ensemble.

`python benchmarks/languages.py FOLDER dev|test WIDTH RUN...`, such as
`python benchmarks/languages.py sigmorphon2020-g2p dev 4 runs/languages-1 runs/languages-2`.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from measure import DEVICE, machine, show

from transduce.checkpoint import load_ensemble
from transduce.data.dictionaries import read_sigmorphon
from transduce.evaluation import nearest_error_rate
from transduce.recognition import recognise


def main() -> None:
    folder, split, width, *runs = sys.argv[1:]
    model = load_ensemble([Path(run) for run in runs])
    model.network.to(DEVICE)
    splits = read_sigmorphon(folder, "all")
    pairs = {"dev": splits.validation, "test": splits.test}[split]
    found = recognise(
        model, model.signature.examples(pairs, with_labels=False), beam_width=int(width)
    )
    decode = model.signature.targets.decode
    rates = {}
    results = zip(pairs, found, strict=True)
    for language, of_it in groupby(results, key=lambda result: result[0].name.split(":")[0]):
        words = [(tuple(decode(best[0].labels)), pair.references) for pair, best in of_it]
        rates[language] = 100 * nearest_error_rate(*zip(*words, strict=True)).sequence_rate
    print(machine())
    show(
        f"{split}, width {width}, {len(runs)} model(s)",
        ["language", "word errors, %"],
        [[language, f"{rate:.1f}"] for language, rate in rates.items()]
        + [["mean", f"{sum(rates.values()) / len(rates):.2f}"]],
    )


if __name__ == "__main__":
    main()
