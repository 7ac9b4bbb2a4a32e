"""A transducer is looked at: why it emits what it emits, and when."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.analysis import LatticeView, Node, transducer_of, view_lattice
from transduce.cli.runs import load_runs, own_pairs, test_pairs
from transduce.cli.terminal import sentences
from transduce.data.batches import Example
from transduce.model.checkpoint import TrainedModel
from transduce.model.inputs import read_input, read_spectrogram
from transduce.model.recognition import recognise


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
    """Draw a figure of the paper: why a transducer emits what it emits, and when.

    Example: transduce plot sensitivity runs/demo/transducer toolworks --at 4,3 --output why.png

    Parameters
    ----------
    figure
        The output lattice with its best alignment, for what is short (Figure 1); the forward and
        backward variables and their product (Figure 2); or a node's outputs and what they are
        sensitive to (Figure 3).
    run
        The folder of a run, its model.safetensors, or the name of a model that ships.
    source
        A line of text, or a sound file or .npy file of frames, whichever the network takes.
    target
        The output sequence; the one that the network finds if it is not given.
    at
        The node t,u of Figure 3, counted from 0; where the middle label is emitted if it is not
        given.
    output
        The file to write, png, svg or pdf; FIGURE.png if it is not given.
    """
    from transduce.analysis import figures

    with sentences():
        if at is not None and figure != "sensitivity":
            raise ValueError(f"--at is of the figure sensitivity; {figure} has no crosshair")
        path = output or Path(f"{figure}.png")
        figures.check_suffix(path)
        model = load_runs([run], "cpu")
        example, view = _view(model, source, target)
        if figure == "lattice":
            drawn = figures.lattice_figure(model, view)
        elif figure == "variables":
            spectrogram = read_spectrogram(model, example.pair)
            drawn = figures.variables_figure(model, view, spectrogram)
        else:
            drawn = figures.sensitivity_figure(model, view, *_node(view, at))
        figures.save_figure(drawn, path)
        print(path)


def explore(
    run: Path,
    /,
    *,
    data: Path | None = None,
    target: str = "text",
    host: str = "127.0.0.1",
    port: int = 8000,
    open_page: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Look at a transducer in the browser: lattices, sensitivities, the search frame by frame.

    Example: transduce explore runs/demo/transducer --open

    It wants a web server: pip install "transduce[web]".

    Parameters
    ----------
    run
        The folder of a transducer's run, its model.safetensors, or the name of a model that ships.
    data
        Examples to pick from: a manifest (.jsonl) or lines of source TAB target (.tsv); the run's
        own test set, or else its validation set, if it is not given.
    target
        Which field of the manifest is the target.
    host
        The address to listen at; by default only this machine can ask.
    port
        The port to listen at; 0 takes any that is free.
    open_page
        Open the page in the browser.
    """
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise SystemExit(
                f'transduce: explore needs {package}; install it with pip install "transduce[web]"'
            )
    from transduce.web.explorer import Explorer
    from transduce.web.server import serve

    with sentences():
        model = load_runs([run], "cpu")
        pairs = own_pairs(run) if data is None else test_pairs([run], model, data, target, None)
        serve(Explorer(model, pairs, str(run)), host, port, open_page)


def _view(model: TrainedModel, source: str, target: str | None) -> tuple[Example, LatticeView]:
    """The input, and its output lattice with the target, or else with what the network finds."""
    transducer_of(model)
    example = read_input(model, source, target)
    labels = example.labels.tolist()
    if target is None:
        [[best, *_]] = recognise(model, [example], beam_width=10)
        labels = list(best.labels)
        if not labels:
            raise ValueError(f"the network outputs nothing for {source}; give a --target")
    return example, view_lattice(model, example.frames, labels)


def _node(view: LatticeView, at: str | None) -> Node:
    """The node that --at names, or the one at which the middle label is emitted."""
    if at is None:
        u = view.num_labels // 2
        return view.timings[u].frame, u
    try:
        t, u = (int(number) for number in at.split(","))
    except ValueError:
        raise ValueError(f"--at wants two whole numbers, such as 4,3, not {at!r}") from None
    return t, u
