"""Draw what a data set holds: lengths, labels, symbols, and what CTC can align."""

from __future__ import annotations

from array import array

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transduce.analysis.figures import BLUE, RED, SMALL
from transduce.training.inspection import Inspection, bin_edges

NUM_BINS = 40
MOST_SYMBOLS = 60  # the most frequent ones, that are named


def data_figure(found: Inspection, title: str, pooling: int) -> Figure:
    """Draw histograms of lengths and labels, the counts of symbols, and labels against frames."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    lengths, labels, symbols, alignable = figure.subplots(2, 2).flat
    is_sound = len(found.seconds) > 0
    _histogram(lengths, found.seconds if is_sound else found.num_frames)
    lengths.set_xlabel("seconds" if is_sound else "frames")
    hours = f", {sum(found.seconds) / 3600:,.2f} hours" if is_sound else ""
    lengths.set_title(f"{len(found):,} sequences{hours}", fontsize=10)
    _histogram(labels, found.num_labels)
    labels.set_xlabel("labels")
    labels.set_title(f"{sum(found.num_labels):,} labels", fontsize=10)
    _draw_symbols(symbols, found)
    _draw_alignable(alignable, found, pooling)
    figure.suptitle(title, fontsize=11)
    for axes in (lengths, labels, symbols, alignable):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _histogram(axes: Axes, values: array[float] | array[int]) -> None:
    axes.hist(np.asarray(values), bins=bin_edges(values, NUM_BINS).tolist(), color=BLUE)
    axes.set_ylabel("sequences")


def _draw_symbols(axes: Axes, found: Inspection) -> None:
    shown = found.symbols.most_common(MOST_SYMBOLS)
    places = range(len(shown))
    axes.bar(places, [count for _, count in shown], color=BLUE)
    names = ["␣" if name.isspace() else name for name, _ in shown]
    turned = 90 if any(len(name) > 1 for name in names) else 0
    axes.set_xticks(places, names, rotation=turned, fontsize=SMALL, parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)
    axes.set_yscale("log")
    axes.set_ylabel("count")
    rest = f", the {MOST_SYMBOLS} most frequent" if len(found.symbols) > MOST_SYMBOLS else ""
    axes.set_title(f"{len(found.symbols):,} symbols{rest}", fontsize=10)


def _draw_alignable(axes: Axes, found: Inspection, pooling: int) -> None:
    vectors = -(-np.asarray(found.num_frames) // pooling)
    labels = np.asarray(found.num_labels)
    axes.scatter(vectors, labels, s=4, color=BLUE, alpha=0.4, linewidths=0, rasterized=True)
    end = max(1, min(vectors.max(), 1.1 * labels.max()))
    axes.plot([0, end], [0, end], color=RED, linewidth=1)
    axes.annotate("labels = frames", (end, end), (4, 0), textcoords="offset points",
                  color=RED, fontsize=SMALL, va="center")  # fmt: skip
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.set_xlabel(f"frames after pooling by {pooling}" if pooling > 1 else "frames")
    axes.set_ylabel("labels")
    few = f"CTC cannot align {found.unalignable.count:,}"
    axes.set_title(few if found.unalignable.count else "CTC can align all", fontsize=10)
