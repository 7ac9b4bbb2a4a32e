"""Graphones and their n-grams as they are defined, in plain Python: slow, and what the tests trust.

A graphone is a source symbol and the labels that it becomes: none, one or two, as X becomes K S. A
pair of sequences is cut into graphones in many ways. Its joint probability is the sum, over all of
them, of the probability of the sequence of graphones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

MOST_LABELS = 2  # of a graphone
# The initial weights of graphones with 0, 1 and 2 labels: one is the likeliest.
FIRST_WEIGHTS = (0.25, 1.0, 0.25)
ROUNDS = 8  # of expectation maximisation
LEAST_COUNT = 1e-3  # a graphone that is expected less often in all pairs is given up

Labels = tuple[int, ...]
Graphone = tuple[int, Labels]  # a source symbol, and its labels
START, END = "start", "end"  # of a sequence of graphones
UNKNOWN = "unknown"  # stands for all graphones that training has not seen


def segmentations(
    source: Sequence[int], labels: Labels, most_labels: int = MOST_LABELS
) -> Iterator[tuple[Graphone, ...]]:
    """Yield every way to cut a pair into graphones of at most so many labels."""
    if not source and not labels:
        yield ()
    for count in range(most_labels + 1 if source else 0):
        if count <= len(labels):
            for rest in segmentations(source[1:], labels[count:], most_labels):
                yield ((source[0], labels[:count]), *rest)


def learn_graphones(pairs: Sequence[tuple[Sequence[int], Labels]]) -> dict[Graphone, float]:
    """Return ln of the probability of each graphone, by expectation maximisation.

    Graphones are taken as independent of each other. Pairs that cannot be cut count for nothing.
    """
    weights: Mapping[Graphone, float] | None = None
    for _ in range(ROUNDS):
        counts = defaultdict[Graphone, float](float)
        for source, labels in pairs:
            ways = list(segmentations(source, labels))
            each = [math.prod(_weight(one, weights) for one in way) for way in ways]
            total = sum(each)
            for way, weight in zip(ways, each, strict=True):
                for one in way if weight else ():
                    counts[one] += weight / total
        kept = {one: count for one, count in counts.items() if count >= LEAST_COUNT}
        weights = {one: count / sum(counts.values()) for one, count in kept.items()}
    assert weights is not None
    return {one: math.log(weight) for one, weight in weights.items()}


def _weight(one: Graphone, weights: Mapping[Graphone, float] | None) -> float:
    if weights is not None:
        return weights.get(one, 0.0)
    return FIRST_WEIGHTS[len(one[1])]


def best_segmentation(
    source: Sequence[int], labels: Labels, log_probs: Mapping[Graphone, float]
) -> tuple[Graphone, ...] | None:
    """Return the most probable way to cut a pair; None if there is none."""
    ways = [way for way in segmentations(source, labels) if log_probs.keys() >= set(way)]
    return max(ways, key=lambda way: sum(log_probs[one] for one in way), default=None)


class KneserNey:
    """An n-gram model of sequences, with modified Kneser-Ney smoothing in its interpolated form.

    The longest n-grams count as often as they occur, and those at the start of a sequence too.
    Others count once for each symbol that occurs before them. From a count of 1, 2, or 3 and more a
    discount is taken, which the context one symbol shorter distributes. Below the empty context all
    known symbols, the end, and one unknown symbol are equally probable.
    """

    def __init__(self, sequences: Sequence[Sequence[object]], order: int) -> None:
        self.order = order
        occurrences: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(order + 1)]
        for sequence in sequences:
            padded = (START, *sequence, END)
            for t in range(1, len(padded)):
                for n in range(1, min(order, t + 1) + 1):
                    occurrences[n][padded[t - n + 1 : t + 1]] += 1
        self.num_symbols = len(occurrences[1]) + 1
        self.counts = [occurrences[0]]
        for n in range(1, order + 1):
            before = Counter(ngram[1:] for ngram in occurrences[n + 1]) if n < order else Counter()
            self.counts.append(
                Counter(
                    {
                        ngram: count if n == order or ngram[0] == START else before[ngram]
                        for ngram, count in occurrences[n].items()
                    }
                )
            )
        self.discounts = [discounts(Counter(found.values())) for found in self.counts]

    def prob(self, context: tuple[object, ...], symbol: object) -> float:
        """Return the probability of a symbol after a context of any length."""
        prob = 1 / self.num_symbols
        for n in range(1, min(self.order, len(context) + 1) + 1):
            before = context[len(context) - n + 1 :]
            following = [c for ngram, c in self.counts[n].items() if ngram[:-1] == before]
            if following:
                taken = sum(self.discounts[n][min(c, 3)] for c in following)
                own = self.counts[n][(*before, symbol)]
                left = own - self.discounts[n][min(own, 3)]
                prob = (left + taken * prob) / sum(following)
        return prob

    def log_prob(self, sequence: Sequence[object]) -> float:
        """Return ln of the probability of a whole sequence."""
        padded = (START, *sequence, END)
        return sum(math.log(self.prob(padded[:t], padded[t])) for t in range(1, len(padded)))


def discounts(counts_of_counts: Mapping[int, int]) -> tuple[float, float, float, float]:
    """Return what is taken from counts of 0, 1, 2, and 3 and more.

    These are Chen and Goodman's estimates. Where a count does not occur, or an estimate leaves the
    range from 0 to the count, it is half of the count.
    """
    ones, twos, threes, fours = (counts_of_counts.get(count, 0) for count in (1, 2, 3, 4))
    found = [0.0, 0.5, 1.0, 1.5]
    if ones and twos:
        share = ones / (ones + 2 * twos)
        for count, (fewer, more) in enumerate(((ones, twos), (twos, threes), (threes, fours)), 1):
            estimate = count - (count + 1) * share * more / fewer if fewer else 0.0
            if 0 < estimate < count:
                found[count] = estimate
    return found[0], found[1], found[2], found[3]


def log_joint(
    source: Sequence[int], labels: Labels, model: KneserNey, num_symbols: int, num_labels: int
) -> float:
    """Return ln of the joint probability of a pair; -inf for labels without a source symbol.

    A pair that cannot be cut into known graphones is cut into any, also with more labels.
    """
    known = {ngram[0] for ngram in model.counts[1]}
    ways = [way for way in segmentations(source, labels) if known >= set(way)]
    each = [model.log_prob(way) for way in ways]
    if not ways:
        for way in segmentations(source, labels, len(labels)):
            unknown = [one for one in way if one not in known]
            log_prob = model.log_prob([one if one in known else UNKNOWN for one in way])
            shares = [unknown_share(len(y), num_symbols, num_labels) for _, y in unknown]
            each.append(log_prob + sum(shares))
    total = sum(math.exp(one) for one in each)
    return math.log(total) if total else -math.inf


def unknown_share(count: int, num_symbols: int, num_labels: int) -> float:
    """Return ln of a graphone's share in the probability of the unknown one.

    Half of it is for those without labels, a quarter for those with one, and so on; all of one size
    are equally probable.
    """
    return -(count + 1) * math.log(2) - math.log(num_symbols) - count * math.log(num_labels)
