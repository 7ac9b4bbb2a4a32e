"""What a command is given to read, as the network takes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transduce.audio.cache import FrameReader
from transduce.data.batches import Example
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair
from transduce.model.checkpoint import TrainedModel

SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".sph", ".nist"}


def read_inputs(model: TrainedModel, files: Sequence[Path]) -> list[Example]:
    """All that is in the files, sound, frames, manifests or text; or else the lines of standard
    input. There are no labels."""
    pairs: list[Pair] = []
    if not files:
        for number, line in enumerate(sys.stdin, 1):
            pairs += _line_pair(model, line, Origin(Path("standard input"), number))
    for file in files:
        if file.suffix == ".jsonl":
            pairs += read_manifest(file, None)
        elif found := _file_pair(file):
            pairs += found
        else:
            for number, line in enumerate(_lines(file), 1):
                pairs += _line_pair(model, line, Origin(file, number))
    _say_what_is_unknown(model, pairs)
    return list(model.signature.examples(pairs, with_labels=False, convert=True))


def read_input(model: TrainedModel, source: str, target: str | None = None) -> Example:
    """One input: a line of text, or the path of a file of sound or frames, whichever the network
    takes; with the labels of the target if there is one."""
    signature = model.signature
    if signature.sources is not None:
        wanted, pairs = "a line of text", _line_pair(model, source, Origin(Path("the input")))
    else:
        wanted, pairs = "a sound file or a .npy file", _file_pair(Path(source))
    if not pairs:
        raise DataError(f"the input {source!r} is not {wanted}, which is what the network takes")
    [example] = signature.examples(pairs, with_labels=False, unseen_as_null=False, convert=True)
    return example if target is None else replace(example, labels=_labels(model, target))


def _say_what_is_unknown(model: TrainedModel, pairs: Sequence[Pair]) -> None:
    """Of letters that count as nothing a sentence on standard error, with the first of them."""
    sources = model.signature.sources
    if sources is None:
        return
    unknown = [
        (pair, symbol)
        for pair in pairs
        if isinstance(pair.source, tuple)
        for symbol in sources.unknown(pair.source)
    ]
    if unknown:
        pair, symbol = unknown[0]
        more = f", as do {len(unknown) - 1} more in all" if len(unknown) > 1 else ""
        print(
            f"transduce: {pair.origin}: {symbol!r} was not in the training data and counts as "
            f"nothing{more}; output for them means little",
            file=sys.stderr,
        )


def _labels(model: TrainedModel, target: str) -> Tensor:
    symbols = model.signature.target_notation.symbols(target)
    if not symbols:
        raise DataError("the target is empty; write some, or leave it out to have it found")
    try:
        return torch.tensor(model.signature.targets.encode(symbols))
    except ValueError as error:
        raise DataError(f"the target has a symbol that is not known: {error}") from None


def read_spectrogram(model: TrainedModel, pair: Pair) -> Tensor | None:
    """A picture of sound, [num_frames, channels], whatever features the network takes; None if
    the pair has none."""
    features = model.signature.features
    if features is None or not isinstance(pair.source, Audio):
        return None
    return FrameReader(features.as_spectrogram(), convert=True)(pair)


def _file_pair(file: Path) -> list[Pair]:
    """The one input that a file of sound or frames is; none if it is another kind of file."""
    if file.suffix == ".npy":
        return [Pair(file.stem, Frames(file), (), Origin(file))]
    if file.suffix.lower() in SOUNDS:
        return [Pair(file.stem, Audio(file), (), Origin(file))]
    return []


def _line_pair(model: TrainedModel, line: str, origin: Origin) -> list[Pair]:
    notation = model.signature.source_notation
    if notation is None:
        raise origin.error("it is text, but the network takes sound; give sound files")
    text = line.strip()
    return [Pair(text, notation.symbols(text), (), origin)] if text else []


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is neither text nor a sound file that is known") from None
