"""N-gram language models in ARPA files, as SRILM and KenLM write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from transduce.alphabet import NULL, Alphabet
from transduce.data.pairs import Origin, read_lines

START, UNKNOWN = "<s>", "<unk>"
Context = tuple[int, ...]


class ArpaModel:
    """A back-off n-gram model of labels: a `LanguageModel` read by `read_arpa`.

    An n-gram that the file lacks has the back-off weight of its context times the probability of
    the n-gram one label shorter.
    """

    def __init__(
        self, order: int, log_probs: dict[Context, dict[int, float]], back_off: dict[Context, float]
    ) -> None:
        self.order = order
        self._log_probs, self._back_off = log_probs, back_off
        unigrams = log_probs[()]
        self._unigrams = np.array([unigrams[k] for k in range(1, len(unigrams) + 1)])
        self._known: dict[Context, np.ndarray] = {}

    def start(self) -> Context:
        """Return the context of a sentence's start."""
        return (NULL,)[: self.order - 1]

    def advance(self, state: Context, label: int) -> Context:
        """Return the context of at most order - 1 labels that ends with `label`."""
        return (*state, label)[max(0, len(state) + 2 - self.order) :]

    def log_probs(self, state: Context) -> np.ndarray:
        """Return ln Pr(k|context) of every label."""
        if not state:
            return self._unigrams
        if state not in self._known:
            row = self.log_probs(state[1:]) + self._back_off.get(state, 0.0)
            for k, log_prob in self._log_probs.get(state, {}).items():
                row[k - 1] = log_prob
            self._known[state] = row
        return self._known[state]


def read_arpa(path: str | Path, alphabet: Alphabet) -> ArpaModel:
    """Read an ARPA file whose words are the symbols of `alphabet`.

    Words that the alphabet lacks are skipped, `</s>` among them. A symbol that the file lacks has
    the probability of `<unk>`; without `<unk>` that is an error.
    """
    ids = {symbol: k for k, symbol in enumerate(alphabet.symbols, start=1)} | {START: NULL}
    log_probs: dict[Context, dict[int, float]] = {(): {}}
    back_off: dict[Context, float] = {}
    order, unknown = 0, None
    for origin, n, words, log_prob, weight in _entries(Path(path)):
        order = max(order, n)
        if words == [UNKNOWN]:
            unknown = log_prob
        if any(word not in ids for word in words):
            continue
        *context, last = (ids[word] for word in words)
        if weight is not None:
            back_off[(*context, last)] = weight
        if last != NULL:
            if not log_prob <= 0:
                raise origin.error(
                    "the probability is not between 0 and 1; write its logarithm, base 10"
                )
            log_probs.setdefault(tuple(context), {})[last] = log_prob
    for symbol, k in ids.items():
        if k != NULL and k not in log_probs[()]:
            if unknown is None:
                raise Origin(Path(path)).error(
                    f"there is neither a 1-gram {symbol!r} nor one of {UNKNOWN}; make the model "
                    "from text that has every symbol"
                )
            log_probs[()][k] = unknown
    return ArpaModel(order, log_probs, back_off)


def _entries(path: Path) -> Iterator[tuple[Origin, int, list[str], float, float | None]]:
    """Yield each n-gram: its line, n, words, ln of its probability and of its back-off weight."""
    n = 0
    for origin, line in read_lines(path):
        if section := re.fullmatch(r"\\(\d+)-grams:", line.strip()):
            n = int(section[1])
        elif line.startswith("\\end\\"):
            break
        elif n > 0:
            number, *rest = line.split()
            try:
                log_prob = float(number) * math.log(10)
                weight = float(rest[n]) * math.log(10) if len(rest) > n else None
            except ValueError:
                rest = []
            if not n <= len(rest) <= n + 1:
                raise origin.error(
                    f"this is not a logarithm, {n} words and perhaps a back-off weight; give an "
                    "ARPA file"
                )
            yield origin, n, rest[:n], log_prob, weight
    if n == 0:
        raise Origin(path).error("there are no n-grams in it; give an ARPA file")
