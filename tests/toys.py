"""Small corpora and recipes for the tests of training."""

import json
import random
from dataclasses import replace

import numpy as np
import soundfile

from transduce.architectures import NetworkConfig
from transduce.audio.features import FeatureSettings
from transduce.training.corpus import DataConfig
from transduce.training.recipe import Recipe, TrainConfig

SMALL = {"hidden_size": 24, "prediction_size": 24}


def write_toy(path, count=120, seed=0):
    """Write a TSV of words and the same words in capitals; two letters may follow each letter."""
    draw = random.Random(seed)
    lines = set()
    while len(lines) < count:
        word = [draw.choice("abcd")]
        for _ in range(draw.randint(1, 5)):
            word.append(draw.choice({"a": "bc", "b": "cd", "c": "da", "d": "ab"}[word[-1]]))
        lines.add("".join(word))
    path.write_text("".join(f"{word}\t{word.upper()}\n" for word in sorted(lines)))
    return path


def toy_recipe(tmp_path, kind="transducer", **train):
    """Return a recipe for the toy corpus: by default three epochs of AdamW in small batches."""
    settings = {
        "optimiser": "adamw",
        "learning_rate": 0.02,
        "weight_noise": 0.0,
        "max_sequences": 8,
        "max_epochs": 3,
        "device": "cpu",
    }
    data = DataConfig(corpus="tsv", training=tmp_path / "toy.tsv", num_validation=20)
    if not data.training.exists():
        write_toy(data.training)
    return Recipe(data, NetworkConfig(kind, **SMALL), TrainConfig(**(settings | train)))


def write_sounds(folder, count=24, seed=0):
    """Write a manifest of sounds at 8 kHz: words whose letters are tones of 60 ms, in noise."""
    draw, rate = np.random.default_rng(seed), 8000
    lines = []
    for i in range(count):
        word = "".join(draw.choice(list("abc"), draw.integers(2, 6)))
        times = np.arange(round(0.06 * rate)) / rate
        tones = [np.sin(2 * np.pi * {"a": 400, "b": 900, "c": 1700}[c] * times) for c in word]
        wave = 0.3 * np.concatenate(tones) + 0.01 * draw.standard_normal(len(word) * len(times))
        soundfile.write(folder / f"{i}.wav", wave, rate)
        seconds = len(wave) / rate
        lines.append({"audio_filepath": f"{i}.wav", "duration": seconds, "text": word})
    path = folder / "sounds.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sound_recipe(tmp_path, kind="transducer", **train):
    """Return a recipe for the toy sounds, with the settings of `toy_recipe`."""
    recipe = toy_recipe(tmp_path, kind, **train)
    path = tmp_path / "sounds.jsonl"
    features = FeatureSettings("log_mel", 8000, num_channels=10, num_deltas=0)
    if not path.exists():
        write_sounds(tmp_path)
    return replace(recipe, data=DataConfig(training=path, num_validation=4, features=features))
