"""Sound files and bytes <-> samples."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor

from transduce.audio.resampling import RateError, resample
from transduce.data.contents import open_sound
from transduce.data.pairs import SOUNDS, Audio, DataError, Origin
from transduce.data.parquet import ContentError

NO_SUCH_FILE = 7  # libsndfile's SFE_BAD_FILE
BLOCK = 1 << 22  # samples read at once
CONVERT = "--data.convert true (train) or --convert"  # the options that resample and mix
UNREADABLE = "is not audio that can be read{}; record or convert it again"
MOST_HEADER = 1 << 20  # bytes of a NIST SPHERE file's header


class UnreadableSound(ValueError):
    """An error of libsndfile; its text is libsndfile's reason, or empty."""


class LongSound(ValueError):
    """A sound that is longer than its reader asked for."""


def sound_files(folder: Path) -> Iterator[Path]:
    """Yield the sound files in a folder and its subfolders, sorted; leave out hidden ones.

    Raise a DataError if there are none.
    """
    is_empty = True
    for file in _files_below(folder):
        if file.suffix.lower() in SOUNDS and not file.name.startswith(".") and file.is_file():
            is_empty = False
            yield file
    if is_empty:
        raise DataError(
            f"{folder} has no sound files; known suffixes are {', '.join(sorted(SOUNDS))}"
        )


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, sorted; hold those of one folder at a time.

    A link to a folder is not followed.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path


def part_seconds(audio: Audio, num_samples: int, sample_rate: int) -> float:
    """Return the duration of a sound, or of the part that is meant, from its file's header."""
    rest = num_samples / sample_rate - (audio.start or 0.0)
    if audio.start is None or audio.duration is None:
        return rest
    return min(rest, audio.duration)


def decode(
    file: Path | BinaryIO,
    sample_rate: int,
    check: Callable[[soundfile.SoundFile], None],
    *,
    start: float = 0.0,  # seconds
    duration: float | None = None,  # seconds; None: to the end
) -> Tensor:
    """Decode sound to samples [N] in [-1, 1] at `sample_rate`; average its channels.

    `check` gets the open file before any samples are decoded, and raises an error to refuse it.
    Raise UnreadableSound if libsndfile cannot decode the file, RateError if its sample rate cannot
    be converted.
    """
    try:
        with soundfile.SoundFile(file) as sound:
            check(sound)
            rate = sound.samplerate
            if start:
                sound.seek(min(round(start * rate), sound.frames))
            samples = _read(sound, None if duration is None else round(duration * rate))
    # soundfile raises a TypeError for a .raw file, which has no header.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        # libsndfile says "no such file" of an MP3 file that exists but is damaged.
        missing = getattr(error, "code", None) == NO_SUCH_FILE
        reason = "" if missing else str(getattr(error, "error_string", error)).rstrip(".")
        raise UnreadableSound(reason) from None
    return resample(torch.from_numpy(samples), rate, sample_rate)


def _read(sound: soundfile.SoundFile, num_samples: int | None) -> np.ndarray:
    """Read so many samples, or all; average the channels.

    Read block by block: a header may claim any number of samples, and they would take memory.
    """
    blocks, size = list[np.ndarray](), max(1, BLOCK // sound.channels)
    while num_samples is None or num_samples > 0:
        wanted = size if num_samples is None else min(size, num_samples)
        block = sound.read(wanted, dtype="float32", always_2d=True)
        blocks.append(block.mean(1) if sound.channels > 1 else block[:, 0])
        if len(blocks[-1]) < wanted:
            break
        num_samples = None if num_samples is None else num_samples - wanted
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def read_wave(
    audio: Audio, sample_rate: int, origin: Origin | None = None, *, convert: bool = False
) -> Tensor:
    """Read the samples [N] in [-1, 1] of a sound file, as `read_sound` does."""
    return read_sound(audio, sample_rate, origin, convert=convert)[0]


def read_sound(
    audio: Audio,
    sample_rate: int,
    origin: Origin | None = None,
    *,
    convert: bool = False,
    longest: float | None = None,  # seconds
) -> tuple[Tensor, int]:
    """Read the samples [N] in [-1, 1] of a sound file, and its own sample rate.

    The file may be WAV, FLAC, Opus, NIST SPHERE and others. Refuse one with another sample rate or
    several channels, because a training set should have one format; with `convert`, resample it
    and average its channels instead. Raise LongSound, before anything is decoded, if there are
    more than `longest` seconds.

    Raise a DataError that begins with `origin`, the line of the manifest that names the file; by
    default it begins with the file.
    """
    error_of = partial((origin or Origin(audio.path)).file_error, audio)
    if not audio.path.is_file():
        raise error_of(f"there is no file {audio.path}; check the path")

    rate, header = sample_rate, dict[str, str]()

    def read_header() -> None:
        header.update(sphere_header(audio) or {})
        if "shorten" in header.get("sample_coding", ""):
            raise error_of(
                f"{audio} is compressed by shorten; decompress it with `sph2pipe -f wav` or `sox`"
            )

    def check(sound: soundfile.SoundFile) -> None:
        nonlocal rate
        rate = sound.samplerate
        if sound.format == "NIST":
            read_header()
        if rate != sample_rate and not convert:
            raise error_of(
                f"{audio} has {rate} samples a second where {sample_rate} are wanted; train with "
                f"--data.features.sample_rate {rate}, or resample it with {CONVERT}"
            )
        if sound.channels != 1 and not convert:
            raise error_of(
                f"{audio} has {sound.channels} channels; mix them into one with {CONVERT}"
            )
        if (problem := _wrong_offset(audio, sound.frames, rate)) is not None:
            raise error_of(problem)
        if longest is not None and part_seconds(audio, sound.frames, rate) > longest:
            raise LongSound(f"{audio} has more than {longest:g} seconds")

    # Without a start, the duration is only what the manifest promises of the whole file.
    start, duration = (0.0, None) if audio.start is None else (audio.start, audio.duration)
    try:
        try:
            with open_sound(audio) as file:
                wave = decode(file, sample_rate, check, start=start, duration=duration)
        except UnreadableSound:
            read_header()  # which may have a better reason
            raise
    except RateError as error:
        raise error_of(
            f"{audio}: {error}; convert it with `sox old.wav -r {sample_rate} new.wav`"
        ) from None
    except (UnreadableSound, ContentError, OSError) as error:
        reason = f" ({error})" if str(error) else ""
        raise error_of(f"{audio} {UNREADABLE.format(reason)}") from None
    promised = audio.duration
    counts = [header.get(name, "") for name in ("sample_count", "sample_rate")]
    if audio.start is None and all(count.isdigit() for count in counts):
        promised = int(counts[0]) / max(1, int(counts[1]))
    seconds = len(wave) / sample_rate
    if (problem := _cut_off(audio, seconds, promised)) is not None:
        raise error_of(problem)
    return wave, rate


class Header(NamedTuple):
    """What the header of a sound file says of a sound."""

    seconds: float  # of the part that is meant
    sample_rate: int
    channels: int


def read_sound_header(audio: Audio, origin: Origin | None = None) -> Header:
    """Read the header of a sound without decoding it; raise a DataError as `read_sound` does."""
    error_of = partial((origin or Origin(audio.path)).file_error, audio)
    if not audio.path.is_file():
        raise error_of(f"there is no file {audio.path}; check the path")
    try:
        with open_sound(audio) as file:
            info = soundfile.info(file)
    except (soundfile.SoundFileError, ContentError, OSError, TypeError) as error:
        missing = getattr(error, "code", None) == NO_SUCH_FILE
        reason = "" if missing else str(getattr(error, "error_string", error)).rstrip(".")
        raise error_of(f"{audio} {UNREADABLE.format(f' ({reason})' if reason else '')}") from None
    seconds = part_seconds(audio, info.frames, info.samplerate)
    problem = _wrong_offset(audio, info.frames, info.samplerate)
    problem = problem or _cut_off(audio, seconds, audio.duration)
    if problem is not None:
        raise error_of(problem)
    return Header(seconds, info.samplerate, info.channels)


def _wrong_offset(audio: Audio, num_samples: int, rate: int) -> str | None:
    if audio.start is None or not round(audio.start * rate) >= num_samples > 0:
        return None
    return (
        f"{audio} has {num_samples / rate:.2f} seconds, so that the offset {audio.start:.2f} is "
        "past its end; correct the offset"
    )


def _cut_off(audio: Audio, seconds: float, promised: float | None) -> str | None:
    """Say what is wrong with a file that was cut off: it lacks the end of its transcript."""
    if promised is None or seconds >= 0.95 * promised - 0.1:
        return None
    return f"{audio} ends after {seconds:.2f} of its {promised:.2f} seconds; copy it again"


def sphere_header(audio: Audio) -> dict[str, str] | None:
    """Read the header fields of a NIST SPHERE file; return None for any other kind of file."""
    with ExitStack() as stack:
        file = stack.enter_context(open_sound(audio))
        if isinstance(file, Path):
            file = stack.enter_context(file.open("rb"))
        magic, size = file.readline(8), file.readline(16)
        if magic.strip() != b"NIST_1A" or not size.strip().isdigit():
            return None
        rest = int(size) - len(magic) - len(size)
        if not 0 <= rest <= MOST_HEADER:
            raise UnreadableSound(f"its header claims {int(size)} bytes")
        header = file.read(rest)
    fields = {}
    for line in header.decode("latin-1").split("end_head")[0].splitlines():
        if found := re.match(r"(\S+) -(?:i|r|s\d+) (.*)", line):
            fields[found[1]] = found[2].strip()
    return fields


def encode_wav(wave: Tensor, sample_rate: int) -> bytes:
    """Encode the samples [N] of `wave` as a WAV file of 16-bit integers."""
    content = io.BytesIO()
    soundfile.write(content, wave.numpy(), sample_rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
