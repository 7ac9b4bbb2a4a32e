"""Checks before a training begins: its devices, its memory, and the folder of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from lightning_fabric import Fabric

from transduce.kernels.nvrtc import tf32_enabled
from transduce.model.checkpoint import CONFIG_FILE
from transduce.settings import flat_settings
from transduce.training.lock import FolderLock, lock_folder
from transduce.training.recipe import Recipe, TrainConfig, read_recipe

LAST_FILE = "last.safetensors"
# Settings that may change when a run is resumed: its length and its devices.
MAY_CHANGE = {"max_epochs", "patience", "save_every", "device", "devices", "machines"}

SECONDS_TO_SPEAK = 3.0  # for the process of a machine that prints an error, before the others end


class TrainingError(ValueError):
    """The error of a run that cannot begin or continue: one sentence with the remedy."""


def end_quietly() -> NoReturn:
    """Exit with 1 after a while, in which another process of this machine says why.

    torchrun stops all processes of a machine when the first one ends, also one that has yet to
    print its error.
    """
    time.sleep(SECONDS_TO_SPEAK)
    raise SystemExit(1)


def check_memory(needed: int, device: torch.device, what: str, settings: str) -> None:
    """Raise TrainingError if `what` takes more memory than the device has."""
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows does not tell
        return
    if needed > available:
        raise TrainingError(
            f"{what} takes about {needed / 2**30:,.1f} GB of memory, and there are "
            f"{available / 2**30:,.1f}; lower {settings}"
        )


def check_devices(config: TrainConfig, *, is_launched: bool = False) -> None:
    """Raise TrainingError if the recipe asks for more GPUs than there are.

    Several processes on the CPU are started by a launcher, or asked for by name.
    """
    there_are = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and there_are == 0:
        raise TrainingError(
            "train.device is cuda, but PyTorch finds no CUDA GPU here; set train.device to cpu"
        )
    on_cpu = config.device == "cpu" or (there_are == 0 and is_launched)
    if not on_cpu and config.devices is not None and config.devices > max(1, there_are):
        gpus = "is 1 GPU" if there_are == 1 else f"are {there_are} GPUs"
        raise TrainingError(
            f"train.devices is {config.devices}, but there {gpus}; lower it, or set train.device "
            f"to cpu for {config.devices} processes on the CPU"
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Raise TrainingError if the recipe asks for TF32 and PyTorch has not enabled it."""
    if precision == "tf32" and device.type == "cuda" and not tf32_enabled():
        raise TrainingError(
            "train.precision is tf32, but PyTorch multiplies in full float32; call "
            'torch.set_float32_matmul_precision("high") first, as `transduce train` does'
        )


@contextmanager
def open_folder(
    recipe: Recipe, folder: Path, resume: bool, fabric: Fabric
) -> Iterator[FolderLock | None]:
    """Lock the run's folder in the first process; end all if the folder must not be used."""
    with ExitStack() as stack:
        lock, error = None, None
        if fabric.is_global_zero:
            try:
                lock = stack.enter_context(lock_folder(folder))
                _check_folder(recipe, folder, resume)
            except (ValueError, OSError) as refused:
                error = refused
        error = fabric.broadcast(error)
        if error is not None:  # which the first process reports for all
            if fabric.is_global_zero:
                raise error
            end_quietly()
        yield lock


def _check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Raise TrainingError if the folder holds a run that this one would change."""
    if not (folder / LAST_FILE).is_file():
        return
    if not resume:
        raise TrainingError(
            f"{folder} has a run in it; resume it (--resume), or choose another folder (--run)"
        )
    before, now = flat_settings(read_recipe(folder / CONFIG_FILE)), flat_settings(recipe)
    for name, value in now.items():
        if value != before[name] and name.removeprefix("train.") not in MAY_CHANGE:
            raise TrainingError(
                f"the run in {folder} has {name} {before[name]}, not {value}; resume it with its "
                "own settings, or choose another folder"
            )
