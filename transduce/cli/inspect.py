"""The command that shows what a data set holds."""

from __future__ import annotations

import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, zip_longest
from math import floor, log10
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transduce.cli.terminal import progress_bar, user_errors
from transduce.data.pairs import Notation
from transduce.model.inputs import check_exists
from transduce.training.inspection import Inspection, Trouble, bin_edges, inspect_data
from transduce.training.recipe import read_recipe, recipe_file

NUM_BINS, BAR = 10, 24  # of a histogram in the terminal, and its width
RARE = 10  # symbols of fewer occurrences may be mistakes


def inspect(
    path: Path,
    /,
    *,
    target: str = "text",
    split: Literal["characters", "spaces"] | None = None,
    recipe: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Show what a data set holds, and what in it cannot be trained on.

    Example: transduce inspect train.jsonl --target phones --split spaces --figure data.png

    The command prints the format of the data, the number of sequences, hours, histograms of
    lengths and labels, all symbols, the sequences that cannot be read or that CTC cannot align, and
    the memory of the largest step. It reads the headers of sound files, and does not decode them.
    The exit code is 1 if nothing can be read.

    Parameters
    ----------
    path
        A manifest (.jsonl), sounds with targets in another format (docs/data.md), or a file with a
        source, a tab and a target on each line (.tsv).
    target
        The field that holds the target.
    split
        Whether the symbols of a target are characters, or separated by spaces; by default as the
        recipe says, and characters for sounds without one.
    recipe
        The recipe whose features, network and batches decide about frames and memory; by default
        pairs-transducer for a .tsv file, and speech-transducer for sounds.
    figure
        A file for a figure of the same (png, svg or pdf).
    """
    with user_errors():
        if figure is not None:
            from transduce.analysis.data_figure import data_figure
            from transduce.analysis.figures import check_suffix, save_figure

            check_suffix(figure)
        check_exists(path)
        is_text = path.suffix == ".tsv"
        if recipe is None and split is None and not is_text:
            split = "characters"
        recipe = recipe or Path("pairs-transducer" if is_text else "speech-transducer")
        settled = read_recipe(recipe_file(recipe))
        if settled.network.network == "continuous":
            raise ValueError(
                f"inspect shows data as a recogniser reads them, and {recipe} speaks; give another "
                "--recipe"
            )
        notation: Notation = settled.data.target_notation
        if split is not None:
            notation = replace(notation, split=split)
        with progress_bar(f"reading {path}", None) as advance:
            found = inspect_data(path, target, notation, settled, advance)
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print(_summary(found, recipe.stem))
        if len(found):
            console.print(_histograms(found))
            console.print(_symbols(found.symbols), soft_wrap=True)
        for name, trouble in (
            ("cannot be read", found.unreadable),
            ("cannot be aligned by CTC", found.unalignable),
            ("do not fit into a step", found.oversized),
        ):
            _print_trouble(console, name, trouble)
        if figure is not None and len(found):
            with warnings.catch_warnings():  # of symbols that the font does not have
                warnings.filterwarnings("ignore", "Glyph")
                save_figure(data_figure(found, str(path), settled.network.pooling), figure)
            console.print(str(figure), markup=False, highlight=False, soft_wrap=True)
        if not len(found):
            raise ValueError(f"nothing in {path} can be read; correct it, or give other data")


def _summary(found: Inspection, recipe: str) -> Table:
    table = Table("measure", "value")
    table.add_row("format", found.kind)
    table.add_row("sequences", f"{len(found):,}")
    table.add_row("cannot be read", f"{found.unreadable.count:,}")
    if not len(found):
        return table
    if len(found.seconds):
        table.add_row("hours", f"{sum(found.seconds) / 3600:,.2f}")
        table.add_row("seconds", _spread(found.seconds, ".2f"))
        table.add_row("samples a second", _counts(found.rates))
        table.add_row("channels", _counts(found.channels))
    table.add_row("frames", _spread(found.num_frames, ",.0f"))
    table.add_row("labels", f"{sum(found.num_labels):,}")
    table.add_row("labels a sequence", _spread(found.num_labels, ",.0f"))
    table.add_row("symbols", f"{len(found.symbols):,}")
    table.add_row("CTC cannot align", f"{found.unalignable.count:,}")
    if found.oversized.count:
        table.add_row("do not fit into a step", f"{found.oversized.count:,}")
    if found.step is not None:
        size = f"{found.step.num_bytes / 2**20:,.1f} MB"
        table.add_row("the largest step", f"{size}: {found.step.described()}")
    table.caption = f"frames, alignments and steps are those of {recipe}"
    return table


def _spread(values: array[float] | array[int], form: str) -> str:
    least, middle, most = np.quantile(np.asarray(values), (0, 0.5, 1))
    return f"{least:{form}} to {most:{form}}, median {middle:{form}}"


def _counts(counts: Counter[int]) -> str:
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{value} ({count:,})" for value, count in counts.most_common())


def _histograms(found: Inspection) -> Table:
    """Lay out the histograms of lengths and of labels side by side."""
    is_sound = len(found.seconds) > 0
    lengths = _bins(found.seconds if is_sound else found.num_frames)
    labels = _bins(found.num_labels)
    name = "seconds" if is_sound else "frames"
    table = Table(name, "sequences", "", "labels", "sequences", "", box=None)
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    for left, right in zip_longest(lengths, labels, fillvalue=("", "", "")):
        table.add_row(*left, *right)
    return table


def _bins(values: array[float] | array[int]) -> Iterator[tuple[str, str, str]]:
    """Yield the range, the count and the bar of each bin."""
    edges = bin_edges(values, NUM_BINS)
    counts, _ = np.histogram(np.asarray(values), edges)
    decimals = max(1, -floor(log10(edges[1] - edges[0])))
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        bar = "█" * round(BAR * count / counts.max()) or ("▏" if count else "")
        if values.typecode == "d":
            within = f"{low:.{decimals}f}-{high:.{decimals}f}"
        else:  # the first and the last whole number
            within = "-".join(dict.fromkeys(f"{end:.0f}" for end in (low + 0.5, high - 0.5)))
        yield within, f"{count:,}", bar


def _symbols(symbols: Counter[str]) -> Text:
    """Write all symbols with their counts, the most frequent first."""
    written = "  ".join(f"{_shown(name)} {count:,}" for name, count in symbols.most_common())
    rare = [_shown(name) for name, count in sorted(symbols.items()) if count < RARE]
    note = f"\nfewer than {RARE} times: {' '.join(rare)}" if rare else ""
    return Text(f"\nsymbols: {written}{note}\n")


def _shown(symbol: str) -> str:
    """Return a symbol as it is printed: space as ␣, what cannot be seen by its code."""
    if symbol == " ":
        return "␣"
    return symbol if symbol.isprintable() else f"U+{ord(symbol[0]):04X}"


def _print_trouble(console: Console, name: str, trouble: Trouble) -> None:
    if not trouble.count:
        return
    lines = [f"{trouble.count:,} {name}:", *(f"  {one}" for one in trouble.first)]
    if trouble.count > len(trouble.first):
        lines.append(f"  and {trouble.count - len(trouble.first):,} more")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
