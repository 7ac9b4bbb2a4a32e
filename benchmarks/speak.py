"""A continuous transducer that speaks: bits a frame, and whether a recogniser understands it.

`python benchmarks/speak.py RUN RECOGNISER`, such as
`python benchmarks/speak.py runs/speak-digits runs/hear-digits`. The recogniser goes from sound to
the phones that RUN reads; it was trained on the recordings that RUN was trained on. Everything is
measured on the test set of RUN's recipe. Bits are those of a frame whose numbers have mean 0 and
deviation 1 over the training set. A word is understood if it is more probable to the recogniser
than all other words of the test set; its phones are, if they are exactly the transcript.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from measure import machine, show
from torch import Tensor

from transduce.audio.inversion import log_mel_to_samples
from transduce.data.batches import Example
from transduce.data.pairs import Symbols
from transduce.evaluation import bits_per_label
from transduce.lattice.mixtures import SMALLEST_DEVIATION
from transduce.model.checkpoint import CONFIG_FILE
from transduce.model.model import Model, batches_of, load
from transduce.training.corpus import Corpus, read_corpus
from transduce.training.recipe import read_recipe

POSITIONS = 10  # parts of a recording, each with a Gaussian of its own
TAKES = 5  # samples of each input
GENERATIONS = ((0.0, "median"), (0.4, "median"), (0.7, "median"), (1.0, "median"), (1.0, "drawn"))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    run = Path(sys.argv[1])
    model, recogniser = load(run), load(sys.argv[2])
    corpus = read_corpus(read_recipe(run / CONFIG_FILE).data, spoken=True)
    test = model.signature.examples(corpus.splits.test)
    print(machine())
    show("test set, bits a frame", ["model", "bits"], _bits(model, corpus, test))
    show(
        "understood by the recogniser",
        ["sound", "words", "all phones", "of"],
        _heard(model, recogniser, test),
    )


# --- Bits a frame -------------------------------------------------------------------------------


def _bits(model: Model, corpus: Corpus, test: Sequence[Example]) -> list[list[str]]:
    """Return the bits a frame of the Gaussians that know less, and of the model."""
    training = corpus.training
    rows = [
        ["a Gaussian of all frames", _of_all(training, test)],
        ["a Gaussian for each input and tenth of its length", _by_position(training, test)],
        ["a Gaussian around a linear prediction from the output before", _linear(training, test)],
        ["the continuous transducer", _of_model(model, test)],
    ]
    outputs = model.signature.outputs
    assert outputs is not None
    return [[name, f"{bits / outputs.stacking:.1f}"] for name, bits in rows]


@torch.no_grad()
def _of_model(model: Model, examples: Sequence[Example]) -> float:
    nats = sum(float(model.network.losses(batch).sum()) for _, batch in batches_of(model, examples))
    return bits_per_label(nats, sum(example.num_labels for example in examples))


def _of_all(training: Sequence[Example], test: Sequence[Example]) -> float:
    y = torch.cat([example.labels for example in training])
    return _mean_bits([_nats(torch.cat([e.labels for e in test]), *_gaussian(y))])


def _by_position(training: Sequence[Example], test: Sequence[Example]) -> float:
    """Return the bits of Gaussians that know the symbols and, unlike the model, the length."""
    groups: dict[tuple[Symbols, int], list[Tensor]] = {}
    for example in training:
        for position, part in _positions(example.labels):
            groups.setdefault((example.pair.target, position), []).append(part)
    gaussians = {key: _gaussian(torch.cat(parts)) for key, parts in groups.items()}
    return _mean_bits(
        [
            _nats(part, *gaussians[example.pair.target, position])
            for example in test
            for position, part in _positions(example.labels)
        ]
    )


def _positions(outputs: Tensor) -> list[tuple[int, Tensor]]:
    at = torch.arange(len(outputs)) * POSITIONS // len(outputs)
    return [(int(i), outputs[at == i]) for i in at.unique()]


def _linear(training: Sequence[Example], test: Sequence[Example]) -> float:
    """Return the bits of a least-squares prediction of each output from the one before."""
    before, after = (torch.cat(parts).double() for parts in _neighbours(training))
    weights = torch.linalg.lstsq(before, after).solution
    deviation = (after - before @ weights).std(0).clamp(min=SMALLEST_DEVIATION)
    before, after = (torch.cat(parts).double() for parts in _neighbours(test))
    return _mean_bits([_nats(after, before @ weights, deviation)])


def _neighbours(examples: Sequence[Example]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs before, with a one for the bias, and the outputs; before all are zeros."""
    before = []
    for example in examples:
        shifted = torch.nn.functional.pad(example.labels[:-1], (0, 0, 1, 0))
        before.append(torch.nn.functional.pad(shifted, (0, 1), value=1.0))
    return before, [example.labels for example in examples]


def _gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.mean(0), outputs.std(0, correction=0).clamp(min=SMALLEST_DEVIATION)


def _nats(outputs: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the nats of each output [U]."""
    distance = (outputs - mean) / deviation
    return (0.5 * distance.square() + deviation.log() + 0.5 * math.log(2 * math.pi)).sum(-1)


def _mean_bits(nats: Sequence[Tensor]) -> float:
    return float(torch.cat(list(nats)).mean()) / math.log(2)


# --- Recognition --------------------------------------------------------------------------------


def _heard(model: Model, recogniser: Model, test: Sequence[Example]) -> list[list[str]]:
    """Return the shares of recordings and of generated sounds that are understood."""
    outputs, hears = model.signature.outputs, recogniser.signature.features
    assert outputs is not None and hears is not None
    said = [example.pair.target for example in test]
    files = [str(example.pair.source) for example in test]
    rows = [["recordings of the test set", *_understood(recogniser, files, said)]]
    back = [
        log_mel_to_samples(outputs.to_frames(example.labels), outputs.features) for example in test
    ]
    rows.append(["the same from their spectrograms", *_understood(recogniser, back, said)])
    inputs = sorted(set(said))
    for temperature, durations in GENERATIONS:
        asked, sounds = list[Symbols](), list[Tensor]()
        for seed in range(TAKES if temperature else 1):
            options = {"temperature": temperature, "durations": durations, "seed": seed}
            speech = model.speak(list(inputs), **options)
            assert isinstance(speech, list)
            asked += inputs
            silence = torch.zeros(hears.sample_rate // 10)  # where nothing is said
            sounds += [one.samples if len(one.frames) else silence for one in speech]
        name = f"generated, temperature {temperature:g}, durations {durations}"
        rows.append([name, *_understood(recogniser, sounds, asked)])
    return rows


def _understood(
    recogniser: Model, sounds: Sequence[Tensor | str], said: Sequence[Symbols]
) -> list[str]:
    """Return the shares of sounds whose words and phones are understood, and their count."""
    spoken = [tuple(s for s in symbols if "=" not in s) for symbols in said]
    words = sorted(set(spoken))
    examples = [recogniser.signature.example(sound) for sound in sounds]
    nats = torch.stack([_losses(recogniser, examples, word) for word in words])
    right = sum(words[i] == one for i, one in zip(nats.argmin(0).tolist(), spoken, strict=True))
    found = recogniser(list(sounds))
    exact = sum(tuple(one.symbols) == symbols for one, symbols in zip(found, spoken, strict=True))
    return [*(f"{100 * n / len(said):.1f} %" for n in (right, exact)), str(len(said))]


@torch.no_grad()
def _losses(recogniser: Model, examples: Sequence[Example], word: Symbols) -> Tensor:
    """Return -ln Pr of a word for each sound."""
    labels = torch.tensor(recogniser.signature.targets.encode(word))
    losses = torch.zeros(len(examples))
    labelled = [replace(example, labels=labels) for example in examples]
    for indices, batch in batches_of(recogniser, labelled):
        losses[indices] = recogniser.network.losses(batch)
    return losses


if __name__ == "__main__":
    main()
