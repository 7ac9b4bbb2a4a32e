"""Draw the paper's three figures with matplotlib; no other module imports it.

In a map of the lattice, the vertical axis is u, the number of labels emitted so far, and the
horizontal axis is time: seconds for sound, symbols for text. With pooling, a transcription vector
is as wide as the frames that it averages.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from transduce.alphabet import NULL, Alphabet
from transduce.analysis.lattice import Bar, LatticeView, Node, output_bars
from transduce.analysis.sensitivity import one_hot, sensitivity
from transduce.files import write_by_rename
from transduce.model.checkpoint import TrainedModel

SUFFIXES = (".png", ".svg", ".pdf")
# Readers with colour blindness can tell the colours apart, and the colour maps also in grey.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
LATTICE_COLOURS, INPUT_COLOURS, SENSITIVITY_COLOURS = "viridis", "gray_r", "magma"
MOST_VECTORS, MOST_LABELS = 20, 16  # the largest lattice whose arrows are drawn
SMALL = 7  # points, the size of small print
LINE = 0.1  # inches, the height of a line of small print
MOST_NAMES = 60  # source symbols that are written beside a map
NUM_BARS = 7  # in each bar graph
PRODUCT = "their product, ln α(t,u) β(t,u) / Pr(y|x)"


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the suffix names a format that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, whichever the suffix names, whole or not at all."""
    check_suffix(path)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=120)
    try:
        write_by_rename(path, content.getvalue())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); give another path"
        ) from None


# --- Figure 1 -----------------------------------------------------------------------------------


def lattice_figure(model: TrainedModel, view: LatticeView) -> Figure:
    """Draw the output lattice: nodes, null and label transitions, and the best alignment in red.

    More probable arrows are darker. The arrows of the best alignment have their probabilities
    beside them; their product is the probability of the alignment.
    """
    T, U = view.num_vectors, view.num_labels
    if T > MOST_VECTORS or U > MOST_LABELS:
        raise ValueError(
            f"the output lattice has {T} vectors and {U} labels, more than the {MOST_VECTORS} and "
            f"{MOST_LABELS} whose arrows can be drawn; plot its variables instead"
        )
    figure = Figure(figsize=(1.2 + 0.72 * (T + 1), 0.9 + 0.66 * (U + 1)), layout="constrained")
    axes = figure.subplots()
    null, label = view.log_null.exp().tolist(), view.log_label.exp().tolist()
    best = set(pairwise([*view.best_path, (T, U)]))  # the last null leads to the terminal node
    for t in range(T):
        for u in range(U + 1):
            if t < T - 1 or u == U:
                _draw_arrow(axes, (t, u), (t + 1, u), null[t][u], ((t, u), (t + 1, u)) in best)
            if u < U:
                _draw_arrow(axes, (t, u), (t, u + 1), label[t][u], ((t, u), (t, u + 1)) in best)
    nodes = [(t, u) for t in range(T) for u in range(U + 1)] + [(T, U)]
    fills = ["black" if u == 0 else "white" for _, u in nodes]
    ts, us = zip(*nodes, strict=True)
    axes.scatter(ts, us, s=70, c=fills, edgecolors="black", zorder=3)
    axes.scatter([T], [U], s=18, c="black", zorder=4)  # the terminal node is a ring
    names = _source_names(model, view) if _is_text(view) and model.config.pooling == 1 else None
    axes.set_xticks(range(T), names or [str(t) for t in range(T)])
    axes.set_yticks(range(U + 1), ["∅", *model.signature.targets.decode(view.labels.tolist())])
    axes.set(xlim=(-0.5, T + 0.4), ylim=(-0.4, U + 0.5), ylabel="output y, emitted so far")
    axes.set_xlabel("input x" if names else "transcription vector t")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _draw_arrow(axes: Axes, start: Node, end: Node, probability: float, is_best: bool) -> None:
    """Draw an arrow; one of the best alignment is red and has its probability beside it."""
    shade = str(0.85 * (1 - probability))  # "0" is black
    style = {"arrowstyle": "-|>", "shrinkA": 4.5, "shrinkB": 4.5}
    style |= {"color": RED, "linewidth": 2.4} if is_best else {"color": shade, "linewidth": 1.0}
    axes.annotate("", end, start, arrowprops=style, zorder=2 if is_best else 1)
    if is_best:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        is_null = start[1] == end[1]
        axes.annotate(
            f"{probability:.2f}", middle, (-1, 4) if is_null else (4, -1), "data", "offset points",
            ha="center" if is_null else "left", va="bottom" if is_null else "center",
            color=RED, fontsize=SMALL,
        )  # fmt: skip


# --- Figure 2 -----------------------------------------------------------------------------------


def variables_figure(
    model: TrainedModel, view: LatticeView, spectrogram: Tensor | None = None
) -> Figure:
    """Draw the forward variables, the backward variables and their product above the input.

    The input is shown as `spectrogram` [num_frames, channels]; without one, as the frames.
    """
    maps = {
        "forward variables, ln α(t,u)": view.log_alpha,
        "backward variables, ln β(t,u)": view.log_beta,
        PRODUCT: view.log_product,
    }
    height, width = _map_size(view)
    heights = [height, height, height, 0.3 if _is_text(view) else 1.2]
    figure = Figure(figsize=(width + 1.8, sum(heights) + 1.7), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    for axes, (title, log_values) in zip(panels[:3], maps.items(), strict=True):
        image = _draw_lattice(axes, model, view, log_values)
        _name_rows(axes, model, view, height)
        _number_nodes(axes, model, view)
        axes.set_title(title, fontsize=9, loc="left")
        figure.colorbar(image, ax=axes, pad=0.01, aspect=15).ax.tick_params(labelsize=SMALL)
    _draw_input(panels[3], model, view, spectrogram)
    _name_time(panels[3], model, view)
    return figure


# --- Figure 3 -----------------------------------------------------------------------------------


def sensitivity_figure(model: TrainedModel, view: LatticeView, t: int, u: int) -> Figure:
    """Draw the outputs at a node and the sensitivity of one of them to the inputs and the labels.

    At the top right is the product, with a crosshair at the node. Below it are the input and the
    sensitivity to it. To its left are the one-hot labels and the sensitivity to them. At the bottom
    left are the most probable outputs at the node. Sensitivities are absolute values.
    """
    if view.num_labels == 0:
        raise ValueError(
            "the target is empty, so there is no sensitivity to its labels; give another --target"
        )
    by_inputs, by_outputs = sensitivity(model, view, t, u)
    height, width = _map_size(view)
    heights = [height, *((0.3, 2.4) if _is_text(view) else (1.3, 1.3))]
    figure = Figure(figsize=(width + 4.6, sum(heights) + 1.4), layout="constrained")
    figure.suptitle(_crosshair_title(model, view, t, u), fontsize=10)
    cells = figure.add_gridspec(3, 3, height_ratios=heights, width_ratios=[1.7, 1.7, width])

    product = figure.add_subplot(cells[0, 2])
    image = _draw_lattice(product, model, view, view.log_product)
    x = (t + 0.5) * _vector_width(model)
    for line in (product.axvline(x), product.axhline(u)):
        line.set(color=RED, linewidth=1)
    product.set_title("ln Pr(the alignment passes t,u)", fontsize=9, loc="left")
    _number_nodes(product, model, view)
    figure.colorbar(image, ax=product, pad=0.01, aspect=20).ax.tick_params(labelsize=SMALL)

    labels = figure.add_subplot(cells[0, 1], sharey=product)
    _draw_labels(labels, one_hot(view.labels, len(model.signature.targets)), INPUT_COLOURS)
    labels.set_title("outputs y, one-hot", fontsize=9)
    by_labels = figure.add_subplot(cells[0, 0], sharey=product)
    _draw_labels(by_labels, _decades(by_outputs), SENSITIVITY_COLOURS).set_clim(-3, 0)
    by_labels.set_title("sensitivity to y", fontsize=9)
    _name_rows(by_labels, model, view, height)

    frames = figure.add_subplot(cells[1, 2], sharex=product)
    _draw_input(frames, model, view)
    by_frames = figure.add_subplot(cells[2, 2], sharex=product)
    image = _draw_frames(by_frames, model, _decades(by_inputs), SENSITIVITY_COLOURS)
    image.set_clim(-3, 0)
    bar = figure.colorbar(image, ax=by_frames, pad=0.01, aspect=20)
    bar.set_ticks([-3, -2, -1, 0], labels=["0.001", "0.01", "0.1", "1"], fontsize=SMALL)
    bar.set_label("of the largest", fontsize=SMALL)
    by_frames.set_ylabel("sensitivity to x")
    sources = model.signature.sources
    if sources is not None and len(sources) <= MOST_NAMES:
        _name_ticks(by_frames, sources.symbols, 1, heights[2])
    _name_time(by_frames, model, view)

    titles = ("output\ndistribution", "transcription\nnetwork", "prediction\nnetwork")
    bars = zip(titles, output_bars(view, t, u, NUM_BARS), (BLUE, RED, GREEN), strict=True)
    beside = cells[1:, :2].subgridspec(1, 3)
    for i, (title, strongest, colour) in enumerate(bars):
        axes = figure.add_subplot(beside[i])
        _draw_bars(axes, model, strongest, colour)
        axes.set_title(title, fontsize=8)
    return figure


def _crosshair_title(model: TrainedModel, view: LatticeView, t: int, u: int) -> str:
    """Return the title of the figure: the node and the probability of its next label."""
    k = view.next_label(u)
    probability = float((view.transcription[t] + view.prediction[u]).softmax(0)[k])
    return f"Pr({_name(model.signature.targets, k)} | t={t}, u={u}) = {probability:.3f}"


def _draw_labels(axes: Axes, values: Tensor, colours: str) -> AxesImage:
    """Draw values [U, K] of the one-hot labels; row 0 of the lattice has no label."""
    image = axes.imshow(
        values.numpy(), cmap=colours, extent=(0.5, values.shape[1] + 0.5, 0.5, len(values) + 0.5),
        origin="lower", aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axes.set_ylim(-0.5, len(values) + 0.5)
    axes.tick_params(labelleft=False, left=False, labelbottom=False, bottom=False)
    axes.set_xlabel("label k", fontsize=SMALL)
    return image


def _decades(derivatives: Tensor) -> Tensor:
    """Return log10 of absolute values relative to the largest, clamped from below at -3."""
    sizes = derivatives.abs().double()
    return (sizes / sizes.max().clamp(min=1e-300)).clamp(min=1e-3).log10()


def _draw_bars(axes: Axes, model: TrainedModel, strongest: tuple[Bar, ...], colour: str) -> None:
    """Draw a horizontal bar for each output, with its probability."""
    names = [_name(model.signature.targets, bar.label) for bar in strongest]
    axes.barh(range(len(names)), [bar.probability for bar in strongest], color=colour)
    for i, bar in enumerate(strongest):
        inside = bar.probability > 0.6
        axes.text(
            bar.probability + (-0.05 if inside else 0.05), i, f"{bar.probability:.2f}",
            color="white" if inside else "black", ha="right" if inside else "left",
            va="center", fontsize=SMALL - 1,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.set_xticks([0, 1], ["0", "1"], fontsize=SMALL)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


# --- Parts of the figures ----------------------------------------------------------------------


def _draw_lattice(
    axes: Axes, model: TrainedModel, view: LatticeView, log_values: Tensor
) -> AxesImage:
    """Draw a map of log-probabilities [T, U+1]; clamp those far below the best path."""
    T, U = view.num_vectors, view.num_labels
    extent = (0, T * _vector_width(model), -0.5, U + 0.5)
    best = [float(log_values[node]) for node in view.best_path]
    lowest = min(best) - 40
    image = axes.imshow(
        log_values.T.numpy(), cmap=LATTICE_COLOURS, vmin=lowest, vmax=float(log_values.max()),
        extent=extent, origin="lower", aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axes.tick_params(labelleft=False, left=False, labelbottom=False, labelsize=SMALL)
    return image


def _draw_input(
    axes: Axes, model: TrainedModel, view: LatticeView, spectrogram: Tensor | None = None
) -> None:
    """Draw the input: its symbols, the spectrogram, or the frames."""
    if not _is_text(view):
        _draw_frames(
            axes, model, view.frames if spectrogram is None else spectrogram, INPUT_COLOURS
        )
        axes.set_ylabel("input x")
        return
    for i, name in enumerate(_source_names(model, view)):
        axes.text(i + 0.5, 0, name, ha="center", va="center", fontsize=12)
    axes.set_ylim(-1, 1)
    axes.tick_params(labelleft=False, left=False, labelbottom=False)


def _draw_frames(axes: Axes, model: TrainedModel, values: Tensor, colours: str) -> AxesImage:
    """Draw values [num_frames, D] of the frames."""
    extent = (0, len(values) * _frame_width(model), 0.5, values.shape[1] + 0.5)
    image = axes.imshow(
        values.T.numpy(), cmap=colours, extent=extent, origin="lower", aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.tick_params(labelleft=False, left=False, labelbottom=False, labelsize=SMALL)
    return image


def _name_rows(axes: Axes, model: TrainedModel, view: LatticeView, height: float) -> None:
    """Write the target at the side: in each row the label that was emitted last."""
    _name_ticks(axes, ["∅", *model.signature.targets.decode(view.labels.tolist())], 0, height)


def _name_ticks(axes: Axes, names: Sequence[str], first: int, height: float) -> None:
    """Write names at the rows from `first` on, in enough columns that they do not overlap."""
    axes.tick_params(labelleft=True, left=True)
    axes.set_yticks(range(first, first + len(names)), names, fontsize=SMALL)
    columns = math.ceil(len(names) * LINE / height)
    width = 0.85 * SMALL * max(len(name) for name in names) + 2
    for i, tick in enumerate(axes.yaxis.get_major_ticks()):
        tick.set_pad(3 + i % columns * width)


def _name_time(axes: Axes, model: TrainedModel, view: LatticeView) -> None:
    """Label the axis of time."""
    if _is_text(view):
        axes.set_xticks([])
        axes.set_xlabel("input x")
        return
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("frame" if model.signature.features is None else "time, seconds")


def _number_nodes(axes: Axes, model: TrainedModel, view: LatticeView) -> None:
    """Write the numbers t above the map and u to its right."""
    across, upwards = axes.secondary_xaxis("top").xaxis, axes.secondary_yaxis("right").yaxis
    for axis, name, last, offset, width in (
        (across, "t", view.num_vectors - 1, 0.5, _vector_width(model)),
        (upwards, "u", view.num_labels, 0.0, 1.0),
    ):
        round_numbers = MaxNLocator(9, integer=True).tick_values(0, last)
        numbers = sorted({round(n) for n in round_numbers} & set(range(last + 1)))
        places = [(n + offset) * width for n in numbers]
        written = [str(n) if n else f"{name}=0" for n in numbers]
        axis.set_ticks(places, written, fontsize=SMALL)
        axis.set_tick_params(length=2, pad=1)


def _map_size(view: LatticeView) -> tuple[float, float]:
    """Return the height and width of a map of the lattice, in inches."""
    if _is_text(view):
        height, width = 0.22 * (view.num_labels + 1), 0.4 * len(view.frames)
        return min(20.0, max(1.5, height)), min(20.0, max(3.5, width))
    return min(4.0, max(1.6, LINE * view.num_labels / 2)), 7.5


def _is_text(view: LatticeView) -> bool:
    return view.frames.ndim == 1


def _frame_width(model: TrainedModel) -> float:
    """Return the width of a frame on the axis of time: in seconds for sound, else 1."""
    features = model.signature.features
    return 1.0 if features is None else features.shift


def _vector_width(model: TrainedModel) -> float:
    return model.config.pooling * _frame_width(model)


def _source_names(model: TrainedModel, view: LatticeView) -> list[str]:
    """Return the symbols of an input that is text."""
    assert model.signature.sources is not None
    return [_name(model.signature.sources, k) for k in view.frames.tolist()]


def _name(alphabet: Alphabet, k: int) -> str:
    return "∅" if k == NULL else alphabet.decode([k])[0]
