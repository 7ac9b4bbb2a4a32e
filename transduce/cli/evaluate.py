"""The command that evaluates a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from transduce.cli.runs import Device, load_runs, runs_and_files, test_pairs
from transduce.cli.search import SearchFlags
from transduce.cli.terminal import progress_bar, user_errors
from transduce.data.pairs import DataError, Pair, skipped_report
from transduce.evaluation import Evaluation
from transduce.model.evaluate import evaluate as evaluate_model
from transduce.model.model import Precision
from transduce.model.signature import Signature
from transduce.tables import error_table, results_table


def evaluate(
    run: Path,
    /,
    *data: Path,
    target: str = "text",
    beam_width: int = 1,
    search: SearchFlags | None = None,
    device: Device = "auto",
    precision: Precision = "32-true",
    convert: bool = False,
    skip_bad: bool = False,
    form: Annotated[Literal["table", "json"], Parameter(name="--format")] = "table",
) -> None:
    """Print the log-loss and error rate of a network or an ensemble.

    Example: transduce evaluate runs/letters-transducer --beam-width 10

    Every pair counts: a source symbol that the model does not know is read as nothing, and a
    message on standard error says how many pairs have one. The exit code is 1 if a pair cannot be
    read, unless --skip-bad leaves it out.

    Parameters
    ----------
    run
        The folder of a run, its model.safetensors, or the name of a model that ships. More runs
        after it make an ensemble, in which files of `transduce graphones` may take part.
    data
        A manifest (.jsonl), sounds with targets in another format (docs/data.md), or a file with a
        source, a tab and a target on each line (.tsv); by default the test set of the run.
    target
        The field of the manifest that holds the target.
    beam_width
        The number of hypotheses to keep after every frame. 1 is the greedy search, and the best
        path for CTC.
    search
        Further options of the search.
    device
        The device to compute on.
    precision
        On a GPU, 16-mixed and bf16-mixed compute the transcription network faster, on tensor cores
        with float16 or bfloat16 products; the search stays float32.
    convert
        Resample sounds of another sample rate, and average channels, instead of refusing them; the
        run's own test set is read as its recipe says.
    skip_bad
        Skip pairs that cannot be read, and print how many there were.
    form
        The format: a table, or a line of JSON.
    """
    with user_errors():
        runs, files = runs_and_files(run, data)
        if len(files) > 1:
            raise ValueError(f"{files[0]} and {files[1]} are two files of pairs; give only one")
        pairs = files[0] if files else None
        settings = (search, device, skip_bad, precision, convert)
        row = evaluate_runs(runs, pairs, target, beam_width, *settings)
        if form == "json":
            print(json.dumps(row.as_dict(), ensure_ascii=False))
        else:
            print_results([row], with_paper=False)


def evaluate_runs(
    runs: Sequence[Path],
    data: Path | None,
    target: str,
    beam_width: int,
    search: SearchFlags | None,
    device: Device,
    skip_bad: bool,
    precision: Precision = "32-true",
    convert: bool = False,
) -> Evaluation:
    """Evaluate a run, or several as an ensemble; report skipped pairs on standard error."""
    model = load_runs(runs, device, precision)
    skipped: list[DataError] | None = [] if skip_bad else None
    options = (search or SearchFlags()).options(model.signature, beam_width, target=target)
    pairs, own = test_pairs(runs, model, data, target, skipped)
    convert = convert or (own is not None and own.convert)
    _report_unknown_symbols(model.signature, pairs)
    names = ", ".join(run.name for run in runs)
    with progress_bar(f"{names}: {len(pairs)} sequences", len(pairs)) as advance:
        row = evaluate_model(model, pairs, options, convert=convert, skipped=skipped, done=advance)
    if skipped:
        print(skipped_report(skipped, len(pairs)), file=sys.stderr)
    return row


def _report_unknown_symbols(signature: Signature, pairs: Sequence[Pair]) -> None:
    """Print a sentence on standard error if sources have symbols that the model does not know."""
    strange = [pair for pair in pairs if signature.unknown_symbols(pair)]
    if strange:
        symbol = signature.unknown_symbols(strange[0])[0]
        print(
            f"transduce: {len(strange)} of {len(pairs)} pairs have a source symbol that the model "
            f"does not know, which is read as nothing; the first is {symbol!r} in "
            f"{strange[0].origin}",
            file=sys.stderr,
        )


def print_results(rows: Sequence[Evaluation], *, with_paper: bool) -> None:
    """Print the table of results; print the details too if there is only one row."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(results_table(rows, with_paper=with_paper))
    for row in rows:
        if row.detail is not None and len(rows) == 1:
            console.print(error_table(row.detail))
