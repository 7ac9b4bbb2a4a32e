"""Long sound in windows that end in pauses, so that hours of it take the memory of minutes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import soundfile
from torch import Tensor

from transduce.audio.sound import part_seconds, read_wave
from transduce.data.contents import open_sound
from transduce.data.pairs import Audio, Origin

# Seconds. A window of at most LONGEST ends in the quietest PAUSE of its last SEARCHED: longer ones
# see more context, shorter ones take less memory and time. The rest after it is at least REST.
LONGEST, SEARCHED, REST = 120.0, 30.0, 1.0
PAUSE, HOP = 0.3, 0.01
BLOCK, MARGIN = 60, 1  # of sound that is read for a stream: memory against calls

Sound = TypeVar("Sound", covariant=True)


def sound_seconds(audio: Audio) -> float | None:
    """Return the duration of a sound, from its header; None if it cannot be read."""
    try:
        with open_sound(audio) as file:
            info = soundfile.info(file)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError):
        return None
    return part_seconds(audio, info.frames, info.samplerate)


def sound_rate(audio: Audio) -> int:
    """Return the sample rate of a sound file, from its header."""
    with open_sound(audio) as file:
        rate: int = soundfile.info(file).samplerate
    return rate


class Window(NamedTuple, Generic[Sound]):
    """A part of a sound, one of those that follow each other."""

    sound: Sound
    share: float  # of the whole sound
    is_last: bool


def sound_windows(audio: Audio, step: float) -> Iterator[Window[Audio]]:
    """Yield the windows of a sound: itself if it is short, or parts of it.

    Each part but the last is a whole number of `step` seconds long.
    """
    seconds = sound_seconds(audio)
    if seconds is None or seconds <= LONGEST:
        yield Window(audio, 1.0, True)
        return
    start, end = audio.start or 0.0, (audio.start or 0.0) + seconds
    with open_sound(audio) as file, soundfile.SoundFile(file) as sound:
        rate = sound.samplerate
        while end - start > LONGEST:
            skipped = LONGEST - SEARCHED - REST
            samples = _read(sound, round((start + skipped) * rate), round(SEARCHED * rate))
            length = step * math.floor((skipped + quietest(samples, rate)) / step)
            yield Window(replace(audio, start=start, duration=length), length / seconds, False)
            start += length
    rest = replace(audio, start=start, duration=end - start)
    yield Window(rest, (end - start) / seconds, True)


def sound_blocks(audio: Audio, rate: int, origin: Origin) -> Iterator[Tensor]:
    """Yield the samples of a sound at `rate`, block by block, as if it were read as a whole.

    Each block is read with MARGIN seconds on either side, so that resampling has no seams.
    """
    seconds = sound_seconds(audio) or 0.0
    first = audio.start or 0.0
    for begin in range(0, max(1, math.ceil(seconds)), BLOCK):
        before = min(MARGIN, begin)
        length = min(BLOCK + MARGIN, seconds - begin)
        part = replace(audio, start=first + begin - before, duration=before + length)
        wave = read_wave(part, rate, origin, convert=True)
        is_last = begin + BLOCK >= math.ceil(seconds)
        yield wave[before * rate : None if is_last else (before + BLOCK) * rate]


def _read(sound: soundfile.SoundFile, first: int, number: int) -> np.ndarray:
    """Read samples, the mean of the channels; none if the file is damaged there.

    Whoever reads the window finds the damage, and can name it.
    """
    try:
        sound.seek(first)
        samples: np.ndarray = sound.read(number, dtype="float32", always_2d=True).mean(1)
    except soundfile.SoundFileError:
        return np.empty(0, np.float32)
    return samples


def sample_windows(samples: Tensor, rate: int, step: float) -> Iterator[Window[Tensor]]:
    """Yield the windows of samples [N] in the same way."""
    whole, grain = len(samples), round(step * rate)
    while len(samples) > LONGEST * rate:
        skipped = round((LONGEST - SEARCHED - REST) * rate)
        searched = samples[skipped : skipped + round(SEARCHED * rate)]
        length = grain * ((skipped + round(quietest(searched.numpy(), rate) * rate)) // grain)
        yield Window(samples[:length], length / whole, False)
        samples = samples[length:]
    yield Window(samples, len(samples) / max(1, whole), True)


def quietest(samples: np.ndarray, rate: int) -> float:
    """Return the time in seconds of the middle of the quietest pause in samples [N]."""
    hop = max(1, round(HOP * rate))
    energy = np.square(samples[: len(samples) // hop * hop], dtype=np.float64)
    hops = round(PAUSE / HOP)
    if len(energy) <= hops * hop:  # there are too few samples, as in a damaged file
        return 0.0
    sums = energy.reshape(-1, hop).sum(1).cumsum()
    return float((np.argmin(sums[hops:] - sums[:-hops]) + 1 + hops / 2) * hop / rate)
