"""The command that draws the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transduce.analysis import LatticeView, Node, transducer_of, view_lattice
from transduce.cli.runs import load_runs
from transduce.cli.terminal import user_errors
from transduce.data.batches import Example
from transduce.data.pairs import Audio, Origin, Pair
from transduce.decoding.options import SearchOptions
from transduce.model.inputs import read_input, read_spectrogram
from transduce.model.model import Model
from transduce.model.speech import speak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH = SearchOptions(beam_width=10, with_timings=False)  # finds the target if none is given


def plot(
    figure: Literal["lattice", "variables", "sensitivity"],
    run: Path,
    source: Annotated[str, Parameter(name="INPUT")],
    /,
    *,
    target: str | None = None,
    at: str | None = None,
    output: Path | None = None,
) -> None:
    """Draw one of the paper's figures, which show when and why a transducer emits each label.

    Example: transduce plot sensitivity runs/demo/transducer toolworks --at 4,3 --output why.png

    Parameters
    ----------
    figure
        lattice: the output lattice and its best alignment, for short inputs (Figure 1). variables:
        the forward variables, the backward variables and their product (Figure 2). sensitivity: the
        output distribution at one node, and the derivatives of one output (Figure 3). A continuous
        transducer has the lattice alone: when each of its input's symbols is said.
    run
        The folder of a run, its model.safetensors, or the name of a model that ships.
    source
        A line of text, a sound file, or a .npy file of frames, whichever the network takes.
    target
        The output sequence; by default the best one that a beam search finds. Of a continuous
        transducer, a sound file; by default what it says itself.
    at
        The node t,u of Figure 3, counted from 0; by default the one that emits the middle label.
    output
        The file to write (png of 300 dpi, svg or pdf); by default FIGURE.png.
    """
    from transduce.analysis import figures

    with user_errors():
        if at is not None and figure != "sensitivity":
            raise ValueError(f"--at is for the figure sensitivity; {figure} has no crosshair")
        path = output or Path(f"{figure}.png")
        figures.check_suffix(path)
        model = load_runs([run], "cpu")
        if model.signature.outputs is not None:
            if figure != "lattice":
                raise ValueError(f"a continuous transducer has no {figure}; plot its lattice")
            figures.save_figure(_speech(model, source, target), path)
            print(path)
            return
        example, view = _view(model, source, target)
        if figure == "lattice":
            drawn = figures.lattice_figure(model, view)
        elif figure == "variables":
            spectrogram = read_spectrogram(model.signature, example.pair)
            drawn = figures.variables_figure(model, view, spectrogram)
        else:
            drawn = figures.sensitivity_figure(model, view, *_node(view, at))
        figures.save_figure(drawn, path)
        print(path)


def _view(model: Model, source: str, target: str | None) -> tuple[Example, LatticeView]:
    """Return the input and its lattice; without a target, search for one."""
    transducer_of(model)
    example = model.signature.example(read_input(model.signature, source), unknown="refuse")
    if target is not None:
        labels = model.signature.labels_of(target).tolist()
    else:
        [found] = model.transcripts([example], SEARCH)
        labels = list(found.hypotheses[0].labels)
        if not labels:
            raise ValueError(f"the network outputs no labels for {source}; give a --target")
    return example, view_lattice(model, example.frames, labels)


def _speech(model: Model, source: str, target: str | None) -> Figure:
    """Draw when each symbol of a line is said in a sound, or in the model's own speech."""
    from transduce.analysis.speech import speech_figure, view_speech

    example = model.signature.example(source, unknown="refuse")
    if target is None:
        [speech] = speak(model, [source])
        outputs = speech.generated.outputs
    else:
        path = Path(target)
        said = Pair(path.stem, Audio(path), tuple(source.split()), Origin(path))
        outputs = model.signature.example(said, with_labels=True).labels
    return speech_figure(view_speech(model, example.frames, outputs))


def _node(view: LatticeView, at: str | None) -> Node:
    """Return the node that --at names; by default the one that emits the middle label."""
    if at is None:
        return view.emitting_node(view.num_labels // 2)
    try:
        t, u = (int(number) for number in at.split(","))
    except ValueError:
        raise ValueError(f"--at must be two whole numbers, such as 4,3, not {at!r}") from None
    return t, u
