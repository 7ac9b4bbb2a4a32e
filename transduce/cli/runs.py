"""Find the runs among the paths of a command; load their models and their data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from transduce.data import kinds
from transduce.data.kinds import Kind, recognise, target_fields
from transduce.data.manifest import read_targets, read_tsv
from transduce.data.pairs import DataError, Pair, check_some_left
from transduce.model.checkpoint import CONFIG_FILE, MODEL_FILE
from transduce.model.model import Model, Precision, load, model_names, model_path
from transduce.model.signature import Signature
from transduce.settings import RecipeError
from transduce.training.corpus import DataConfig, read_splits
from transduce.training.recipe import read_recipe

Device = Literal["auto", "cpu", "cuda"]


def runs_and_files(run: Path, paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split paths into runs (`run`, folders, .safetensors files, names that ship) and data."""
    runs, files = [run], list[Path]()
    for path in paths:
        is_shipped = str(path) in model_names() and not path.exists()
        if path.suffix == ".toml":
            raise ValueError(f"{path} is a recipe; give the folder of its run, or data")
        is_run = path.suffix == ".safetensors" or (path / MODEL_FILE).is_file() or is_shipped
        if path.is_dir() and not is_run and recognise(path) is None:
            raise ValueError(
                f"{path} is a folder without {MODEL_FILE}; give the folders of runs, and data"
            )
        (runs if is_run else files).append(path)
    return runs, files


def announce(*paths: Path | None) -> None:
    """Print a line for each path whose format was recognised, unless it is a plain manifest."""
    for path in dict.fromkeys(paths):
        kind = None if path is None else recognise(path)
        if kind not in (None, Kind.MANIFEST):
            print(f"transduce: reading {path} as {kind.value}", file=sys.stderr)


def load_runs(runs: Sequence[Path], device: Device, precision: Precision = "32-true") -> Model:
    """Load a run, or a model that ships, onto a device; several are an ensemble."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch finds no CUDA GPU here; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load(*runs).to(device, precision)


def test_pairs(
    runs: Sequence[Path],
    model: Model,
    data: Path | None,
    target: str,
    skipped: list[DataError] | None,
) -> tuple[Sequence[Pair], DataConfig | None]:
    """Read the pairs of a path; without one, the test set of the recipe, and return its settings.

    Say what format the path has.
    """
    if data is not None:
        is_sound = _has_sounds(model.signature)
        if is_sound and _kind_of(data, model.signature) is None:
            raise ValueError(
                f"{data} must be a manifest (.jsonl), or sounds with targets in another format, "
                f"because {runs[0]} takes sound or frames"
            )
        if is_sound:
            announce(data)
        pairs = read_pairs(data, model.signature, target, skipped)
        check_some_left(pairs, skipped)
        _check_targets(pairs, data, model.signature)
        return pairs, None
    found = [_data_of(run) for run in runs]
    first = found[0]
    for run, data_of_run in zip(runs, found, strict=True):
        if first is None or data_of_run is None:
            raise ValueError(f"{run} has no data of its own; give a file to evaluate on")
        # The test set of one run may be the training set of another.
        if replace(data_of_run, cache=first.cache) != first:
            raise ValueError(f"{run} has another [data] than {runs[0]}; give a file to evaluate on")
    assert first is not None
    test = read_splits(first, skipped).test
    if not test:
        raise ValueError(f"the recipe of {runs[0]} names no test set; give a file to evaluate on")
    return test, first


def _check_targets(pairs: Sequence[Pair], file: Path, signature: Signature) -> None:
    """Raise a DataError if no pair has a target of symbols that the model knows."""
    alphabet = signature.targets
    if signature.outputs is not None and signature.sources is not None:
        alphabet = signature.sources  # a network that speaks reads the targets
    known = set(alphabet.symbols)
    if any(known.issuperset(pair.target) for pair in pairs):
        return
    remedy = f"give targets of its symbols, such as {alphabet.symbols[0]!r}"
    if _kind_of(file, signature) is not None:
        remedy = f"choose the field with --target: {', '.join(target_fields(file))}"
    unknown = next(symbol for symbol in pairs[0].target if symbol not in known)
    raise pairs[0].origin.error(
        f"the model does not know {unknown!r}, nor all symbols of any other target; {remedy}"
    )


def read_pairs(
    file: Path, signature: Signature, target: str, skipped: list[DataError] | None = None
) -> list[Pair]:
    """Read sounds with targets, or a .tsv file; for a model of sound, a text file of targets."""
    if _kind_of(file, signature) is not None:
        return list(kinds.read_pairs(file, signature.target_notation, target, skipped))
    if signature.source_notation is None:
        return read_targets(file, signature.target_notation, skipped)
    return read_tsv(file, signature.source_notation, signature.target_notation, skipped)


def _kind_of(path: Path, signature: Signature) -> Kind | None:
    """Return the format of sounds with targets; a model of text takes manifests alone."""
    if not _has_sounds(signature):
        return Kind.MANIFEST if path.suffix == ".jsonl" else None
    return recognise(path)


def _has_sounds(signature: Signature) -> bool:
    """Return whether the pairs of a model have sound, which it reads or says."""
    return signature.source_notation is None or signature.outputs is not None


def own_pairs(run: Path) -> Sequence[Pair]:
    """Read the test set of a run, or its validation set; print a message if neither is here."""
    try:
        data = _data_of(run)
        splits = None if data is None else read_splits(data, [])
    except (DataError, RecipeError) as error:
        print(f"There are no examples to choose from: {error}", file=sys.stderr)
        return ()
    return () if splits is None else splits.test or splits.validation


def _data_of(run: Path) -> DataConfig | None:
    """Return the data settings of a run; None for a model file without config.toml."""
    path = model_path(run)
    config = (path if path.is_dir() else path.parent) / CONFIG_FILE
    return read_recipe(config).data if config.is_file() else None
