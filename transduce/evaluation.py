"""Error rates by edit distance with bootstrap intervals; log-loss in bits per label."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

Sequences = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Interval:
    """A bootstrap confidence interval of a rate."""

    low: float
    high: float
    confidence: float  # 0.95: the interval of 95 % of the resampled test sets

    def __str__(self) -> str:
        return f"{100 * self.low:.1f} to {100 * self.high:.1f} %"


@dataclass(frozen=True)
class Confusion:
    """A kind of edit and its count in a set of outputs."""

    target: str | None  # None: `output` is an insertion
    output: str | None  # None: `target` is a deletion
    count: int


@dataclass(frozen=True)
class ErrorRate:
    """The edits between a set of outputs and their targets."""

    num_sequences: int
    num_wrong_sequences: int  # outputs that equal none of their references
    length: int  # symbols in all targets
    substitutions: int
    insertions: int
    deletions: int
    confusions: tuple[Confusion, ...]  # most frequent first; only the first few
    interval: Interval | None  # of `rate`
    sequence_interval: Interval | None  # of `sequence_rate`

    @property
    def edits(self) -> int:
        """Return the summed edit distance (Levenshtein distance)."""
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Return the paper's error rate: summed edit distance over summed length of the targets."""
        return self.edits / self.length if self.length else math.nan

    @property
    def sequence_rate(self) -> float:
        """Return the share of wrong sequences; for a dictionary, this is the word error rate."""
        return self.num_wrong_sequences / self.num_sequences if self.num_sequences else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return the rates and all fields for JSON; None replaces NaN, which JSON lacks."""
        rates = {"rate": self.rate, "sequence_rate": self.sequence_rate}
        return {k: None if math.isnan(v) else v for k, v in rates.items()} | asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """The results of one network: a row of the paper's Table 1."""

    network: str  # transducer, CTC, prediction or continuous
    bits_per_label: float  # the log-loss
    # The error rate; for a prediction network, the misclassification rate; NaN for a continuous one
    error: float
    detail: ErrorRate | None = None  # None for a prediction network
    epochs: int | None = None  # of training, where known

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON; None replaces NaN, which JSON lacks."""
        row = {
            k: None if isinstance(v, float) and math.isnan(v) else v
            for k, v in asdict(self).items()
        }
        return row | {"detail": self.detail.as_dict() if self.detail else None}


PAPER_TABLE = (
    Evaluation("prediction", 4.0, 0.729, epochs=58),
    Evaluation("CTC", 1.3, 0.255, epochs=96),
    Evaluation("transducer", 1.0, 0.232, epochs=76),
)


def error_rate(outputs: Sequences, targets: Sequences, **options: Any) -> ErrorRate:
    """Compare each output with its target; `options` are those of `nearest_error_rate`."""
    return nearest_error_rate(outputs, [[target] for target in targets], **options)


def nearest_error_rate(
    outputs: Sequences,
    references: Sequence[Sequences],
    *,
    num_confusions: int = 10,
    num_resamples: int = 1000,
    seed: int = 0,
) -> ErrorRate:
    """Compare each output with the nearest of its references, such as a word's pronunciations.

    The nearest reference has the fewest edits; the first such counts. An output is wrong if it
    equals none of its references.
    """
    if len(outputs) != len(references):
        raise ValueError(
            f"there are {len(outputs)} outputs for {len(references)} targets; give as many of each"
        )
    symbols = chain(*outputs, *(target for targets in references for target in targets))
    if len({isinstance(symbol, str) for symbol in symbols}) > 1:
        raise ValueError(
            "some sequences are symbols and some are ids; decode the ids with the alphabet"
        )
    confusions: Counter[tuple[str | None, str | None]] = Counter()
    edits, lengths = np.zeros(len(outputs), np.int64), np.zeros(len(outputs), np.int64)
    for i, (output, alternatives) in enumerate(zip(outputs, references, strict=True)):
        if not alternatives:
            raise ValueError(f"output {i} has no reference; give it one, or leave it out")
        nearest = min(alternatives, key=lambda target: Levenshtein.distance(target, output))
        mistakes = _mistakes(output, nearest)
        confusions.update(mistakes)
        edits[i], lengths[i] = len(mistakes), len(nearest)
    wrong = (edits > 0).astype(np.int64)
    commonest = sorted(confusions.items(), key=lambda item: (-item[1], str(item[0])))
    resampling = (num_resamples, seed)
    return ErrorRate(
        num_sequences=len(outputs),
        num_wrong_sequences=int(wrong.sum()),
        length=int(lengths.sum()),
        substitutions=sum(n for (a, b), n in confusions.items() if a is not None and b is not None),
        insertions=sum(n for (a, _), n in confusions.items() if a is None),
        deletions=sum(n for (_, b), n in confusions.items() if b is None),
        confusions=tuple(Confusion(*pair, count) for pair, count in commonest[:num_confusions]),
        interval=bootstrap_interval(edits, lengths, *resampling),
        sequence_interval=bootstrap_interval(wrong, np.ones_like(wrong), *resampling),
    )


def _mistakes(output: Sequence[str], target: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Return the target symbol and the output symbol of each edit; None for no symbol."""
    return [
        (
            None if edit.tag == "insert" else target[edit.src_pos],
            None if edit.tag == "delete" else output[edit.dest_pos],
        )
        for edit in Levenshtein.editops(target, output)
    ]


def bootstrap_interval(
    errors: np.ndarray,  # [N], errors in each sequence
    lengths: np.ndarray,  # [N], symbols in each sequence
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval | None:
    """Return the percentile interval of Σ errors / Σ lengths, resampling whole sequences.

    Return None if there are no sequences, no symbols or no resamples.
    """
    n = len(errors)
    if n == 0 or num_resamples == 0 or lengths.sum() == 0:
        return None
    generator = np.random.default_rng(seed)
    rates = np.empty(num_resamples)
    for r in range(num_resamples):
        drawn = generator.integers(0, n, n)
        rates[r] = errors[drawn].sum() / max(lengths[drawn].sum(), 1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(rates, [tail, 1 - tail])
    return Interval(float(low), float(high), confidence)


def bits_per_label(nats: float, num_labels: int) -> float:
    """Convert a summed log-loss in nats, such as that of `transducer_loss`, to bits per label."""
    if num_labels < 1:
        raise ValueError("there are no labels to divide the loss by; give sequences with labels")
    return nats / (num_labels * math.log(2))


def misclassified(
    prediction: Tensor,  # [B, U+1, K], or [B, U+1, K+1] with null
    labels: Tensor,  # [B, U]
    num_labels: Tensor,  # [B]
    *,
    with_null: bool,
) -> int:
    """Count the labels that are not the likeliest output, given the labels before them.

    Ignore the null output where the network has one (`with_null`). The count divided by the number
    of labels is the paper's error rate of the prediction network.
    """
    scores = prediction[:, :-1, 1:] if with_null else prediction[:, :-1]
    if scores.shape[:2] != labels.shape:
        raise ValueError(
            f"prediction must be [B, U+1, ...] for labels [B, U] = {list(labels.shape)}, "
            f"not {list(prediction.shape)}"
        )
    inside = torch.arange(labels.shape[1], device=labels.device) < num_labels[:, None]
    largest = int((labels * inside).max()) if labels.numel() else 0
    if largest > scores.shape[2]:
        raise ValueError(
            f"there is a label {largest}, but with_null={with_null} leaves {scores.shape[2]} "
            "labels in prediction; pass with_null as the network has it"
        )
    wrong = scores.argmax(-1) + 1 != labels
    return int((wrong & inside).sum())
