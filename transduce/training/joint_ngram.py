"""Learn a joint n-gram model from the training pairs of a recipe."""

from __future__ import annotations

from transduce.data.pairs import DataError
from transduce.graphones.model import JointNGram
from transduce.graphones.reference import MOST_LABELS
from transduce.model.joint_ngram import JointNGramModel
from transduce.training.checks import TrainingError
from transduce.training.corpus import DataConfig, read_corpus


def learn_joint_ngram(data: DataConfig, skipped: list[DataError] | None = None) -> JointNGramModel:
    """Learn from the training set; raise TrainingError if its sources are not text.

    A pair with more labels than graphones can hold is left out. Its error, and those of pairs that
    could not be read, go into `skipped`.
    """
    corpus = read_corpus(data)
    sources, targets = corpus.signature.sources, corpus.signature.targets
    if sources is None:
        raise TrainingError(
            "the training data have sounds or frames, and graphones are of text; give text to text"
        )
    pairs = [(example.frames.numpy(), example.labels.numpy()) for example in corpus.training]
    if skipped is not None:
        skipped += corpus.skipped
        skipped += (
            example.pair.origin.error(
                f"{example.num_labels} labels are too many for {example.num_frames} source "
                "symbols; a graphone has at most two"
            )
            for example in corpus.training
            if example.num_labels > MOST_LABELS * example.num_frames
        )
    try:
        return JointNGramModel(
            JointNGram.learn(pairs, len(sources), len(targets)), corpus.signature
        )
    except ValueError as error:
        raise TrainingError(str(error)) from None
