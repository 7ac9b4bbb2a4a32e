"""Learn a joint n-gram model from the training pairs of a recipe."""

from __future__ import annotations

from transduce.data.pairs import DataError
from transduce.graphones.model import JointNGram
from transduce.graphones.reference import MOST_LABELS
from transduce.model.joint_ngram import JointNGramModel
from transduce.training.checks import TrainingError
from transduce.training.corpus import DataConfig, read_text


def learn_joint_ngram(data: DataConfig, skipped: list[DataError] | None = None) -> JointNGramModel:
    """Learn from the training set, which is of texts.

    A pair with more labels than graphones can hold is left out. Its error, and those of pairs that
    could not be read, go into `skipped`.
    """
    skipped = [] if skipped is None else skipped
    examples, signature = read_text(data, skipped if data.skip_bad else None)
    assert signature.sources is not None
    pairs = [(example.frames.numpy(), example.labels.numpy()) for example in examples]
    skipped += (
        example.pair.origin.error(
            f"{example.num_labels} labels are too many for {example.num_frames} source symbols; "
            "a graphone has at most two"
        )
        for example in examples
        if example.num_labels > MOST_LABELS * example.num_frames
    )
    try:
        sizes = len(signature.sources), len(signature.targets)
        return JointNGramModel(JointNGram.learn(pairs, *sizes), signature)
    except ValueError as error:
        raise TrainingError(str(error)) from None
