"""Read the inputs of a command: sound, frames, manifests and text, from files or stdin."""

from __future__ import annotations

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import soundfile
from torch import Tensor

from transduce.audio.cache import FrameReader
from transduce.audio.resampling import RateError
from transduce.audio.sound import UnreadableSound, decode, sound_files
from transduce.data.batches import Example
from transduce.data.kinds import matches, read_pairs, recognise
from transduce.data.pairs import SOUNDS, Audio, DataError, Frames, Origin, Pair, with_errors
from transduce.model.signature import Signature

STANDARD_INPUT = Path("standard input")
CHUNK = 65_536  # bytes read at once from standard input: the size of a pipe's buffer


def read_inputs(signature: Signature, files: Sequence[Path]) -> list[Pair]:
    """Read the inputs of files as pairs without targets: a pair for each line, blank or not."""
    pairs = list(_inputs(signature, files))
    names = distinct_names([pair for pair in pairs if not isinstance(pair.source, tuple)])
    return [
        pair if isinstance(pair.source, tuple) else replace(pair, name=next(names))
        for pair in pairs
    ]


def stream_inputs(signature: Signature, paths: Sequence[Path]) -> Iterator[Pair | DataError]:
    """Yield the inputs of files and folders one by one; for one that cannot be read, the error.

    They are those of `read_inputs` and `read_sounds`, but equal names stay equal, and nothing that
    was yielded is kept in memory.
    """
    for path in paths:
        if not path.is_dir() and (pair := _file_pair(path)) is not None:
            yield pair
        elif _is_data(signature, path):
            yield from with_errors(partial(read_pairs, path, None, "text"))
        elif path.is_dir():
            yield from _folder_pairs(path)
        else:
            for number, line in enumerate(stream_lines(path), 1):
                if isinstance(line, DataError):
                    yield line
                else:
                    yield from _line_pairs(signature, [line], path, number)


def check_exists(path: Path) -> None:
    """Raise a DataError if there is no such path, nor a file that it matches as a pattern."""
    if not path.exists() and matches(path) is None:
        raise DataError(f"{path} cannot be read (there is no such file); check the path")


def stream_lines(file: Path) -> Iterator[str | DataError]:
    """Yield the lines of a text file, blank ones too; for one that is not UTF-8, the DataError."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                yield Origin(file, number).error("it is not UTF-8; convert the file to UTF-8")


def line_batches(stream: TextIO) -> Iterator[list[str]]:
    """Yield the lines of a stream as they come: each time, all that are there without waiting."""
    try:
        file = stream.fileno()
    except OSError:  # a stream in memory
        yield list(stream)
        return
    rest, mark = b"", b"\xef\xbb\xbf"  # the byte order mark of UTF-8
    while chunk := os.read(file, CHUNK):
        *lines, rest = (rest + chunk.removeprefix(mark)).split(b"\n")
        mark = b""
        yield [line.decode("utf-8", "replace") for line in lines]
    if rest:
        yield [rest.decode("utf-8", "replace")]


def read_lines_as_they_come(signature: Signature, stream: TextIO) -> Iterator[list[Pair]]:
    """Yield the lines of standard input as pairs, in the batches of `line_batches`."""
    count = 0
    for lines in line_batches(stream):
        yield list(_line_pairs(signature, lines, STANDARD_INPUT, count + 1))
        count += len(lines)


def read_sounds(
    signature: Signature, paths: Sequence[Path], stream: TextIO, skipped: list[DataError]
) -> list[Pair | Example]:
    """Read the inputs of a model of sound: files, folders, manifests, other formats of data sets.

    "-" is a sound file in `stream`. Other folders are searched with all their subfolders, which the
    names of their sounds keep. No two names are equal. Append the errors of a manifest's lines to
    `skipped`.
    """
    found: list[Pair | Example] = []
    for path in paths:
        if str(path) == "-":
            found.append(_stream_example(signature, stream))
        elif not is_one_sound(path) and recognise(path) is not None:
            found += read_pairs(path, None, skipped=skipped)
        elif path.is_dir():
            found += _folder_pairs(path)
        else:
            found.append(_file_pair(path) or Pair(path.stem, Audio(path), (), Origin(path)))
    names = distinct_names([one for one in found if isinstance(one, Pair)])
    return [replace(one, name=next(names)) if isinstance(one, Pair) else one for one in found]


def is_one_sound(path: Path) -> bool:
    """Return whether a path is "-", or a file whose suffix is that of sound or frames."""
    return str(path) == "-" or path.suffix.lower() in {*SOUNDS, ".npy"}


def distinct_names(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield a name for each pair of a file; to equal names, add the folders in which they differ.

    Names that are equal nevertheless get a number.
    """
    same: dict[str, set[Path]] = defaultdict(set)
    for pair in pairs:
        same[pair.name].add(_path(pair).absolute())
    names: Counter[str] = Counter()
    for pair in pairs:
        name = _longer_name(pair, same[pair.name]) if len(same[pair.name]) > 1 else pair.name
        names[name] += 1
        yield name if names[name] == 1 else f"{name}-{names[name]}"


def _longer_name(pair: Pair, paths: set[Path]) -> str:
    """Name a pair after its path below the folder that all `paths` share."""
    shared = os.path.commonpath([path.parent for path in paths])
    stems = {path.relative_to(shared).with_suffix("") for path in paths}
    path = _path(pair).absolute().relative_to(shared)
    name = "-".join((path.with_suffix("") if len(stems) == len(paths) else path).parts)
    if isinstance(pair.source, Audio) and pair.source.inside is not None:
        return f"{name}-{pair.name}"
    start = pair.source.start if isinstance(pair.source, Audio) else None
    return name if start is None else f"{name}@{start:g}"


def _path(pair: Pair) -> Path:
    assert not isinstance(pair.source, tuple)
    return pair.source.path


def _inputs(signature: Signature, files: Sequence[Path]) -> Iterator[Pair]:
    for file in files:
        if (pair := _file_pair(file)) is not None:
            yield pair
        elif _is_data(signature, file):
            yield from read_pairs(file, None)
        else:
            yield from _line_pairs(signature, _lines(file), file)


def _is_data(signature: Signature, file: Path) -> bool:
    """Return whether a file is a data set of sounds; for a model of text, only a manifest is."""
    if signature.source_notation is not None:
        return file.suffix == ".jsonl"
    return recognise(file) is not None


def _folder_pairs(folder: Path) -> Iterator[Pair]:
    """Yield the sounds in a folder and its subfolders, sorted; leave out hidden files."""
    for file in sound_files(folder):
        name = file.relative_to(folder).with_suffix("").as_posix()
        yield Pair(name, Audio(file), (), Origin(file))


def _stream_example(signature: Signature, stream: TextIO) -> Example:
    """Read a sound file from a stream, such as standard input."""
    origin, features = Origin(STANDARD_INPUT), signature.features
    if features is None:
        raise origin.error("the model does not take sound; give a model that does")
    rate = features.sample_rate

    def note_rate(sound: soundfile.SoundFile) -> None:
        nonlocal rate
        rate = sound.samplerate

    try:
        wave = decode(io.BytesIO(stream.buffer.read()), features.sample_rate, note_rate)
    except (UnreadableSound, RateError) as error:
        reason = f" ({error})" if str(error) else ""
        raise origin.error(f"it is not sound that can be read{reason}; send WAV or FLAC") from None
    if len(wave) < features.window_samples or not wave.isfinite().all():
        raise origin.error("it is shorter than a window, or not finite; send another sound")
    example = signature.example(wave, name="standard-input")
    assert example.recording is not None
    return replace(example, recording=replace(example.recording, sample_rate=rate))


def read_input(signature: Signature, source: str) -> Pair:
    """Return one input as a pair: a line of text, or a file of sound or frames."""
    if signature.source_notation is not None:
        wanted, text = "a line of text", source.strip()
        symbols = signature.symbols_of(text)
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


def _line_pairs(
    signature: Signature, lines: Iterable[str], file: Path, first: int = 1
) -> Iterator[Pair]:
    """Yield a pair for each line; that of a blank line has no symbols."""
    for number, line in enumerate(lines, first):
        origin = Origin(file, number)
        if signature.source_notation is None:
            raise origin.error("it is text, but the network takes sound; give sound files")
        text = line.strip()
        # Punctuation alone stays as it is, and is refused, unlike a blank line.
        symbols = signature.symbols_of(text) or signature.source_notation.symbols(text)
        yield Pair(text, symbols, (), origin)


def _lines(file: Path) -> list[str]:
    """Read the lines of a text file; raise a DataError if it is none."""
    try:
        text = file.read_text("utf-8-sig")
        return text.removesuffix("\n").split("\n") if text else []
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is neither text nor a known sound file; convert it") from None
