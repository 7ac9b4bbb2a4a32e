"""The card of a run's model: its data, its settings, its results, and the code that trained it."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from transduce import __version__
from transduce.architectures import NetworkConfig
from transduce.data.batches import lengths_of
from transduce.model.checkpoint import CONFIG_FILE, TrainedModel
from transduce.model.signature import Signature
from transduce.settings import flat_settings
from transduce.training.corpus import Corpus
from transduce.training.recipe import Recipe

CARD_FILE = "card.md"  # in the folder of a run, beside the weights
PACKAGE = Path(__file__).parents[1]
KINDS = {
    "transducer": "An additive transducer (RNN-T; Graves, 2012)",
    "ctc": "A CTC network (Graves et al., 2006)",
    "prediction": "A prediction network (predictor) that guesses the next label",
    "continuous": "A continuous transducer, whose outputs are the frames of sound",
}


def model_card(
    name: str,
    model: TrainedModel,
    recipe: Recipe,
    corpus: Corpus,
    training_bits: float,
    device: str,
) -> str:
    """Return the card of a model in Markdown, in the form of the models that ship.

    `training_bits` is the log-loss of the last epoch on the training set, in bits per label.
    """
    config, status = recipe.train, model.status
    count = sum(weights.numel() for weights in model.network.parameters())
    judged = "error rate" if config.stop_at == "error_rate" else "log-loss"
    results = [f"{status.bits_per_label:.4f} bits per label on the validation set"]
    if status.error_rate is not None:
        results.insert(0, f"{status.error_rate:.2%} errors")
    points = {
        "Data": _data(recipe, corpus),
        "Protocol": f"the epoch was chosen by the {judged} on the validation set, which is "
        "therefore too good an estimate; measure the model on a test set with `transduce evaluate`",
        "Accuracy": f"{' and '.join(results)}; {training_bits:.4f} bits per label on the training "
        "set, with its noise and dropout",
        "Training": f"epoch {status.epoch:,} of at most {config.max_epochs:,}, step "
        f"{status.step:,}, on {device}; {_differing(recipe)}. `{CONFIG_FILE}` has every setting",
        "Code": f"{code_version()}, PyTorch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "Limits and licence": "not stated; write here what the data allow and what the model is "
        "for. A resumed run writes this file again",
    }
    body = "\n".join(f"- **{heading}**: {text}." for heading, text in points.items())
    return f"# {name}\n\n{_network(recipe.network, model.signature, count)}\n\n{body}\n"


def _network(config: NetworkConfig, signature: Signature, num_weights: int) -> str:
    """Describe a network, its inputs and its outputs."""
    parts = []
    if config.network != "prediction":
        layers, form = config.num_layers, "bidirectional" if config.bidirectional else "forward"
        parts.append(
            f"{layers} {form} layer{'s' if layers > 1 else ''} of {config.hidden_size} "
            "peephole LSTM units"
        )
        if config.lookahead:
            parts[0] += f" that see {config.lookahead} frames ahead"
        if config.pooling > 1:
            parts.append(f"every {config.pooling} frames averaged after the first layer")
    if config.network != "ctc":
        layers = config.prediction_layers
        parts.append(
            f"a prediction network (predictor) of {layers} layer{'s' if layers > 1 else ''} of "
            f"{config.prediction_size} units"
        )
    if config.embedding_size:
        parts.append(f"embeddings of size {config.embedding_size}")
    if config.backwards:
        parts.append("reading every sequence from its end")
    features, known = signature.features, f"{len(signature.targets)} labels"
    if signature.outputs is not None:
        known = f"outputs of {signature.outputs.size} numbers"
    if signature.sources is not None:
        known = f"{len(signature.sources)} source symbols and {known}"
    elif features is not None:
        known = (
            f"{signature.input_size} numbers ({features.kind}) every {1e3 * features.shift:g} ms "
            f"of sound at {features.sample_rate / 1000:g} kHz, and {known}"
        )
    elif signature.statistics is not None:
        known = f"frames of {signature.input_size} numbers, and {known}"
    return f"{KINDS[config.network]}: {', '.join(parts)}; {num_weights:,} weights. It has {known}."


def _data(recipe: Recipe, corpus: Corpus) -> str:
    """Describe the corpus and the sizes of its splits."""
    features = corpus.signature.features
    sizes = []
    for name, examples in (("training", corpus.training), ("validation", corpus.validation)):
        num_frames, num_labels = lengths_of(examples)
        size = f"{len(examples):,} {name} sequences of {num_labels.sum():,} labels"
        if features is not None and corpus.signature.statistics is not None:
            size += f" ({features.shift * num_frames.sum() / 3600:.2f} hours)"
        sizes.append(size)
    left_out = f"; {len(corpus.skipped):,} could not be read" if corpus.skipped else ""
    return f"{recipe.data.corpus}: {' and '.join(sizes)}{left_out}"


def _differing(recipe: Recipe) -> str:
    """List the settings that differ from the defaults."""
    defaults = flat_settings(Recipe())
    differing = [
        f"`{name} = {_written(value)}`"
        for name, value in flat_settings(recipe).items()
        if value != defaults[name]
    ]
    return "settings that differ from the paper's: " + (", ".join(differing) or "none")


def _written(value: object) -> str:
    """Return a setting as people read it: a tuple's items with commas, a path as it is."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@cache
def code_version() -> str:
    """Return the version of this package and, in a checkout, the commit."""
    version = f"transduce {__version__}"
    # An installed package may lie in the folder of another project, whose commit is not ours.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return version
    commit = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    if commit is None:
        return version
    number, _, changed = commit.partition("-")
    return f"{version} at commit {number}" + (" with uncommitted changes" if changed else "")


def _git(*arguments: str) -> str | None:
    """Return what git says about the folder of this package; None if it fails or is not there."""
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
