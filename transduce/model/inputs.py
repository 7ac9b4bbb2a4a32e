"""Read the inputs of a command: sound, frames, manifests and text, from files or stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from transduce.audio.cache import FrameReader
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair
from transduce.model.signature import Signature

SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".sph", ".nist"}


def read_inputs(signature: Signature, files: Sequence[Path]) -> Iterator[Pair]:
    """Yield the inputs of the files as pairs without targets; without files, those of stdin."""
    if not files:
        yield from _line_pairs(signature, sys.stdin, Path("standard input"))
    for file in files:
        if file.suffix == ".jsonl":
            yield from read_manifest(file, None)
        elif (pair := _file_pair(file)) is not None:
            yield pair
        else:
            yield from _line_pairs(signature, _lines(file), file)


def read_input(signature: Signature, source: str) -> Pair:
    """Return one input as a pair: a line of text, or a file of sound or frames."""
    if signature.source_notation is not None:
        wanted, text = "a line of text", source.strip()
        symbols = signature.source_notation.symbols(text)
        pair = Pair(text, symbols, (), Origin(Path("the input"))) if text else None
    else:
        wanted, pair = "a sound file or a .npy file", _file_pair(Path(source))
    if pair is None:
        raise DataError(f"the input {source!r} is not {wanted}, which the network takes; give one")
    return pair


def read_spectrogram(signature: Signature, pair: Pair) -> Tensor | None:
    """Return the spectrogram [num_frames, channels] of a pair's sound; None without sound."""
    features = signature.features
    if features is None or not isinstance(pair.source, Audio):
        return None
    return FrameReader(features.as_spectrogram(), convert=True)(pair)


def _file_pair(file: Path) -> Pair | None:
    """Return the pair of a file of sound or frames; None for another kind of file."""
    if file.suffix == ".npy":
        return Pair(file.stem, Frames(file), (), Origin(file))
    if file.suffix.lower() in SOUNDS:
        return Pair(file.stem, Audio(file), (), Origin(file))
    return None


def _line_pairs(signature: Signature, lines: Iterable[str], file: Path) -> Iterator[Pair]:
    """Yield a pair for each line that is not blank."""
    notation = signature.source_notation
    for number, line in enumerate(lines, 1):
        origin = Origin(file, number)
        if notation is None:
            raise origin.error("it is text, but the network takes sound; give sound files")
        if text := line.strip():
            yield Pair(text, notation.symbols(text), (), origin)


def _lines(file: Path) -> list[str]:
    """Read the lines of a text file; raise a DataError if it is none."""
    try:
        return file.read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is neither text nor a known sound file; convert it") from None
