"""Which backend computes: the one asked for, or the one for where the tensors are."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "cpu", "triton"]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of ids and lengths


def load(package: str, backend: Backend, tensor: Tensor) -> ModuleType:
    """The backend's module in a package (`lstm`, `lattice`), imported when first used."""
    if backend == "auto":
        backend = "triton" if tensor.is_cuda else "cpu"
    if backend == "cpu" and tensor.device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU; these are on {tensor.device}")
    if backend == "triton" and not tensor.is_cuda:
        raise ValueError(f"backend 'triton' needs tensors on a GPU; these are on {tensor.device}")
    if backend not in ("reference", "cpu", "triton"):
        raise ValueError(f"backend must be auto, reference, cpu or triton, not {backend!r}")
    name = "triton_kernels" if backend == "triton" else backend
    return import_module(f"transduce.{package}.{name}")
