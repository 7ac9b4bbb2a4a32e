"""Tables of results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from transduce.data.timit import PAPER_COUNTS, Timit
from transduce.evaluation import PAPER_TABLE, ErrorRate, Evaluation


def results_table(
    evaluations: Sequence[Evaluation], title: str | None = None, *, with_paper: bool = True
) -> Table:
    """Lay out a row for each network; add the paper's numbers (Table 1) if `with_paper`."""
    columns = ("network", "epochs", "log-loss", "error rate")
    table = Table(*columns, *(["paper, on TIMIT"] if with_paper else []), title=title)
    paper = {row.network: row for row in PAPER_TABLE}
    for row in evaluations:
        theirs = paper.get(row.network)
        numbers = (
            row.network,
            "" if row.epochs is None else str(row.epochs),
            f"{row.bits_per_label:.2f}",
            "" if math.isnan(row.error) else f"{100 * row.error:.1f} %",
            f"{theirs.epochs}, {theirs.bits_per_label}, {100 * theirs.error:.1f} %"
            if theirs
            else "",
        )
        table.add_row(*numbers[: len(table.columns)])
    return table


def error_table(errors: ErrorRate, symbol: str = "label") -> Table:
    """Lay out error rates, edits and confusions; `symbol` names the elements of the sequences."""
    sure = f"{100 * errors.interval.confidence:g} % interval" if errors.interval else ""
    table = Table("measure", "value", sure)
    rows = [
        (f"{symbol} error rate", errors.rate, errors.interval),
        ("sequence error rate", errors.sequence_rate, errors.sequence_interval),
    ]
    for name, rate, interval in rows:
        table.add_row(name, f"{100 * rate:.2f} %", str(interval or ""))
    for name in ("substitutions", "insertions", "deletions"):
        count = getattr(errors, name)
        share = f" ({100 * count / errors.length:.1f} %)" if errors.length else ""
        table.add_row(name, f"{count}{share}")
    table.add_row(f"{symbol}s", str(errors.length))
    table.add_row("sequences", str(errors.num_sequences))
    for confusion in errors.confusions:
        target, output = (side or "∅" for side in (confusion.target, confusion.output))
        table.add_row(f"{target} → {output}", str(confusion.count))
    return table


def timit_table(corpus: Timit) -> Table:
    """Lay out the number of sentences in each set beside that of the paper."""
    title = "TIMIT" if corpus.complete else "a part of TIMIT"
    caption = f"validation set: seed {corpus.seed}"
    table = Table("set", "sentences", "paper", title=title, caption=caption)
    for name, count in corpus.counts.items():
        table.add_row(name, str(count), str(PAPER_COUNTS[name]))
    return table
