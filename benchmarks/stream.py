"""The cost of streams: the share of one core that one stream takes, and that 20 at once take.

`python benchmarks/stream.py [MODEL]`: a model by name or path; by default one of the sizes of the
recipe streaming-transducer, with random weights, whose null is as probable as in speech. The same
model runs in sherpa-onnx beside it, if that is installed, and a model that is given also with its
weights in float32, in case they are held in int8.
"""

from __future__ import annotations

import sys
import time
import warnings
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import torch
from measure import machine, show

from transduce import load
from transduce.alphabet import Alphabet
from transduce.architectures import build_network
from transduce.audio.features import Statistics
from transduce.data.pairs import Notation
from transduce.model.model import Model
from transduce.model.signature import Signature
from transduce.model.stream import Stream
from transduce.training.recipe import read_recipe, recipe_file

clock = time.process_time  # of all threads, so that other work on the machine counts little
SECONDS, PIECE = 10, 0.1  # of sound, and of each piece of it
LABELS_PER_SECOND = 12  # of English phones


def random_model(hidden_size: int | None = None) -> Model:
    """Return a model of the recipe's sizes whose outputs are about as many as those of speech."""
    torch.manual_seed(0)
    recipe = read_recipe(recipe_file(Path("streaming-transducer")))
    config, features = recipe.network, recipe.data.features
    if hidden_size is not None:
        config = replace(config, hidden_size=hidden_size)
    symbols = Alphabet([f"P{i}" for i in range(39)])
    statistics = Statistics(torch.full((features.size,), 10.0), torch.full((features.size,), 3.0))
    signature = Signature(symbols, Notation("spaces", None), None, None, features, statistics)
    model = Model(build_network(config, features.size, 39).eval(), config, signature)
    network, bias = model.network, 0.0
    with torch.no_grad():
        network.transcription_network.output.weight *= 20
        sound = torch.randn(5 * features.sample_rate) / 10
        low, high = 0.0, 40.0
        for _ in range(10):  # the null bias of as many labels as in speech
            bias = (low + high) / 2
            found = model(sound, null_bias=bias)
            low, high = (bias, high) if len(found.symbols) > 5 * LABELS_PER_SECOND else (low, bias)
        network.transcription_network.output.bias[0] += bias
    return model


def in_float32(model: Model) -> Model:
    """Return a copy with one weight of each matrix a bit off, so that a stream keeps float32."""
    copy = Model(deepcopy(model.network), model.config, model.signature)
    with torch.no_grad():
        for name, weights in copy.network.named_parameters():
            if name.endswith("weights"):
                largest = weights.view(-1)[0].abs() + 1
                weights.view(-1)[0] = torch.nextafter(weights.view(-1)[0], largest)
    return copy


def one_stream(model: Model, sound: torch.Tensor, width: int) -> tuple[float, float, float]:
    """Return the share of real time, and the median and the 99th percentile of a piece, in ms."""
    size = round(PIECE * model.signature.features.sample_rate)
    stream, times = model.stream(beam_width=width), []
    for piece in torch.split(sound, size):
        start = clock()
        stream.accept(piece)
        times.append(clock() - start)
    return sum(times) / SECONDS, 1e3 * median(times), 1e3 * quantiles(times, n=100)[98]


def many_streams(model: Model, sound: torch.Tensor, number: int, width: int) -> tuple[float, float]:
    """Return the share of a core that streams side by side take, and the slowest round in ms."""
    size = round(PIECE * model.signature.features.sample_rate)
    streams, times = [model.stream(beam_width=width) for _ in range(number)], []
    for i, piece in enumerate(torch.split(sound, size)):
        pieces = [piece.roll(i * k) for k in range(number)]
        start = clock()
        Stream.accept_many(streams, pieces)
        times.append(clock() - start)
    return sum(times) / SECONDS, 1e3 * max(times)


def sherpa_stream(model: Model, sound: torch.Tensor, folder: Path) -> tuple[float, float, float]:
    """Do the same with the exported model in sherpa-onnx, greedily, in one thread.

    Its frames are others, unless the model was trained with them; the work is the same.
    """
    import sherpa_onnx

    rate = model.signature.features.sample_rate
    files = ("tokens.txt", "encoder-streaming.onnx", "decoder.onnx", "joiner.onnx")
    recogniser = sherpa_onnx.OnlineRecognizer.from_transducer(
        *(str(folder / name) for name in files), num_threads=1, sample_rate=rate
    )
    stream, times = recogniser.create_stream(), []
    for piece in torch.split(sound, round(PIECE * rate)):
        start = clock()
        stream.accept_waveform(rate, piece.numpy())
        while recogniser.is_ready(stream):
            recogniser.decode_stream(stream)
        times.append(clock() - start)
    return sum(times) / SECONDS, 1e3 * median(times), 1e3 * quantiles(times, n=100)[98]


def main() -> None:
    warnings.simplefilter("ignore")  # of searches by a network that has learnt nothing
    print(machine())
    named = {name: load(name) for name in sys.argv[1:]}
    named |= {f"{name}, float32": in_float32(model) for name, model in named.items()}
    models = named or {"recipe's sizes": random_model(), "hidden_size 320": random_model(320)}
    one, many = [], []
    for name, model in models.items():
        rate = model.signature.features.sample_rate
        sound = torch.randn(SECONDS * rate) / 10
        weights = sum(part.numel() for part in model.network.parameters())
        label = f"{name}, {weights / 1e6:.1f} million weights, latency {1e3 * model.latency:.0f} ms"
        torch.set_num_threads(1)
        for width in (1, 4, 10):
            one_stream(model, sound[: 2 * rate], width)
            runs = sorted(one_stream(model, sound, width) for _ in range(3))
            share, middle, high = runs[1]
            row = [f"{100 * share:.1f} %", f"{middle:.2f}", f"{high:.2f}"]
            one.append([label, str(width), *row])
        if find_spec("sherpa_onnx") and find_spec("onnx") and not name.endswith("float32"):
            from transduce.export import export_onnx

            with TemporaryDirectory() as temporary:
                export_onnx(model, folder := Path(temporary) / "exported")
                runs = sorted(sherpa_stream(model, sound, folder) for _ in range(3))
            share, middle, high = runs[1]
            row = [f"{100 * share:.1f} %", f"{middle:.2f}", f"{high:.2f}"]
            one.append([f"{name}, in sherpa-onnx", "greedy", *row])
        for number in (1, 5, 20):
            many_streams(model, sound[: 2 * rate], number, 4)
            share, slowest = sorted(many_streams(model, sound, number, 4) for _ in range(3))[1]
            many.append([label, str(number), f"{100 * share:.0f} %", f"{slowest:.1f}"])
    pieces = f"pieces of {1e3 * PIECE:.0f} ms"
    columns = ["model", "width", "of one core", "median, CPU ms", "99 %, CPU ms"]
    show(f"one stream on one core, {pieces}", columns, one)
    columns = ["model", "streams", "of one core", "slowest round, CPU ms"]
    show(f"streams at once in one thread, width 4, {pieces}", columns, many)


if __name__ == "__main__":
    main()
