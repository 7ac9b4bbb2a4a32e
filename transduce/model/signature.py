"""Signatures: the meaning of a network's inputs and outputs, and examples of any input."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.audio.batched import frames_of_sounds
from transduce.audio.cache import FrameReader, loudest, not_finite
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.audio.outputs import FrameOutputs
from transduce.audio.sound import LongSound
from transduce.audio.windows import BLOCK, Window, sample_windows, sound_blocks, sound_windows
from transduce.data.batches import Example
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    Recording,
    Symbols,
    encode,
    skipping,
    source_symbols,
)

# A line of text or the path of a file, symbols, a file of sound or frames, samples [N] or frames
# [T, D], a corpus's pair, or an example that is ready.
Source = str | Path | Symbols | Audio | Frames | Tensor | np.ndarray | Pair | Example
# A source symbol that the model does not know raises a DataError, or becomes null.
Unknown = Literal["refuse", "null"]
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015"  # hyphens and dashes, which divide words
# The zero and the largest number of whole samples, as in WAV files.
SCALES = {torch.uint8: (128, 2**7), torch.int16: (0, 2**15), torch.int32: (0, 2**31)}
LOUDEST = 10.0  # a sample beyond it has another scale: clipped sound is a little above 1
MOST_CHANNELS = 8  # columns of an array that are channels of sound, not numbers of a frame
MOST_SYMBOLS = 10_000  # of a text to transcribe: a bound on its memory
CPU = torch.device("cpu")
NO_LABELS = torch.empty(0, dtype=torch.int64)


@cache
def frame_reader(settings: FeatureSettings | None, convert: bool = True) -> FrameReader:
    """Return the reader of sound for some settings; its filter tables are computed once."""
    return FrameReader(settings, convert=convert)


@cache
def _features(settings: FeatureSettings, device: torch.device) -> Features:
    """Return the features of some settings on a device; their tables are copied there once."""
    return Features(settings).to(device)


def float_numbers(array: np.ndarray | Tensor) -> Tensor:
    """Return samples or frames in float32 on the CPU; scale whole samples to [-1, 1]."""
    if isinstance(array, np.ndarray) and array.dtype.kind not in "fiu":
        raise DataError(f"an array of {array.dtype} is neither samples nor frames; give numbers")
    numbers = torch.as_tensor(array).detach().cpu()
    if numbers.ndim == 1 and not numbers.is_floating_point():
        if numbers.dtype not in SCALES:
            raise DataError(
                f"samples of {numbers.dtype} have no known scale; give floating-point samples in "
                "[-1, 1], or int16, int32 or uint8"
            )
        middle, scale = SCALES[numbers.dtype]
        return ((numbers.double() - middle) / scale).float()
    return numbers.float()


def check_samples(samples: Tensor) -> None:
    """Raise a DataError for samples [N] that are no sound in [-1, 1]."""
    if len(samples) == 0:
        raise DataError("there are no samples; give a sound")
    if not isfinite(largest := loudest(samples)):
        raise DataError("the samples have NaN or an infinite number; record or convert it again")
    if largest > LOUDEST:
        raise DataError(
            f"the samples reach {largest:g}, where floating-point samples are in [-1, 1]; divide "
            "them by their scale, or give int16"
        )


class EmptyInput(DataError):
    """The error of a blank text."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """A sound that has been read; `Signature.framed` computes the frames of many at once."""

    pair: Pair
    wave: Tensor  # [N], samples in [-1, 1]
    recording: Recording
    num_frames: int  # that it will have


@dataclass(frozen=True, eq=False)
class Signature:
    """The meaning of a network's inputs and outputs, which its weights depend on.

    A network with `sources` reads text; one with `statistics` reads sound or frames; a prediction
    network has neither. A network with `outputs` speaks: it reads the target of a pair of sound and
    text, and its outputs are the frames of the sound.
    """

    targets: Alphabet  # empty if the outputs are frames
    target_notation: Notation  # splits a written target into symbols
    sources: Alphabet | None = None
    source_notation: Notation | None = None  # splits a line of text into symbols
    features: FeatureSettings | None = None  # of sound; None: frames computed elsewhere
    statistics: Statistics | None = None  # of the training set's frames
    outputs: FrameOutputs | None = None  # of a network that speaks

    @property
    def input_size(self) -> int:
        """Return D, the numbers in a frame, or the number of source symbols; 0 without a source."""
        if self.sources is not None:
            return len(self.sources)
        return 0 if self.statistics is None else len(self.statistics.mean)

    @property
    def input_kind(self) -> str:
        """Return what the network reads, in a word; nothing, for a prediction network."""
        if self.sources is not None:
            return "text"
        if self.statistics is None:
            return "nothing"
        return "frames" if self.features is None else "sound"

    @property
    def output_size(self) -> int:
        """Return the number of labels, or the numbers in an output of a network that speaks."""
        return len(self.targets) if self.outputs is None else self.outputs.size

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
        """Make an example of any input, in the form that the network takes.

        A model of text takes a line, symbols, or a pair of symbols. It splits a line as
        `symbols_of` does, and tries a symbol that it does not know in the other case first. A model
        of sound takes a file (resampled if necessary), samples [N] in [-1, 1] at its own rate, or
        frames [T, D] before normalisation, also in a .npy file. An example is returned as it is.
        `frames` are the frames of a pair, if they were read already. With `with_labels` the pair's
        target becomes the labels. `name` names the input in errors and transcripts. Raise a
        DataError if the input does not fit the model.
        """
        if isinstance(source, Example):
            return source
        text = source.source if isinstance(source, Pair) else source
        if not with_labels and isinstance(text, str | tuple) and len(text) > MOST_SYMBOLS:
            problem = f"a text of {len(text)} symbols is too long; give at most {MOST_SYMBOLS}"
            raise source.origin.error(problem) if isinstance(source, Pair) else DataError(problem)
        sampled = None if frames is not None else self.sampled(source, name=name)
        if sampled is not None:
            [framed] = self.framed([sampled])
            if isinstance(framed, DataError):
                raise framed
            return replace(framed, labels=self._labels(framed.pair)) if with_labels else framed
        if isinstance(source, np.ndarray | Tensor):
            frames, source = self._frames_of(float_numbers(source)), ()
        pair = source if isinstance(source, Pair) else self._pair(source, name)
        if self.outputs is not None:
            labels = self._outputs_of(pair, frames) if with_labels else NO_LABELS
            return Example(pair, self._ids_of(pair, unknown), labels)
        labels = self._labels(pair) if with_labels else NO_LABELS
        if self.sources is not None:
            return Example(pair, self._ids_of(pair, unknown), labels)
        if self.statistics is None:
            if not with_labels:
                raise pair.origin.error("a prediction network takes no source; give it labels")
            return Example(pair, torch.empty(0, dtype=torch.int64), labels)
        if frames is None:
            frames = frame_reader(self.features)(pair)
        if frames.shape[1] != self.input_size:
            raise self._wrong_size(pair, frames.shape[1])
        return Example(pair, self.statistics.normalise(frames), labels)

    def sampled(
        self,
        source: Source,
        *,
        name: str | None = None,
        convert: bool = True,
        longest: float | None = None,
    ) -> Sampled | None:
        """Read a sound file, or take samples [N], without computing frames; else return None.

        Without `convert`, refuse a file that would have to be resampled or mixed. Raise LongSound
        if there are more than `longest` seconds, and a DataError as `example` does.
        """
        settings = self.features
        if settings is None or self.statistics is None or isinstance(source, Example):
            return None
        if isinstance(source, np.ndarray | Tensor):
            if source.ndim != 1:
                return None
            wave, rate = float_numbers(source), settings.sample_rate
            check_samples(wave)
            pair, recording = self._pair((), name), Recording(len(wave) / rate, rate, loudest(wave))
            if longest is not None and recording.seconds > longest:
                raise LongSound(f"there are more than {longest:g} seconds")
        else:
            pair = source if isinstance(source, Pair) else self._pair(source, name)
            if not isinstance(pair.source, Audio):
                return None
            reader = frame_reader(settings, convert)
            wave, recording = reader.read_samples(pair.source, pair.origin, longest)
        return Sampled(pair, wave, recording, settings.num_frames(len(wave)))

    def framed(
        self, sounds: Sequence[Sampled], device: torch.device = CPU
    ) -> list[Example | DataError]:
        """Make an example of each sound; compute the frames on a device, on a GPU in batches."""
        if not sounds:
            return []
        assert self.features is not None and self.statistics is not None
        if self.features.size != self.input_size:
            return [self._wrong_size(sound.pair, self.features.size) for sound in sounds]
        features, waves = _features(self.features, device), [one.wave for one in sounds]
        found = frames_of_sounds(features, waves, self.statistics)
        examples: list[Example | DataError] = []
        for one, frames in zip(sounds, found, strict=True):
            pair = one.pair
            if frames is not None:
                examples.append(Example(pair, frames, NO_LABELS, one.recording))
            else:
                sound = pair.source if isinstance(pair.source, Audio) else Path(pair.name)
                examples.append(not_finite(sound, pair.origin))
        return examples

    def _outputs_of(self, pair: Pair, frames: Tensor | None) -> Tensor:
        """Return the outputs [U, D] of a pair's sound, or of its frames if they are there."""
        assert self.outputs is not None
        if frames is None:
            frames = frame_reader(self.outputs.features)(pair)
        if frames.shape[1] != self.outputs.features.size:
            raise self._wrong_size(pair, frames.shape[1])
        return self.outputs.of_frames(frames)

    def _labels(self, pair: Pair) -> Tensor:
        """Return the labels [U] of a pair's target."""
        return torch.tensor(encode(pair, pair.target, self.targets), dtype=torch.int64)

    def _wrong_size(self, pair: Pair, size: int) -> DataError:
        """Return, without raising it, the error of frames of another size than the model's."""
        expected = self.input_size if self.outputs is None else self.outputs.features.size
        return pair.origin.error(
            f"there are {size} numbers a frame where the model was trained on {expected}; "
            "compute them with its settings"
        )

    def blocks(self, source: Source) -> tuple[Iterator[Tensor], Pair | None]:
        """Return the samples of long sound, block by block, and its pair if it is in a file."""
        assert self.features is not None
        if isinstance(source, np.ndarray | Tensor):
            samples = float_numbers(source)
            check_samples(samples)
            return iter(torch.split(samples, BLOCK * self.features.sample_rate)), None
        pair = source if isinstance(source, Pair) else self._pair(source, None)
        assert isinstance(pair.source, Audio)
        return sound_blocks(pair.source, self.features.sample_rate, pair.origin), pair

    def windows(self, source: Source, step: float) -> Iterator[Window[Source]]:
        """Yield the windows of long sound, each but the last a whole number of `step` seconds long.

        Any other source, and sound of at most LONGEST seconds, is a window by itself.
        """
        rate = None if self.features is None else self.features.sample_rate
        if isinstance(source, np.ndarray) and source.dtype.kind in "fiu":
            source = torch.from_numpy(source)
        if rate is not None and isinstance(source, Tensor) and source.ndim == 1:
            yield from sample_windows(source.detach().cpu(), rate, step)
            return
        if rate is not None and isinstance(source, str | Path | Audio):
            source = self._pair(source, None)
        if rate is not None and isinstance(source, Pair) and isinstance(source.source, Audio):
            for audio, share, is_last in sound_windows(source.source, step):
                yield Window(replace(source, source=audio), share, is_last)
            return
        yield Window(source, 1.0, True)

    def examples(
        self,
        pairs: Sequence[Pair],
        *,
        unknown: Unknown = "null",
        with_labels: bool = True,
        cache: Path | None = None,  # of features
        convert: bool = False,  # resample, and average channels, instead of refusing
        skipped: list[DataError] | None = None,
    ) -> list[Example]:
        """Make an example of each pair; read sound in several threads.

        Raise a DataError for a bad pair, or append it to `skipped` and leave the pair out.
        """
        read: Iterable[tuple[Pair, Tensor | None]] = ((pair, None) for pair in pairs)
        if self.outputs is not None and with_labels:
            settings = self.outputs.features
            reader = FrameReader(settings, cache, convert=convert)
            read = reader.read_all(pairs, skipped, size=settings.size)
        elif self.statistics is not None:
            reader = FrameReader(self.features, cache, convert=convert)
            read = reader.read_all(pairs, skipped, size=self.input_size)
        examples = []
        for pair, frames in read:
            with skipping(skipped):
                examples.append(
                    self.example(pair, unknown=unknown, with_labels=with_labels, frames=frames)
                )
        return examples

    def symbols_of(self, line: str) -> Symbols:
        """Split a line of text into source symbols, as far as possible such that the model knows.

        A model of characters leaves out punctuation at both ends, and reads a letter with an accent
        as the letter alone (NFKD without combining marks), unless it knows them.
        """
        if self.source_notation is None or self.sources is None:
            raise DataError("the model does not read text; give it what it reads")
        symbols = self.source_notation.symbols(line)
        if self.source_notation.split != "characters" or not self.sources.unknown(symbols):
            return symbols
        first, last = 0, len(symbols)
        while first < last and self._is_foreign_punctuation(symbols[first]):
            first += 1
        while first < last and self._is_foreign_punctuation(symbols[last - 1]):
            last -= 1
        return tuple(part for symbol in symbols[first:last] for part in self._fold(symbol))

    def folds(self, line: str) -> bool:
        """Return whether `symbols_of` reads a letter of the line as another one."""
        notation = self.source_notation
        if self.sources is None or notation is None or notation.split != "characters":
            return False
        return any(self._fold(c) != (c,) for c in self.sources.unknown(notation.symbols(line)))

    def words(self, line: str) -> list[str]:
        """Split a line at spaces, hyphens and dashes; return [line] if the model reads spaces.

        A hyphen or dash that the model reads does not split. Leave out punctuation that stands
        alone.
        """
        if self.sources is None or self.source_notation is None:
            raise DataError("the model does not read text; give it what it reads")
        known, symbols = self.sources.symbols, self.source_notation.symbols(line)
        is_whole = " " in known or self.source_notation.split != "characters"
        if is_whole or not self.sources.unknown(symbols):
            return [line] if symbols else []
        dashes = "".join(re.escape(dash) for dash in DASHES if dash not in known)
        return [word for word in re.split(rf"[\s{dashes}]+", line) if self.symbols_of(word)]

    def _fold(self, symbol: str) -> Symbols:
        """Return the known letters that an unknown one consists of; itself if there are none."""
        assert self.sources is not None
        if not self.sources.unknown([symbol]):
            return (symbol,)
        parts = unicodedata.normalize("NFKD", symbol)
        letters = tuple(part for part in parts if not unicodedata.combining(part))
        return (symbol,) if self.sources.unknown(letters) else letters

    def _is_foreign_punctuation(self, symbol: str) -> bool:
        assert self.sources is not None
        is_mark = unicodedata.category(symbol).startswith("P")
        return is_mark and bool(self.sources.unknown([symbol]))

    def unknown_symbols(self, pair: Pair) -> list[str]:
        """Return the source symbols of a pair, in order, that the model does not know."""
        if self.sources is None or not isinstance(pair.source, tuple):
            return []
        return self.sources.unknown(pair.source)

    def _pair(self, source: object, name: str | None) -> Pair:
        """Make a pair, without a target, of a line, symbols or a file."""
        inside: Symbols | Audio | Frames
        if self.sources is not None:
            if isinstance(source, str) and self.source_notation is not None:
                name, inside = name or source, self.symbols_of(source)
                if source.strip() and not inside:
                    raise DataError(f"{source!r} has no symbol that the model knows; give a word")
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
        """Return the ids [T] of a pair's source symbols."""
        assert self.sources is not None
        is_said = self.outputs is not None and not isinstance(pair.source, tuple)
        symbols = pair.target if is_said else source_symbols(pair)
        if not symbols:
            problem = "the source is empty; write it, or leave the line out"
            raise EmptyInput(f"{pair.origin}: {problem}")
        if unknown == "refuse" and (strange := self.sources.unknown(symbols)):
            raise pair.origin.error(self._refusal(strange))
        return torch.tensor(self.sources.encode_or_null(symbols))

    def _refusal(self, unknown: Sequence[str]) -> str:
        """Say why a text with unknown symbols is refused, and what to do."""
        assert self.sources is not None
        if any(symbol.isdigit() for symbol in unknown):
            return "the model does not read numbers; write them as words"
        if "\t" in unknown:
            return "the line has a tab; give the text alone, such as the first column of pairs"
        if any(symbol.isspace() or symbol in DASHES for symbol in unknown):
            return "the model reads single words; give them one by one"
        if "\N{REPLACEMENT CHARACTER}" in unknown:
            return "it is not UTF-8; convert it"
        known = " ".join(sorted(self.sources.symbols))
        return f"{unknown[0]!r} is no symbol that the model knows; it knows {known}"

    def _frames_of(self, numbers: Tensor) -> Tensor:
        """Return frames [T, D] as they are; raise a DataError for numbers that are none."""
        if self.sources is not None:
            raise DataError("the model reads text, not numbers; give it text")
        if numbers.ndim == 1:
            raise DataError(
                "the model reads frames that were computed elsewhere, not sound; give frames [T, D]"
            )
        if self.features is not None and numbers.ndim == 2 and numbers.shape[1] <= MOST_CHANNELS:
            raise DataError(
                f"an array {list(numbers.shape)} has {numbers.shape[1]} channels of samples, not "
                "frames; give one channel, [N]"
            )
        if numbers.ndim != 2:
            raise DataError("the model reads sound; give it a file, samples [N], or frames [T, D]")
        return numbers

    # --- Outputs ---

    @property
    def separator(self) -> str:
        """Return the text between two symbols of a written target."""
        return " " if self.target_notation.split == "spaces" else ""

    def text(self, labels: Sequence[int]) -> str:
        """Write labels in the notation of the targets."""
        return self.separator.join(self.targets.decode(labels))

    def labels_of(self, target: str) -> Tensor:
        """Return the labels [U] of a written target; raise a DataError for an unknown symbol."""
        symbols = self.target_notation.symbols(target)
        if not symbols:
            raise DataError("the target is empty; write one, or leave it out to search for it")
        try:
            return torch.tensor(self.targets.encode(symbols))
        except ValueError as error:
            raise DataError(
                f"the target has a symbol that the model does not know: {error}"
            ) from None

    def difference(self, other: Signature) -> str | None:
        """Name the first part in which two signatures differ; return None if they are equal."""
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
            "outputs": self.outputs and (self.outputs.features, self.outputs.stacking),
        }
