"""What a network's inputs and outputs stand for, and how any input becomes an example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.audio.cache import FrameReader
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.data.batches import Example
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    Symbols,
    encode,
    skipping,
    source_symbols,
)

# A line of text or the path of a file, symbols, samples [N] or frames [T, D], a corpus's pair.
Source = str | Path | Symbols | Audio | Frames | Tensor | np.ndarray | Pair | Example
# What happens to a source symbol that the model does not know: an error, or null in its place.
Unknown = Literal["refuse", "null"]


class EmptyInput(DataError):
    """A text without symbols."""


@dataclass(frozen=True, eq=False)
class Signature:
    """What a network's inputs and outputs stand for: its weights mean nothing without it.

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
        """The numbers in a frame, or the number of source symbols; 0 without a source."""
        if self.sources is not None:
            return len(self.sources)
        return 0 if self.statistics is None else len(self.statistics.mean)

    # --- Inputs ---

    def example(
        self,
        source: Source,
        *,
        unknown: Unknown = "null",
        with_labels: bool = False,
        name: str | None = None,
        frames: Tensor | None = None,
    ) -> Example:
        """Make an example of any input, as the network takes it; raise DataError if it cannot be.

        A model of text takes a line, symbols, or a pair of symbols. A model of sound takes a file
        (resampled if need be), samples [N] at its own rate, or frames [T, D] that are not yet
        normalised, also in a .npy file. `frames` are those of a pair whose source was read already.
        Source symbols that the model lacks are tried in the other case first. The example has
        labels if `with_labels`, and `name` in error messages.
        """
        if isinstance(source, Example):
            return source
        if isinstance(source, np.ndarray):
            source = torch.from_numpy(source).float()
        if isinstance(source, Tensor):
            frames, source = self._frames_of(source), ()
        pair = source if isinstance(source, Pair) else self._pair(source, name)
        ids = encode(pair, pair.target, self.targets) if with_labels else []
        labels = torch.tensor(ids, dtype=torch.int64)
        if self.sources is not None:
            return Example(pair, self._ids_of(pair, unknown), labels)
        if self.statistics is None:
            if not with_labels:
                raise DataError("a prediction network takes no source; give it labels")
            return Example(pair, torch.empty(0, dtype=torch.int64), labels)
        if frames is None:
            frames = FrameReader(self.features, convert=True)(pair)
        if frames.shape[1] != self.input_size:
            raise DataError(
                f"there are {frames.shape[1]} numbers a frame where the model was trained on "
                f"{self.input_size}; compute them with its settings"
            )
        return Example(pair, self.statistics.normalise(frames), labels)

    def examples(
        self,
        pairs: Sequence[Pair],
        *,
        unknown: Unknown = "null",
        with_labels: bool = True,
        cache: Path | None = None,  # of features
        convert: bool = False,  # take sound of another rate or of several channels
        skipped: list[DataError] | None = None,
    ) -> list[Example]:
        """Make examples of a corpus's pairs; sound is read in several threads.

        Bad pairs raise DataError, or are left out and their errors added to `skipped`.
        """
        read: Iterable[tuple[Pair, Tensor | None]] = ((pair, None) for pair in pairs)
        if self.statistics is not None:
            reader = FrameReader(self.features, cache, convert=convert)
            read = reader.read_all(pairs, skipped, size=self.input_size)
        examples = []
        for pair, frames in read:
            with skipping(skipped):
                examples.append(
                    self.example(pair, unknown=unknown, with_labels=with_labels, frames=frames)
                )
        return examples

    def unknown_symbols(self, pair: Pair) -> list[str]:
        """Return the source symbols of a pair that the model does not know, in their order."""
        if self.sources is None or not isinstance(pair.source, tuple):
            return []
        return self.sources.unknown(pair.source)

    def _pair(self, source: object, name: str | None) -> Pair:
        """Make a pair of a line, of symbols, or of a file."""
        inside: Symbols | Audio | Frames
        if self.sources is not None:
            if isinstance(source, str) and self.source_notation is not None:
                name, inside = name or source, self.source_notation.symbols(source)
            elif isinstance(source, tuple):
                name, inside = name or " ".join(source), source
            else:
                raise DataError(f"the model reads text, not {type(source).__name__}; give it text")
            if not inside:
                raise EmptyInput(f"{name or ''!r} has nothing to read; give a word")
        elif isinstance(source, str | Path):
            path = Path(source)
            inside = Frames(path) if path.suffix == ".npy" else Audio(path)
            name = name or path.stem
            return Pair(name, inside, (), Origin(path))
        elif isinstance(source, Audio | Frames):
            return Pair(name or source.path.stem, source, (), Origin(source.path))
        elif source == ():
            name, inside = name or "samples", ()
        else:
            raise DataError("the model reads sound; give it a file, samples [N], or frames [T, D]")
        return Pair(name, inside, (), Origin(Path(name)))

    def _ids_of(self, pair: Pair, unknown: Unknown) -> Tensor:
        """Return the ids of a pair's source symbols."""
        assert self.sources is not None
        symbols = source_symbols(pair)
        if not symbols:
            raise pair.origin.error("the source is empty; write it, or leave the line out")
        if unknown == "refuse":
            for symbol in self.sources.unknown(symbols):
                raise pair.origin.error(
                    f"{symbol!r} is no symbol that the model knows; it knows "
                    f"{' '.join(sorted(self.sources.symbols))}"
                )
        return torch.tensor(self.sources.encode_or_null(symbols))

    def _frames_of(self, numbers: Tensor) -> Tensor:
        """Return frames [T, D] of samples [N], or of frames."""
        if self.sources is not None:
            raise DataError("the model reads text, not Tensor; give it text")
        if numbers.ndim == 1:
            if self.features is None:
                raise DataError("the model reads frames that were computed elsewhere, not sound")
            computed: Tensor = Features(self.features)(numbers[None])[0][0]
            return computed
        if numbers.ndim != 2:
            raise DataError("the model reads sound; give it a file, samples [N], or frames [T, D]")
        return numbers

    # --- Outputs ---

    @property
    def separator(self) -> str:
        """The text between two symbols of a written target."""
        return " " if self.target_notation.split == "spaces" else ""

    def text(self, labels: Sequence[int]) -> str:
        """Write labels as the targets were written."""
        return self.separator.join(self.targets.decode(labels))

    def labels_of(self, target: str) -> Tensor:
        """Return the labels [U] of a written target; raise DataError if a symbol is not known."""
        symbols = self.target_notation.symbols(target)
        if not symbols:
            raise DataError("the target is empty; write some, or leave it out to have it found")
        try:
            return torch.tensor(self.targets.encode(symbols))
        except ValueError as error:
            raise DataError(f"the target has a symbol that is not known: {error}") from None

    def difference(self, other: Signature) -> str | None:
        """Name the first thing in which two signatures differ; None if they are the same."""
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
