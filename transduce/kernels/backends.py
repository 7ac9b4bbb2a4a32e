"""Choose the backend of a call: the one asked for, or the one for the tensors' device.

reference   loops that read like the paper; every other backend is tested against it
eager       plain PyTorch operations, on any device; nothing is compiled
cpu         kernels compiled by Numba
cuda        kernels compiled by NVRTC
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "eager", "cpu", "cuda"]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of ids and lengths


def resolve(
    backend: Backend,
    device: torch.device,
    available: tuple[str, ...] = ("reference", "cpu", "cuda"),
) -> str:
    """Return the name of the backend to use; raise ValueError if it cannot work on `device`.

    `auto` is `cuda` for tensors on a GPU and `cpu` for all others, never `reference`.
    """
    if backend == "auto":
        backend = "cuda" if device.type == "cuda" else "cpu"
    if backend not in available:
        names = ", ".join(("auto", *available[:-1]))
        raise ValueError(f"backend must be {names} or {available[-1]}, not {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU; these are on {device}")
    if backend == "cuda" and device.type != "cuda":
        raise ValueError(f"backend 'cuda' needs tensors on a GPU; these are on {device}")
    return backend


def check_tensors(**named: object) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"{name} must be a tensor, not {kind}; call torch.as_tensor on it")


def is_traced(tensor: Tensor) -> bool:
    """Return whether a call is compiled, or has fake tensors, so that it must be an operator."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)


def have_addresses(*tensors: Tensor) -> bool:
    """Return whether kernels can read the tensors. They cannot inside the transforms of torch.func,
    which wrap tensors in others without memory; PyTorch has no public test for all of these."""
    try:
        for tensor in tensors:
            tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def load(package: str, backend: str) -> ModuleType:
    """Import the module of a backend in `lstm`, `lattice` or `decoding` when it is first used."""
    return import_module(f"transduce.{package}.{backend}")
