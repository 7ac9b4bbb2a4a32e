"""Small corpora and recipes for the tests of training."""

import random

from transduce.architectures import NetworkConfig
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
