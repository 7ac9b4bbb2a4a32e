"""How good outputs are: edit distance and error rates, bits per label, and how sure one can be."""

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
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor

Sequences = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Interval:
    """Where a rate lies in `confidence` of the test sets that one might have had."""

    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{100 * self.low:.1f} to {100 * self.high:.1f} %"


@dataclass(frozen=True)
class Confusion:
    """A mistake and how often it was made; None stands for nothing."""

    target: str | None  # None: the output was inserted
    output: str | None  # None: the target was deleted
    count: int


@dataclass(frozen=True)
class ErrorRate:
    """The mistakes in a set of outputs."""

    num_sequences: int
    num_wrong_sequences: int  # outputs that equal none of their references
    length: int  # of all targets together
    substitutions: int
    insertions: int
    deletions: int
    confusions: tuple[Confusion, ...]  # the commonest, most frequent first
    interval: Interval | None  # of the rate
    sequence_interval: Interval | None  # of the sequence rate

    @property
    def edits(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """The paper's: summed edit distance over summed length of the targets."""
        return self.edits / self.length if self.length else math.nan

    @property
    def sequence_rate(self) -> float:
        """The share of sequences that are wrong; a dictionary's word error rate."""
        return self.num_wrong_sequences / self.num_sequences if self.num_sequences else math.nan

    def as_dict(self) -> dict[str, Any]:
        """The rates, and all that they are made of, for JSON, which has no NaN."""
        rates = {"rate": self.rate, "sequence_rate": self.sequence_rate}
        return {k: None if math.isnan(v) else v for k, v in rates.items()} | asdict(self)

    def table(self, symbol: str = "label") -> Table:
        """The same to read, `symbol` being what the sequences are made of."""
        sure = f"{100 * self.interval.confidence:g} % interval" if self.interval else ""
        table = Table("measure", "value", sure)
        rows = [
            (f"{symbol} error rate", self.rate, self.interval),
            ("sequence error rate", self.sequence_rate, self.sequence_interval),
        ]
        for name, rate, interval in rows:
            table.add_row(name, f"{100 * rate:.2f} %", str(interval or ""))
        for name in ("substitutions", "insertions", "deletions"):
            count = getattr(self, name)
            share = f" ({100 * count / self.length:.1f} %)" if self.length else ""
            table.add_row(name, f"{count}{share}")
        table.add_row(f"{symbol}s", str(self.length))
        table.add_row("sequences", str(self.num_sequences))
        for confusion in self.confusions:
            target, output = (side or "∅" for side in (confusion.target, confusion.output))
            table.add_row(f"{target} → {output}", str(confusion.count))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


@dataclass(frozen=True)
class Evaluation:
    """A network's row of the paper's table."""

    network: str  # transducer, CTC or prediction
    bits_per_label: float  # the log-loss
    error: float  # its error rate; of a prediction network, its misclassification rate
    detail: ErrorRate | None = None
    epochs: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON, which has no NaN."""
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


def results_table(
    evaluations: Sequence[Evaluation], title: str | None = None, *, with_paper: bool = True
) -> Table:
    """The paper's Table 1: ours, with the paper's own beside it."""
    columns = ("network", "epochs", "log-loss", "error rate")
    table = Table(*columns, *(["paper, on TIMIT"] if with_paper else []), title=title)
    paper = {row.network: row for row in PAPER_TABLE}
    for row in evaluations:
        theirs = paper.get(row.network)
        numbers = (
            row.network,
            "" if row.epochs is None else str(row.epochs),
            f"{row.bits_per_label:.2f}",
            f"{100 * row.error:.1f} %",
            f"{theirs.epochs}, {theirs.bits_per_label}, {100 * theirs.error:.1f} %"
            if theirs
            else "",
        )
        table.add_row(*numbers[: len(table.columns)])
    return table


def error_rate(outputs: Sequences, targets: Sequences, **options: Any) -> ErrorRate:
    """The mistakes of outputs that have one target each; options as `nearest_error_rate` has."""
    return nearest_error_rate(outputs, [[target] for target in targets], **options)


def nearest_error_rate(
    outputs: Sequences,
    references: Sequence[Sequences],
    *,
    num_confusions: int = 10,
    num_resamples: int = 1000,
    seed: int = 0,
) -> ErrorRate:
    """The mistakes of outputs that may have several references, as words have pronunciations.

    An output is right if it equals any. Its edits, and the length they are divided by, are those
    of the nearest reference: of the fewest edits, and among equals the first.
    """
    if len(outputs) != len(references):
        raise ValueError(f"there are {len(outputs)} outputs for {len(references)} targets")
    symbols = chain(*outputs, *(target for targets in references for target in targets))
    if len({isinstance(symbol, str) for symbol in symbols}) > 1:
        raise ValueError(
            "some sequences are of symbols and some of ids; decode the ids with the alphabet"
        )
    confusions: Counter[tuple[str | None, str | None]] = Counter()
    edits, lengths = np.zeros(len(outputs), np.int64), np.zeros(len(outputs), np.int64)
    for i, (output, alternatives) in enumerate(zip(outputs, references, strict=True)):
        if not alternatives:
            raise ValueError(f"output {i} has no reference")
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
    """What was there and what was put for it, for every edit of a shortest way between them."""
    return [
        (
            None if edit.tag == "insert" else target[edit.src_pos],
            None if edit.tag == "delete" else output[edit.dest_pos],
        )
        for edit in Levenshtein.editops(target, output)
    ]


def bootstrap_interval(
    errors: np.ndarray,  # of each sequence
    lengths: np.ndarray,  # of each sequence
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval | None:
    """The percentile interval of Σ errors / Σ lengths over sequences drawn with replacement.

    None if there is nothing to draw, or num_resamples is 0.
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
    """A summed log-loss in nats, such as that of `transducer_loss`, as bits for each label."""
    if num_labels < 1:
        raise ValueError("there are no labels to share the loss")
    return nats / (num_labels * math.log(2))


def misclassified(
    prediction: Tensor,  # [B, U+1, K], or [B, U+1, K+1] with null
    labels: Tensor,  # [B, U]
    num_labels: Tensor,  # [B]
    *,
    with_null: bool,
) -> int:
    """How many labels the prediction network, given those before them, does not find likeliest.

    Null is no answer, so where the network can output it, it is passed over. Divided by the number
    of labels, this is the paper's error rate of the prediction network.
    """
    scores = prediction[:, :-1, 1:] if with_null else prediction[:, :-1]
    if scores.shape[:2] != labels.shape:
        raise ValueError(
            f"prediction must be [B, U+1, ...] of labels {list(labels.shape)}, "
            f"not {list(prediction.shape)}"
        )
    inside = torch.arange(labels.shape[1], device=labels.device) < num_labels[:, None]
    largest = int((labels * inside).max()) if labels.numel() else 0
    if largest > scores.shape[2]:
        raise ValueError(
            f"there is a label {largest}, but the prediction has {scores.shape[2]} labels with "
            f"with_null={with_null}; say with_null as the network was made"
        )
    wrong = scores.argmax(-1) + 1 != labels
    return int((wrong & inside).sum())
