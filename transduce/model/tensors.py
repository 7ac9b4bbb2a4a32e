"""Tensors and a JSON header in one safetensors file, written whole or not at all. No pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from transduce.files import write_by_rename

VERSION = 1  # of the header
SCALES = "scales."  # prefix of the name of the scales of a tensor in int8


class CheckpointError(ValueError):
    """A fault of a model's file: one sentence with the file and what to do."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: str
) -> None:
    """Write tensors and a header of JSON values; `kind` tells one sort of file from another."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {"transduce": json.dumps({"kind": kind, "version": VERSION, **header})}
    write_by_rename(path, save(plain, described))


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; raise CheckpointError if it is anything else."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give the folder of a run")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy or make it again") from None
    try:
        header = json.loads(metadata["transduce"])
        found = (header["kind"], header["version"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} was not written by transduce; give another file") from None
    if found[0] != kind:
        raise CheckpointError(f"{path} is {found[0]}, not {kind}; give another file")
    if found[1] != VERSION:
        raise CheckpointError(
            f"{path} has version {found[1]} where {VERSION} is wanted; read it as it was written"
        )
    return tensors, header


def quantise(name: str, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a tensor to `dtype`; in int8, matrices have a scale for every row, the rest is
    float16."""
    if dtype == torch.int8 and name.endswith(("weight", "weights")):
        scales = (
            weights.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        )
        return {name: (weights / scales).round().to(dtype), SCALES + name: scales}
    converted = weights.to(torch.float16 if dtype == torch.int8 else dtype)
    if not converted.isfinite().all():
        raise ValueError(f"{name} has a weight that is too large for {dtype}; save it in float32")
    return {name: converted}


def dequantise(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor with the scales of its rows applied."""
    weights = tensors[name]
    return weights * tensors[SCALES + name] if weights.dtype == torch.int8 else weights
