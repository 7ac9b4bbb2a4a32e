"""The demonstration: the paper's three networks learn letters to sounds, and print its Table 1."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from transduce.checkpoint import TrainedModel, load_model
from transduce.corpus import read_splits
from transduce.data.dictionaries import by_source
from transduce.data.pairs import Pair
from transduce.evaluation import results_table
from transduce.lattice.loss import best_alignment, lattice_transitions, log_occupancy
from transduce.networks import Transducer
from transduce.recipe import read_recipe
from transduce.recognition import evaluate, recognise, validation_error
from transduce.training import fit

NETWORKS = ("prediction", "ctc", "transducer")
NUM_SHOWN = 10  # words


def run(folder: Path, seed: int, figure: Path | None = None) -> None:
    """Train the three networks on CMUdict, compare them, and pronounce words they have not seen."""
    console = Console(highlight=False)
    start = time.perf_counter()
    rows = []
    for network in NETWORKS:
        recipe = read_recipe(recipe_file(f"letters-{network}"), {"train.seed": str(seed)})
        console.rule(f"{network} network")
        fit(recipe, folder / network, resume=True, validate=validation_error)
        test = by_source(read_splits(recipe.data).test)
        rows.append(evaluate(load_model(folder / network), test))
    model = load_model(folder / "transducer")
    console.rule("the paper's Table 1, with letters for its speech")
    console.print(results_table(rows))
    shown = test[:: max(1, len(test) // NUM_SHOWN)][:NUM_SHOWN]
    console.print(pronunciations(model, shown))
    if figure is not None:
        longest = max(shown, key=lambda pair: len(pair.name))
        draw(model, longest, figure)
        console.print(f"the output lattice of {longest.name!r} is in {figure}")
    console.print(
        f"The runs are in {folder}/ ({time.perf_counter() - start:.0f} s in all). Try:\n"
        f"  echo transducer | transduce transcribe {folder / 'transducer'} --n-best 3"
    )


def recipe_file(name: str) -> Path:
    """A recipe that comes with the package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "recipes" / f"{name}.toml"
    return installed if installed.exists() else package.parent / "recipes" / f"{name}.toml"


def pronunciations(model: TrainedModel, pairs: list[Pair]) -> Table:
    """Words that were held out, as the transducer says them."""
    examples = model.signature.examples(pairs, with_labels=False)
    table = Table("held-out word", "transduced", "in the dictionary", "")
    for example, [best, *_] in zip(examples, recognise(model, examples), strict=True):
        output = tuple(model.signature.targets.decode(best.labels))
        known = [" ".join(reference) for reference in example.pair.references]
        right = output in example.pair.references
        table.add_row(example.pair.name, " ".join(output), ", ".join(known), "✓" if right else "")
    return table


def draw(model: TrainedModel, pair: Pair, figure: Path) -> None:
    """The output lattice of a word: how probable each node is, and the best alignment."""
    from matplotlib.figure import Figure

    assert isinstance(model.network, Transducer)
    [example] = model.signature.examples([pair])
    letters, phones = pair.name, list(pair.target)
    with torch.no_grad():
        f, g, _ = model.network(
            example.frames[None], torch.tensor([example.num_frames]), example.labels[None]
        )
    arrows = lattice_transitions(f[0], g[0], example.labels)
    emitted, _ = best_alignment(*arrows)
    canvas = Figure(figsize=(5, 6), layout="constrained")
    axes = canvas.subplots()
    occupancy = log_occupancy(*arrows).clamp(min=-20)
    image = axes.imshow(occupancy.T, origin="lower", cmap="viridis", aspect="auto")
    path = [(0.0, 0.0)]
    for u, t in enumerate(emitted):
        path += [(t, u), (t, u + 1)]
    path.append((len(letters) - 1, len(phones)))
    axes.plot(*zip(*path, strict=True), color="red", marker=".", label="most probable alignment")
    axes.set_xticks(range(len(letters)), list(letters))
    axes.set_yticks(range(len(phones) + 1), ["∅", *phones])
    axes.set(xlabel="input x, one frame a letter", ylabel="output y, emitted so far")
    axes.legend(loc="upper left")
    canvas.colorbar(image, label="log-probability that the alignment passes the node")
    canvas.savefig(figure, dpi=120)
