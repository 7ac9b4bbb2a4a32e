"""Small corpora and recipes that the tests of training share."""

import random

from transduce.architectures import NetworkConfig
from transduce.training.corpus import DataConfig
from transduce.training.recipe import Recipe, TrainConfig

SMALL = {"hidden_size": 24, "prediction_size": 24}


def write_toy(path, count=120, seed=0):
    """A TSV of letters to those letters in capitals; after each, one of two may come."""
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
    """A recipe for the toy corpus: by default three epochs of AdamW in small batches."""
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
