"""Write a model as it ships: in int8, in fewer steps than int8 has, and with a null bias.

`python tools/pack_model.py RUN FILE [--steps 127] [--null-bias 0] [--average RUN...]`, such as
`python tools/pack_model.py runs/deep-transducer english-phone-recogniser.safetensors --steps 63
--null-bias -0.6`. The largest weight of a row has at most so many steps. Fewer steps make the file
no smaller, but a wheel, which is compressed. The null bias is added to the bias of null in the
output layer, so that every search has it. `--average` takes the mean of the weights of RUN and of
further runs. They must be a chain, in which each run began with the weights of an earlier one;
their dropout may differ.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transduce.alphabet import NULL
from transduce.architectures import Transducer
from transduce.model.checkpoint import load_model, save_model
from transduce.model.tensors import CheckpointError


@torch.no_grad()
def pack(network: Transducer, steps: int, null_bias: float) -> None:
    """Round the rows of all matrices to a power of two times at most `steps` steps."""
    output = network.transcription_network.output
    assert output.bias is not None
    output.bias[NULL] += null_bias
    for weights in network.parameters():
        if weights.ndim > 1:
            largest = weights.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            scale = torch.exp2((largest / steps).log2().ceil())
            weights.copy_((weights / scale).round() * scale)


@torch.no_grad()
def average(networks: Sequence[Transducer]) -> None:
    """Set the weights of the first network to the mean of those of all."""
    for ours, *theirs in zip(*(one.parameters() for one in networks), strict=True):
        ours.copy_(torch.stack([ours, *theirs]).mean(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=127)
    parser.add_argument("--null-bias", type=float, default=0.0)
    parser.add_argument("--average", type=Path, nargs="+", default=[], metavar="RUN")
    arguments = parser.parse_args()
    networks = []
    for run in (arguments.run, *arguments.average):
        try:
            loaded = load_model(run)
        except CheckpointError as error:
            parser.error(str(error))
        if not isinstance(loaded.network, Transducer):
            parser.error(f"{run} is of the kind {loaded.config.network}; give a transducer")
        if not networks:
            model = loaded
        elif replace(loaded.config, dropout=model.config.dropout) != model.config:
            parser.error(f"{run} has other settings of the network; give one alike")
        networks.append(loaded.network)
    average(networks)
    pack(networks[0], arguments.steps, arguments.null_bias)
    save_model(model, arguments.file, torch.int8)
    content = arguments.file.read_bytes()
    print(f"{len(content) / 1e6:.2f} MB, {len(zlib.compress(content)) / 1e6:.2f} MB in a wheel")


if __name__ == "__main__":
    main()
