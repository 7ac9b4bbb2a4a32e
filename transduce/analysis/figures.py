"""Draw the paper's three figures with matplotlib.

In a map of the lattice, the vertical axis is u, the number of labels emitted so far, and the
horizontal axis is time: seconds for sound, symbols for text. With pooling, a transcription vector
is as wide as the frames that it averages.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from transduce.alphabet import NULL, Alphabet
from transduce.analysis.colours import DECADES, heat_colours
from transduce.analysis.lattice import Arrow, Bar, LatticeView, arrows, output_bars
from transduce.analysis.sensitivity import one_hot, sensitivity
from transduce.files import write_by_rename
from transduce.model.checkpoint import TrainedModel

SUFFIXES = (".png", ".svg", ".pdf")
# Readers with colour blindness can tell the colours apart, and the colour maps also in grey.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
LATTICE_COLOURS, INPUT_COLOURS = "viridis", "gray_r"
SENSITIVITY_COLOURS = ListedColormap(heat_colours() / 255.0, "heat")
DPI = 300  # of a PNG: that of print, against the size of the file
# The colours of a map begin so many nats below the worst node of the best alignment: more show less
# probable nodes, fewer show more contrast.
NATS = 40
MOST_VECTORS, MOST_LABELS = 20, 16  # the largest lattice whose arrows are drawn
SMALL = 7  # points, the size of small print
LINE = 0.1  # inches, the height of a line of small print
MOST_NAMES = 60  # source symbols that are written beside a map
NUM_BARS = 7  # in each bar graph
LEADER = "0.6"  # the grey of a line from a name to its row
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
ORDINALS = {2: "2nd", 3: "3rd"}


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the suffix names a format that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, whichever the suffix names, whole or not at all."""
    check_suffix(path)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=DPI)
    try:
        write_by_rename(path, content.getvalue())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); give another path"
        ) from None


# --- Figure 1 -----------------------------------------------------------------------------------


def lattice_figure(model: TrainedModel, view: LatticeView) -> Figure:
    """Draw the output lattice: nodes, null and label transitions, and the best alignment in red.

    The darkness of an arrow is the probability that the alignment takes it, given the target. The
    arrows of the best alignment have their own probabilities beside them; their product is the
    probability of the alignment.
    """
    T, U = view.num_vectors, view.num_labels
    if T > MOST_VECTORS or U > MOST_LABELS:
        raise ValueError(
            f"the output lattice has {T} vectors and {U} labels, more than the {MOST_VECTORS} and "
            f"{MOST_LABELS} whose arrows can be drawn; plot its variables instead"
        )
    figure = Figure(figsize=(1.2 + 0.72 * (T + 1), 1.2 + 0.66 * (U + 1)), layout="constrained")
    axes = figure.subplots()
    for arrow in arrows(view):
        _draw_arrow(axes, arrow)
    nodes = [(t, u) for t in range(T) for u in range(U + 1)] + [view.terminal]
    fills = ["black" if u == view.start[1] else "white" for _, u in nodes[:-1]] + ["white"]
    ts, us = zip(*nodes, strict=True)
    axes.scatter(ts, us, s=70, c=fills, edgecolors="black", zorder=3)
    axes.scatter(*view.terminal, s=18, c="black", zorder=4)  # the terminal node is a ring
    names = _source_names(model, view) if _is_text(view) and view.pooling == 1 else None
    axes.set_xticks(range(T), names or [str(t) for t in range(T)])
    axes.set_yticks(range(U + 1), _row_names(model, view))
    axes.set(xlim=(min(ts) - 0.5, max(ts) + 0.5), ylim=(-0.4, U + 0.5))
    axes.set_ylabel("output y, emitted so far")
    axes.set_xlabel("input x" if names else "transcription vector t")
    axes.set_title(_likelihood_title(view), fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _draw_arrow(axes: Axes, arrow: Arrow) -> None:
    """Draw an arrow; one of the best alignment is red and has its probability beside it."""
    start, end = arrow.start, arrow.end
    shade = str(0.88 * (1 - min(1.0, math.exp(arrow.log_posterior))))  # "0" is black
    style = {"arrowstyle": "-|>", "shrinkA": 4.5, "shrinkB": 4.5}
    style |= {"color": RED, "linewidth": 2.4} if arrow.is_best else {"color": shade}
    axes.annotate("", end, start, arrowprops=style, zorder=2 if arrow.is_best else 1)
    if arrow.is_best:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.annotate(
            f"{math.exp(arrow.log_prob):.2f}", middle, (-1, 4) if arrow.is_null else (4, -1),
            "data", "offset points", ha="center" if arrow.is_null else "left",
            va="bottom" if arrow.is_null else "center", color=RED, fontsize=SMALL,
        )  # fmt: skip


# --- Figure 2 -----------------------------------------------------------------------------------


def variables_figure(
    model: TrainedModel, view: LatticeView, spectrogram: Tensor | None = None
) -> Figure:
    """Draw the forward variables, the backward variables and their product above the input.

    The three maps have one colour scale. The input is shown as `spectrogram` [num_frames,
    channels]; without one, as the frames.
    """
    maps = {
        "forward variables, ln α(t,u) (Eq. 16)": view.log_alpha,
        "backward variables, ln β(t,u) (Eq. 18)": view.log_beta,
        "their product, ln α(t,u) β(t,u) / Pr(y|x) (Eq. 19)": view.log_product,
    }
    lowest = min(_lowest(view, log_values) for log_values in maps.values())
    height, width = _map_size(view)
    heights = [height, height, height, 0.3 if _is_text(view) else 1.2]
    figure = Figure(figsize=(width + 1.8, sum(heights) + 2.0), layout="constrained")
    figure.suptitle(_likelihood_title(view), fontsize=10)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    for axes, (title, log_values) in zip(panels[:3], maps.items(), strict=True):
        image = _draw_lattice(axes, model, view, log_values, lowest)
        _name_rows(axes, model, view, height)
        _number_nodes(axes, model, view)
        axes.set_title(title, fontsize=9, loc="left")
    bar = figure.colorbar(image, ax=list(panels[:3]), pad=0.01, aspect=3 * height / 0.15)
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("natural logarithm", fontsize=SMALL)
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
    image = _draw_lattice(product, model, view, view.log_product, _lowest(view, view.log_product))
    x = _time_of(model, view, t + 0.5)
    for line in (product.axvline(x), product.axhline(u)):
        line.set(color=RED, linewidth=1)
    product.set_title("ln Pr(the alignment passes t,u) (Eq. 19)", fontsize=9, loc="left")
    _number_nodes(product, model, view)
    figure.colorbar(image, ax=product, pad=0.01, aspect=20).ax.tick_params(labelsize=SMALL)

    labels = figure.add_subplot(cells[0, 1], sharey=product)
    hot = one_hot(view.labels, len(model.signature.targets))
    _draw_labels(labels, view, hot, INPUT_COLOURS)
    labels.set_title("outputs y, one-hot", fontsize=9)
    by_labels = figure.add_subplot(cells[0, 0], sharey=product)
    image = _draw_labels(by_labels, view, _decades(by_outputs), SENSITIVITY_COLOURS)
    image.set_clim(-DECADES, 0)
    by_labels.set_title("sensitivity to y", fontsize=9)
    _name_rows(by_labels, model, view, height)

    frames = figure.add_subplot(cells[1, 2], sharex=product)
    _draw_input(frames, model, view)
    by_frames = figure.add_subplot(cells[2, 2], sharex=product)
    image = _draw_frames(by_frames, model, _decades(by_inputs), SENSITIVITY_COLOURS)
    image.set_clim(-DECADES, 0)
    bar = figure.colorbar(image, ax=by_frames, pad=0.01, aspect=20)
    powers = range(-DECADES, 1)
    bar.set_ticks(powers, labels=[f"{10.0**n:g}" for n in powers], fontsize=SMALL)
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
    next_label = f"Pr({_name(model.signature.targets, k)} | t={t}, u={u}) = {probability:.3f}"
    return f"{next_label},   {_likelihood_title(view)}"


def _draw_labels(
    axes: Axes, view: LatticeView, values: Tensor, colours: str | Colormap
) -> AxesImage:
    """Draw values [U, K] of the one-hot labels, each in the row that emitting it leads to."""
    bottom = view.first_row - 0.5
    extent = (0.5, values.shape[1] + 0.5, bottom, bottom + len(values))
    image = axes.imshow(
        values.numpy(), cmap=colours, extent=extent, origin="lower", aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set_ylim(-0.5, view.num_labels + 0.5)
    axes.tick_params(labelleft=False, left=False, labelbottom=False, bottom=False)
    axes.set_xlabel("label k", fontsize=SMALL)
    return image


def _decades(derivatives: Tensor) -> Tensor:
    """Return log10 of absolute values relative to the largest, clamped from below at -DECADES."""
    sizes = derivatives.abs().double()
    return (sizes / sizes.max().clamp(min=1e-300)).clamp(min=10.0**-DECADES).log10()


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


def _lowest(view: LatticeView, log_values: Tensor) -> float:
    """Return the log-probability at which the colours of a map begin."""
    return min(float(log_values[node]) for node in view.best_path) - NATS


def _draw_lattice(
    axes: Axes, model: TrainedModel, view: LatticeView, log_values: Tensor, lowest: float
) -> AxesImage:
    """Draw a map of log-probabilities [T, U+1] in colours from `lowest` to 0."""
    left, right = _time_of(model, view, 0), _time_of(model, view, view.num_vectors)
    extent = (left, right, -0.5, view.num_labels + 0.5)
    image = axes.imshow(
        log_values.T.numpy(), cmap=LATTICE_COLOURS, vmin=lowest, vmax=0.0,
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


def _draw_frames(
    axes: Axes, model: TrainedModel, values: Tensor, colours: str | Colormap
) -> AxesImage:
    """Draw values [num_frames, D] of the frames."""
    extent = (0, len(values) * _frame_width(model), 0.5, values.shape[1] + 0.5)
    image = axes.imshow(
        values.T.numpy(), cmap=colours, extent=extent, origin="lower", aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.tick_params(labelleft=False, left=False, labelbottom=False, labelsize=SMALL)
    return image


def _row_names(model: TrainedModel, view: LatticeView) -> list[str]:
    """Return the names of the rows: in each the label that was emitted last."""
    names = model.signature.targets.decode(view.labels.tolist())
    return [*names, "∅"] if view.backwards else ["∅", *names]


def _name_rows(axes: Axes, model: TrainedModel, view: LatticeView, height: float) -> None:
    """Write the target at the side: in each row the label that was emitted last."""
    _name_ticks(axes, _row_names(model, view), 0, height)


def _name_ticks(axes: Axes, names: Sequence[str], first: int, height: float) -> None:
    """Write names at the rows from `first` on, where need be in two columns with leader lines.

    If two columns are too few, write every n-th name, tick every row, and say so.
    """
    every = math.ceil(len(names) * LINE / (2 * height))
    written = names[::every]
    axes.tick_params(labelleft=True, left=True)
    axes.set_yticks(range(first, first + len(names), every), written, fontsize=SMALL)
    if every > 1:
        axes.set_yticks(range(first, first + len(names)), minor=True)
        axes.tick_params(which="minor", left=True)
        note = f"every {ORDINALS.get(every, f'{every}th')} label is named"
        axes.set_ylabel(note, fontsize=SMALL)
    columns = math.ceil(len(written) * LINE / height)
    width = 0.85 * SMALL * max(len(name) for name in names) + 2
    for i, tick in enumerate(axes.yaxis.get_major_ticks()):
        if i % columns:
            tick.set_pad(3 + width)
            # After `set_pad`, which resets the length of the tick.
            tick.tick1line.set(markersize=3 + width, markeredgecolor=LEADER, markeredgewidth=0.5)


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
    for axis, name, last, place in (
        (across, "t", view.num_vectors - 1, lambda t: _time_of(model, view, t + 0.5)),
        (upwards, "u", view.num_labels, float),
    ):
        round_numbers = MaxNLocator(9, integer=True).tick_values(0, last)
        numbers = sorted({round(n) for n in round_numbers} & set(range(last + 1)))
        places = [place(n) for n in numbers]
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


def _time_of(model: TrainedModel, view: LatticeView, t: float) -> float:
    """Return the place of vector t on the axis of time."""
    return (view.first_frame(0) + view.pooling * t) * _frame_width(model)


def _likelihood_title(view: LatticeView) -> str:
    """Return the probability of the target as a title."""
    tens = math.floor(view.log_likelihood / math.log(10))
    if tens >= -3:
        return f"Pr(y|x) = {math.exp(view.log_likelihood):.3g}"
    digits = math.exp(view.log_likelihood - tens * math.log(10))
    return f"Pr(y|x) = {digits:.2f}·10{str(tens).translate(SUPERSCRIPTS)}"


def _source_names(model: TrainedModel, view: LatticeView) -> list[str]:
    """Return the symbols of an input that is text."""
    assert model.signature.sources is not None
    return [_name(model.signature.sources, k) for k in view.frames.tolist()]


def _name(alphabet: Alphabet, k: int) -> str:
    return "∅" if k == NULL else alphabet.decode([k])[0]
