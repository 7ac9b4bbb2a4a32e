"""Write a model as it ships: in int8, in fewer steps than int8 has, and with a null bias.

`python tools/pack_model.py RUN FILE [--steps 127] [--null-bias 0] [--average RUN...]`, such as
`python tools/pack_model.py runs/deep-transducer english-phone-recogniser.safetensors --steps 63
--null-bias -0.6`. The largest weight of a row has at most so many steps. Fewer steps make the file
no smaller, but a wheel, which is compressed. The null bias is added to the bias of null in the
output layer, so that every search has it. `--average` takes the mean of the weights of several
runs, of which each began with the weights of another one, or with a mean of theirs.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from transduce.alphabet import NULL
from transduce.architectures import Transducer
from transduce.model.checkpoint import load_model, save_model


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
def average(network: Transducer, others: Sequence[Transducer]) -> None:
    """Set the weights to the mean of those of all networks."""
    each = [one.parameters() for one in (network, *others)]
    for ours, *theirs in zip(*each, strict=True):
        ours.copy_(torch.stack([ours, *theirs]).mean(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=127)
    parser.add_argument("--null-bias", type=float, default=0.0)
    parser.add_argument("--average", type=Path, nargs="+", default=[], metavar="RUN")
    arguments = parser.parse_args()
    model = load_model(arguments.run)
    if not isinstance(model.network, Transducer):
        parser.error(f"{arguments.run} is of the kind {model.config.network}; give a transducer")
    others = []
    for run in arguments.average:
        other = load_model(run)
        if not isinstance(other.network, Transducer) or other.config != model.config:
            parser.error(f"{run} has other settings of the network; give one alike")
        others.append(other.network)
    average(model.network, others)
    pack(model.network, arguments.steps, arguments.null_bias)
    save_model(model, arguments.file, torch.int8)
    content = arguments.file.read_bytes()
    print(f"{len(content) / 1e6:.2f} MB, {len(zlib.compress(content)) / 1e6:.2f} MB in a wheel")


if __name__ == "__main__":
    main()
