"""The command that writes a model for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from transduce.cli.runs import load_runs
from transduce.cli.terminal import user_errors
from transduce.export import export_onnx, unlike_sherpa


def export(
    run: Path,
    /,
    *,
    output: Path,
    format: Literal["onnx"] = "onnx",
    int8: bool = False,
) -> None:
    """Write a model as ONNX graphs, for onnxruntime, browsers and sherpa-onnx.

    Example: transduce export english-pronouncer --output exported

    The command needs the package onnx: pip install "transduce[onnx]".

    Parameters
    ----------
    run
        The folder of a run, its model.safetensors, or the name of a model that ships.
    output
        The folder to write; it must not exist.
    format
        The format: onnx.
    int8
        Store the matrices in int8, which takes a quarter of the space.
    """
    with user_errors():
        model = load_runs([run], "cpu")
        names = export_onnx(model, output, int8=int8)
        print(f"wrote {', '.join(names)} into {output}")
        if reason := unlike_sherpa(model):
            print(f"For sherpa-onnx, note that {reason}.")
