"""The demonstration: train the paper's three networks on letters to sounds; print Table 1."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from transduce.analysis import view_lattice
from transduce.data.dictionaries import merge_by_source
from transduce.data.pairs import Pair
from transduce.model.checkpoint import TrainedModel, load_model
from transduce.model.evaluate import GREEDY, evaluate, validation_error
from transduce.model.model import Model
from transduce.tables import results_table
from transduce.training.corpus import read_splits
from transduce.training.fit import fit
from transduce.training.recipe import read_recipe, shipped_recipes

NETWORKS = ("prediction", "ctc", "transducer")
NUM_SHOWN = 10  # words


def run(folder: Path, seed: int, figure: Path | None = None) -> None:
    """Train the three networks on CMUdict, compare them, and pronounce held-out words."""
    console = Console(highlight=False)
    start = time.perf_counter()
    rows = []
    for network in NETWORKS:
        path = shipped_recipes()[f"letters-{network}"]
        recipe = read_recipe(path, {"train.seed": str(seed)})
        console.rule(f"{network} network")
        fit(recipe, folder / network, resume=True, validate=validation_error)
        test = merge_by_source(read_splits(recipe.data).test)
        rows.append(evaluate(load_model(folder / network), test))
    model = load_model(folder / "transducer")
    console.rule("Table 1 of the paper, with letters in place of speech")
    console.print(results_table(rows))
    shown = test[:: max(1, len(test) // NUM_SHOWN)][:NUM_SHOWN]
    console.print(pronunciations(model, shown))
    if figure is not None:
        longest = max(shown, key=lambda pair: len(pair.name))
        draw(model, longest, figure)
        console.print(f"The output lattice of {longest.name!r} is in {figure}")
    console.print(
        f"The runs are in {folder}/ ({time.perf_counter() - start:.0f} s in all). Try:\n"
        f"  {next_command(folder)}",
        soft_wrap=True,
    )


def next_command(folder: Path) -> str:
    """Return a line of shell that tries the transducer, and runs where the demonstration did."""
    run = shlex.quote(str(folder / "transducer"))
    return f"echo transducer | {_this_command()} transcribe {run} --n-best 3"


def _this_command() -> str:
    """Return how to run `transduce` again: by its name if a shell finds it, by its path, or as a
    module of this Python if there is no such program."""
    program = Path(sys.argv[0])
    if program.stem != "transduce":  # another program called us
        program = Path(sys.executable).with_name("transduce")
    if not program.exists():
        return f"{shlex.quote(sys.executable)} -m transduce"
    found = shutil.which("transduce")
    by_name = found is not None and Path(found).samefile(program)
    return "transduce" if by_name else shlex.quote(str(program))


def pronunciations(model: TrainedModel, pairs: list[Pair]) -> Table:
    """Lay out held-out words, the transducer's pronunciations, and those in the dictionary."""
    table = Table("held-out word", "transduced", "in the dictionary", "")
    found = Model.of(model).transcripts(pairs, GREEDY)
    for pair, transcript in zip(pairs, found, strict=True):
        known = [" ".join(reference) for reference in pair.references]
        right = transcript.symbols in pair.references
        table.add_row(pair.name, str(transcript), ", ".join(known), "✓" if right else "")
    return table


def draw(model: TrainedModel, pair: Pair, figure: Path) -> None:
    """Draw the output lattice of a word and its pronunciation."""
    from transduce.analysis.figures import lattice_figure, save_figure

    example = model.signature.example(pair, with_labels=True)
    view = view_lattice(model, example.frames, example.labels)
    save_figure(lattice_figure(model, view), figure)
