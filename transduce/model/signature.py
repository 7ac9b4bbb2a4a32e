"""What a network's inputs and outputs stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.audio.cache import FrameReader
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.data.batches import Example, frame_examples, target_examples, text_examples
from transduce.data.pairs import Audio, DataError, Frames, Notation, Origin, Pair, Symbols


@dataclass(frozen=True, eq=False)
class Signature:
    """What a network's inputs and outputs stand for: weights mean nothing without it.

    The source is text if there are `sources`, and sound or frames if there are `statistics`; a
    prediction network has neither.
    """

    targets: Alphabet
    target_notation: Notation  # how targets are written
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

        `source` is a line of text, or its symbols; or sound, in a file, which is resampled if need
        be, or as samples [N]; or frames that are not normalised yet, in a .npy file or as [T, D].
        """
        if self.sources is not None:
            if isinstance(source, str) and self.source_notation is not None:
                source = self.source_notation.symbols(source)
            if not isinstance(source, tuple):
                raise DataError(f"the model reads text, not {type(source).__name__}; give it text")
            return torch.tensor(self.sources.encode_or_null(source))
        if self.statistics is None:
            raise DataError("a prediction network takes no source; give it labels")
        if isinstance(source, str | Path):
            path = Path(source)
            source = Frames(path) if path.suffix == ".npy" else Audio(path)
        if isinstance(source, Audio | Frames):
            reader = FrameReader(self.features, convert=True)
            source = reader(Pair(source.path.stem, source, (), Origin(source.path)))
        elif isinstance(source, Tensor) and source.ndim == 1:
            source = Features(self._feature_settings())(source[None])[0][0]
        if not isinstance(source, Tensor) or source.ndim != 2:
            raise DataError("the model reads sound; give it a file, samples [N], or frames [T, D]")
        if source.shape[1] != self.input_size:
            raise DataError(
                f"there are {source.shape[1]} numbers a frame where the model was trained on "
                f"{self.input_size}; compute them with its settings"
            )
        return self.statistics.normalise(source)

    def examples(
        self,
        pairs: Sequence[Pair],
        *,
        with_labels: bool = True,  # False where targets are not known
        unseen_as_null: bool = True,  # False makes a source's unseen symbol an error
        cache: Path | None = None,  # of features
        convert: bool = False,  # take sound of another rate or of several channels
        skipped: list[DataError] | None = None,
    ) -> list[Example]:
        """The pairs as this network sees them."""
        targets = self.targets if with_labels else None
        if self.sources is not None:
            return text_examples(
                pairs, self.sources, targets, unseen_as_null=unseen_as_null, skipped=skipped
            )
        if self.statistics is not None:
            reader = FrameReader(self.features, cache, convert=convert)
            read = reader.read_all(pairs, skipped, size=self.input_size)
            return frame_examples(read, targets, self.statistics.normalise, skipped)
        return target_examples(pairs, self.targets, skipped)

    @property
    def separator(self) -> str:
        """What stands between symbols where targets are written."""
        return " " if self.target_notation.split == "spaces" else ""

    def text(self, labels: Sequence[int]) -> str:
        """Labels, written as the targets were."""
        return self.separator.join(self.targets.decode(labels))

    def difference(self, other: Signature) -> str | None:
        """What does not stand for the same in both, the first of it, in a word or three."""
        ours, theirs = self._parts(), other._parts()
        return next((name for name in ours if ours[name] != theirs[name]), None)

    def _parts(self) -> dict[str, object]:
        statistics = self.statistics
        return {
            "target symbols": self.targets.symbols,
            "source symbols": self.sources and self.sources.symbols,
            "notations": (self.target_notation, self.source_notation),
            "features": self.features,
            "statistics of frames": statistics
            and (statistics.mean.tolist(), statistics.deviation.tolist()),
        }

    def _feature_settings(self) -> FeatureSettings:
        if self.features is None:
            raise DataError("the model reads frames that were computed elsewhere, not sound")
        return self.features
