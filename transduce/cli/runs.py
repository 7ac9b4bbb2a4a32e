"""Runs as commands name them: which paths are runs, their models, their data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from transduce.data.manifest import read_manifest, read_tsv
from transduce.data.pairs import DataError, Pair
from transduce.model.checkpoint import CONFIG_FILE, MODEL_FILE, TrainedModel, load_ensemble
from transduce.model.model import model_path
from transduce.settings import RecipeError
from transduce.training.corpus import DataConfig, read_splits
from transduce.training.recipe import read_recipe

Device = Literal["auto", "cpu", "cuda"]


def runs_and_files(run: Path, paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The runs, of which `run` is the first, and what is not a run: folders and models are."""
    runs, files = [run], list[Path]()
    for path in paths:
        if path.is_dir() and not (path / MODEL_FILE).is_file():
            raise ValueError(f"{path} is a folder without {MODEL_FILE}; give runs and files")
        (runs if path.is_dir() or path.suffix == ".safetensors" else files).append(path)
    return runs, files


def load_runs(runs: Sequence[Path], device: Device) -> TrainedModel:
    """The model of a run or of a name, or the ensemble of several, where it is to compute."""
    model = load_ensemble([model_path(run) for run in runs])
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.network.to(device)
    return model


def test_pairs(
    runs: Sequence[Path],
    model: TrainedModel,
    data: Path | None,
    target: str,
    skipped: list[DataError] | None,
) -> Sequence[Pair]:
    """The pairs of a file, or else of the test set that the run's recipe names."""
    signature = model.signature
    if data is None:
        found = [_data_of(run) for run in runs]
        first = found[0]
        for run, data_of_run in zip(runs, found, strict=True):
            if first is None or data_of_run is None:
                raise ValueError(f"{run} comes without data; give a file to evaluate on")
            # What one has not seen may be what another was trained on.
            if replace(data_of_run, cache=first.cache) != first:
                raise ValueError(
                    f"{run} has another [data] than {runs[0]}; give a file to evaluate on"
                )
        assert first is not None
        pairs: Sequence[Pair] = read_splits(first, skipped).test
        if not pairs:
            raise ValueError(
                f"the recipe of {runs[0]} names no test set; give a file to evaluate on"
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


def own_pairs(run: Path) -> Sequence[Pair]:
    """A run's test set, or else its validation set; none, saying so, where its data is not here."""
    try:
        data = _data_of(run)
        splits = None if data is None else read_splits(data, [])
    except (DataError, RecipeError) as error:
        print(f"There are no examples to pick from: {error}", file=sys.stderr)
        return ()
    return () if splits is None else splits.test or splits.validation


def _data_of(run: Path) -> DataConfig | None:
    """What a run was trained on; None of a model that is here without its run."""
    path = model_path(run)
    config = (path if path.is_dir() else path.parent) / CONFIG_FILE
    return read_recipe(config).data if config.is_file() else None
