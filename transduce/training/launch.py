"""The processes of a training: how many there are, who started them, and how they meet."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from lightning_fabric import Fabric

from transduce.training.checks import TrainingError, end_quietly
from transduce.training.recipe import TrainConfig

SECONDS_BEFORE_NOTE = 10.0  # a process that waits longer for the others says so


@dataclass(frozen=True)
class Launcher:
    """A launcher that has started this process, and the processes that it has started."""

    name: str
    processes: int  # on all machines
    machines: int
    devices: int  # processes on this machine
    is_first_here: bool  # whether this process is the first of its machine
    devices_flag: str  # the launcher's options for these numbers
    machines_flag: str


def launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that set these environment variables: torchrun, srun, or None.

    Inside a job of Slurm, torchrun's variables count. As in Lightning, a job named bash or
    interactive is a shell in which people start processes themselves.
    """

    def number(name: str) -> int:
        try:
            return int(environment[name])
        except (KeyError, ValueError):
            raise TrainingError(
                f"the environment variable {name} is {environment.get(name, 'not set')!r}, "
                "not a number; start the training with torchrun or srun, which set it"
            ) from None

    if "TORCHELASTIC_RUN_ID" in environment:
        return Launcher(
            name="torchrun",
            processes=number("WORLD_SIZE"),
            machines=number("GROUP_WORLD_SIZE"),
            devices=number("LOCAL_WORLD_SIZE"),
            is_first_here=number("LOCAL_RANK") == 0,
            devices_flag="--nproc-per-node",
            machines_flag="--nnodes",
        )
    is_shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" not in environment or is_shell:
        return None
    processes, machines = number("SLURM_NTASKS"), number("SLURM_NNODES")
    if processes % machines:
        raise TrainingError(
            f"srun started {processes} processes on {machines} machines, which cannot be the same "
            "number on each; give srun --ntasks-per-node"
        )
    return Launcher(
        name="srun",
        processes=processes,
        machines=machines,
        devices=processes // machines,
        is_first_here=number("SLURM_LOCALID") == 0,
        devices_flag="--ntasks-per-node",
        machines_flag="--nodes",
    )


def settle_processes(config: TrainConfig, environment: Mapping[str, str]) -> TrainConfig:
    """Return the configuration with the numbers of devices and machines that there are.

    A launcher decides them. Raise TrainingError if the recipe contradicts it.
    """
    found = launcher(environment)
    if found is None:
        machines = config.machines or 1
        if machines > 1 and not {"MASTER_ADDR", "NODE_RANK"} <= environment.keys():
            raise TrainingError(
                f"train.machines is {machines}, but no launcher started this process; start the "
                f"same command on all of them with torchrun --nnodes {machines}, or with srun"
            )
        return replace(config, devices=config.devices or 1, machines=machines)
    for setting, flag, number in (
        ("devices", found.devices_flag, found.devices),
        ("machines", found.machines_flag, found.machines),
    ):
        asked = getattr(config, setting)
        if asked not in (None, number):
            if not found.is_first_here:
                end_quietly()
            raise TrainingError(
                f"train.{setting} is {asked}, but {found.name} has {flag} {number}; set "
                f"train.{setting} to {number}, or give {found.name} {flag} {asked}"
            )
    return replace(config, devices=found.devices, machines=found.machines)


def start_fabric(config: TrainConfig) -> Fabric:
    """Start the processes, unless a launcher has, and connect them.

    `config` is that of `settle_processes`. Raise TrainingError if they do not meet.
    """
    assert config.devices is not None and config.machines is not None
    found = launcher(os.environ)
    processes = found.processes if found else config.devices * config.machines
    if found and found.name == "srun":  # Lightning insists on it, and srun sets it only if asked to
        os.environ["SLURM_NTASKS_PER_NODE"] = str(found.devices)
    fabric = Fabric(
        accelerator=config.device,
        devices=config.devices,
        num_nodes=config.machines,
        strategy="ddp" if processes > 1 else "auto",
        precision="bf16-mixed" if config.precision == "bf16-mixed" else "32-true",
    )
    if processes == 1:
        fabric.launch()
        return fabric
    first_here = found.is_first_here if found else os.environ.get("LOCAL_RANK", "0") == "0"
    with _note_if_slow(f"waiting for the others of {processes} processes", first_here):
        try:
            fabric.launch()
        except torch.distributed.DistError as error:
            reason = str(error).split("\n", 1)[0]
            raise TrainingError(
                f"the {processes} processes did not meet at {_meeting_point()} ({reason}); start "
                "all of them, and let the machines reach each other's ports"
            ) from None
    return fabric


def _meeting_point() -> str:
    """Return the address at which the first process waits for the others."""
    return ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def _note_if_slow(text: str, shown: bool) -> Iterator[None]:
    """Print a note on standard error unless the block ends soon."""

    def note() -> None:
        print(f"transduce: {text} at {_meeting_point()}", file=sys.stderr, flush=True)

    timer = threading.Timer(SECONDS_BEFORE_NOTE, note)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
