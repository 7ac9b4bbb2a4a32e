"""Read and write safetensors files with a JSON header; never pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from transduce.files import write_by_rename

VERSION = 1  # of the header
LONGEST_HEADER = 100_000_000  # bytes, by safetensors' own limit
JOINT_NGRAM = "a joint n-gram model"  # the kind of its file
SCALES = "scales."  # prefix of the names of int8 tensors' scales


class CheckpointError(ValueError):
    """The error of a model's file: one sentence with the file and the remedy."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: str
) -> None:
    """Write tensors and a header of JSON values; `kind` names the kind of file in the header."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {"transduce": json.dumps({"kind": kind, "version": VERSION, **header})}
    write_by_rename(path, save(plain, described))


Shape = tuple[int, ...]


def read_header(path: Path, kind: str) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Read the shapes of a file's tensors and its header, without the tensors.

    Raise CheckpointError if it is another file or kind.
    """
    shapes, header = _read_header(path, kind)
    if header["kind"] != kind:
        raise CheckpointError(f"{path} is {header['kind']}, not {kind}; give another file")
    if header["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {header['version']} where {VERSION} is wanted; load it with the "
            "code that wrote it"
        )
    return shapes, header


def _read_header(path: Path, wanted: str) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Read the shapes and the header of a file of any kind and version."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give the folder of a run")
    with _opened(path, wanted) as file:
        metadata = file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    try:
        header = json.loads(metadata["transduce"])
        if {"kind", "version"} <= header.keys():
            return shapes, header
    except (AttributeError, KeyError, ValueError, RecursionError):
        pass
    raise CheckpointError(f"{path} was not written by transduce; give another file")


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `write_tensors`; raise CheckpointError if it is another file or kind."""
    _, header = read_header(path, kind)
    with _opened(path, kind) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118


def is_joint_ngram(path: Path) -> bool:
    """Return whether a file, which need not exist, is of a joint n-gram model, of any version."""
    try:
        _, header = _read_header(path, JOINT_NGRAM)
    except CheckpointError:
        return False
    return bool(header["kind"] == JOINT_NGRAM)


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors do: with the length of a JSON object, and this.

    A damaged file may begin so too.
    """
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[Any]:
    try:
        if not is_safetensors(path):
            raise CheckpointError(
                f"{path} is not {kind}, because it is not a safetensors file; give the folder of a "
                "run, or copy the file again"
            )
        with safe_open(path, "pt") as file:
            yield file
    # PyTorch raises a RuntimeError for a file that is too large to map into memory.
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy or train it again") from None


def stored_shapes(name: str, shape: Shape, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors that a file stores for one: itself and, if it has scales, these."""
    scaled = SCALES + name in shapes
    return {name: shape, SCALES + name: (*shape[:-1], 1)} if scaled else {name: shape}


def quantise(name: str, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a tensor to `dtype`; int8 is for matrices, with scales; the rest is float16.

    A scale is the smallest power of two that reaches the row's largest weight in 127 steps. Streams
    find it again in the float32 weights, and compute with the integers (kernels/simd/int8.py). A
    row that is exact with its largest weight at 127 steps, as in earlier files, stays as it is.
    """
    if dtype == torch.int8 and name.endswith(("weight", "weights")):
        weights = weights.detach().cpu().float()
        largest = weights.abs().amax(-1, keepdim=True).double()
        fraction, exponent = torch.frexp(largest.clamp(min=torch.finfo(torch.float32).tiny) / 127)
        powers = torch.exp2(exponent - (fraction == 0.5).int()).float()
        earlier = largest.float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        is_exact = ((weights / earlier).round() * earlier == weights).all(-1, keepdim=True)
        scales = torch.where(is_exact, earlier, powers)
        return {name: (weights / scales).round().to(dtype), SCALES + name: scales}
    converted = weights.to(torch.float16 if dtype == torch.int8 else dtype)
    if not converted.isfinite().all():
        raise ValueError(f"{name} has a weight that is too large for {dtype}; save in float32")
    return {name: converted}


def dequantise(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor times the scales of its rows, if it is in int8."""
    weights = tensors[name]
    if weights.dtype == torch.int8 and SCALES + name not in tensors:
        raise KeyError(f"tensor {SCALES + name}")
    return weights * tensors[SCALES + name] if weights.dtype == torch.int8 else weights
