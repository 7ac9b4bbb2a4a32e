"""Learn a joint n-gram model from the training pairs of a recipe."""

from __future__ import annotations

from transduce.graphones.model import JointNGram
from transduce.model.joint_ngram import JointNGramModel
from transduce.training.checks import TrainingError
from transduce.training.corpus import DataConfig, read_corpus


def learn_joint_ngram(data: DataConfig) -> JointNGramModel:
    """Learn from the training set; raise TrainingError if its sources are not text."""
    corpus = read_corpus(data)
    sources, targets = corpus.signature.sources, corpus.signature.targets
    if sources is None:
        raise TrainingError(
            "the training data have sounds or frames, and graphones are of text; give text to text"
        )
    pairs = [(example.frames.numpy(), example.labels.numpy()) for example in corpus.training]
    try:
        return JointNGramModel(
            JointNGram.learn(pairs, len(sources), len(targets)), corpus.signature
        )
    except ValueError as error:
        raise TrainingError(str(error)) from None
