"""From a recipe's data to examples, and what a network's inputs and outputs stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.data.batches import Example
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Pair,
    Splits,
    Symbols,
)
from transduce.features import FeatureSettings, Statistics
from transduce.recipe import DataConfig


@dataclass(frozen=True, eq=False)
class Signature:
    """What a network's inputs and outputs stand for: it belongs to the weights as they do to it.

    The source is text if there are `sources`, and audio or frames if there are `statistics`; a
    prediction network has neither.
    """

    targets: Alphabet
    target_notation: Notation  # how outputs are written
    sources: Alphabet | None = None
    source_notation: Notation | None = None  # how a line of text becomes symbols
    features: FeatureSettings | None = None  # None if frames came from elsewhere
    statistics: Statistics | None = None  # of the training set's frames

    @property
    def input_size(self) -> int:
        """How many numbers a frame has, or how many symbols there are; 0 without a source."""
        if self.sources is not None:
            return len(self.sources)
        return 0 if self.statistics is None else len(self.statistics.mean)

    def input_of(self, source: str | Symbols | Audio | Frames | Path | Tensor) -> Tensor:
        """What the transcription network takes, [T, D] or ids [T], without a batch.

        `source` is text or its symbols, of which unseen ones become null; or sound: a file, or
        samples [N]; or frames: a .npy file, or [T, D] that are not normalised yet.
        """
        raise NotImplementedError

    def examples(
        self,
        pairs: Sequence[Pair],
        *,
        with_labels: bool = True,  # False where targets are not known
        cache: Path | None = None,  # of features
        skipped: list[DataError] | None = None,
    ) -> list[Example]:
        """The pairs as this network sees them."""
        raise NotImplementedError

    def text(self, labels: Iterable[int]) -> str:
        """Labels as the targets were written."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Corpus:
    """A recipe's data, read."""

    splits: Splits
    signature: Signature
    training: tuple[Example, ...]
    validation: tuple[Example, ...]
    skipped: tuple[DataError, ...]  # of what was left out


def read_corpus(data: DataConfig, *, targets_only: bool = False) -> Corpus:
    """The corpus, with examples for training and validation; `targets_only` reads no sources."""
    raise NotImplementedError


def read_splits(data: DataConfig, skipped: list[DataError] | None = None) -> Splits:
    """The three sets of pairs, as `data` names them."""
    raise NotImplementedError
