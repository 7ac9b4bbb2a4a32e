"""Random changes of sound in training: speed, room, noise, gain, band and codec.

Each kind has a random stream of its own for each sound and epoch. So what happens to a sound does
not depend on the other kinds, on other sounds, or on the thread and process that computes it.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
import torch
from torch import Tensor

from transduce.audio.resampling import MAX_PHASES, resample
from transduce.audio.sound import decode, sound_files
from transduce.data.pairs import DataError, Origin
from transduce.kernels.openmp import one_thread

Samples = np.ndarray  # [N], float32 in [-1, 1]
Codec = Literal["mu_law", "narrow", "mp3", "vorbis"]
FORMATS = {"mp3": ("MP3", "MPEG_LAYER_III"), "vorbis": ("OGG", "VORBIS")}  # of libsndfile

STEPS = 100  # speeds are multiples of 1 / STEPS: fewer filters to compute against finer speeds
LOUDEST_REVERBERATION, FAINTEST_REVERBERATION = 0.0, 20.0  # dB below the direct sound
TELEPHONE = (300.0, 3400.0)  # hertz
HIGH_PASS = (50.0, 500.0)  # hertz: the range of the lower edge of a band
LOW_PASS = (2500.0, 7000.0)  # hertz: the range of its upper edge
EDGE = 0.1  # width of a band's edge, relative to its frequency: steeper edges ring longer
COMPRESSION = (0.5, 0.95)  # of mp3 and vorbis, where 0 is the best quality and 1 the smallest file
MU = 255  # of the companding curve of G.711


@dataclass(frozen=True)
class SoundAugment:
    """Random changes of the sound of an utterance, drawn anew in every epoch.

    Each kind has a probability; 0 is off. Amounts are uniform between their bounds.
    """

    speed: float = 0.0  # probability of another speed, which changes tempo and pitch
    slowest: float = 0.9
    fastest: float = 1.1
    room: float = 0.0  # probability of the echo of a room: noise that decays exponentially
    shortest_decay: float = 0.1  # seconds in which the echo falls by 60 dB
    longest_decay: float = 0.6
    noise: float = 0.0  # probability of a noise from the folder
    noise_folder: Path | None = None  # of sound files, also in its subfolders
    lowest_snr: float = 0.0  # signal-to-noise ratio in dB
    highest_snr: float = 20.0
    gain: float = 0.0  # probability of another level
    lowest_gain: float = -15.0  # dB
    highest_gain: float = 5.0
    band: float = 0.0  # probability of a low-pass, a high-pass, or the band of a telephone
    codec: float = 0.0  # probability of one of the codecs
    # narrow: 8 kHz and back; mp3 and vorbis take longer than everything else together
    codecs: tuple[Codec, ...] = ("mu_law", "narrow")

    def __post_init__(self) -> None:
        for name in ("speed", "room", "noise", "gain", "band", "codec"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, not {getattr(self, name)}")
        for least, most in (
            ("slowest", "fastest"),
            ("shortest_decay", "longest_decay"),
            ("lowest_snr", "highest_snr"),
            ("lowest_gain", "highest_gain"),
        ):
            if not getattr(self, least) <= getattr(self, most):
                raise ValueError(
                    f"{least} must be at most {most}, {getattr(self, most)}, "
                    f"not {getattr(self, least)}"
                )
        if not 0.5 <= self.slowest <= self.fastest <= 2:
            raise ValueError(
                f"slowest and fastest must be between 0.5 and 2, not {self.slowest} and "
                f"{self.fastest}"
            )
        if not 0.01 <= self.shortest_decay <= self.longest_decay <= 10:
            raise ValueError(
                "shortest_decay and longest_decay must be between 0.01 and 10 seconds, not "
                f"{self.shortest_decay} and {self.longest_decay}"
            )
        for name in ("lowest_snr", "highest_snr", "lowest_gain", "highest_gain"):
            if not abs(getattr(self, name)) <= 100:
                raise ValueError(f"{name} must be between -100 and 100, not {getattr(self, name)}")
        if self.noise and self.noise_folder is None:
            raise ValueError("noise needs a noise_folder; set it, or noise to 0")
        if self.codec and not self.codecs:
            raise ValueError("codec needs codecs to choose from; list some, or set codec to 0")

    @property
    def is_on(self) -> bool:
        """Return whether any kind has a probability above 0."""
        return any((self.speed, self.room, self.noise, self.gain, self.band, self.codec))

    @property
    def speeds(self) -> tuple[float, float]:
        """Return the lowest and the highest speed that an utterance may get."""
        return (min(1.0, self.slowest), max(1.0, self.fastest)) if self.speed else (1.0, 1.0)


class Augmenter:
    """A function from samples to changed samples, the same in every thread and process."""

    def __init__(self, settings: SoundAugment, sample_rate: int, seed: int) -> None:
        self.settings, self.sample_rate, self.seed = settings, sample_rate, seed
        self.noises: Sequence[Noise] = ()
        if settings.noise and settings.noise_folder is not None:
            self.noises = read_noises(settings.noise_folder)
        if settings.codec:
            for codec in settings.codecs:
                _check_codec(codec, sample_rate)

    def __call__(self, wave: Tensor, epoch: int, index: int) -> Tensor:
        """Return the samples [N] of sound number `index` as they are in an epoch."""
        changes: dict[str, Callable[[Samples, random.Random], Samples]] = {
            "speed": self._speed,
            "room": self._room,
            "noise": self._noise,
            "gain": self._gain,
            "band": self._band,
            "codec": self._codec,
        }
        samples = wave.numpy()
        for kind, change in changes.items():
            draw = random.Random(f"{self.seed} {epoch} {index} {kind}")
            if draw.random() < getattr(self.settings, kind):
                samples = change(samples, draw)
        return torch.from_numpy(samples)

    def _speed(self, samples: Samples, draw: random.Random) -> Samples:
        return change_speed(samples, draw.uniform(self.settings.slowest, self.settings.fastest))

    def _room(self, samples: Samples, draw: random.Random) -> Samples:
        decay = draw.uniform(self.settings.shortest_decay, self.settings.longest_decay)
        below = draw.uniform(LOUDEST_REVERBERATION, FAINTEST_REVERBERATION)
        response = room_response(decay, below, self.sample_rate, draw.getrandbits(63))
        return reverberate(samples, response)

    def _noise(self, samples: Samples, draw: random.Random) -> Samples:
        snr = draw.uniform(self.settings.lowest_snr, self.settings.highest_snr)
        noise = draw.choice(self.noises).samples(len(samples), self.sample_rate, draw.random())
        return add_noise(samples, noise, snr)

    def _gain(self, samples: Samples, draw: random.Random) -> Samples:
        gain = draw.uniform(self.settings.lowest_gain, self.settings.highest_gain)
        return change_gain(samples, gain)

    def _band(self, samples: Samples, draw: random.Random) -> Samples:
        high_pass, low_pass = draw.uniform(*HIGH_PASS), draw.uniform(*LOW_PASS)
        bands = ((high_pass, math.inf), (0.0, low_pass), TELEPHONE)
        return band_limit(samples, self.sample_rate, *draw.choice(bands))

    def _codec(self, samples: Samples, draw: random.Random) -> Samples:
        codec, quality = draw.choice(self.settings.codecs), draw.uniform(*COMPRESSION)
        if codec == "mu_law":
            return mu_law(samples)
        if codec == "narrow":
            return narrow(samples, self.sample_rate)
        return compress(samples, self.sample_rate, codec, quality)


# --- Speed --------------------------------------------------------------------------------------


def change_speed(samples: Samples, speed: float) -> Samples:
    """Play the sound `speed` times as fast, rounded to a hundredth: N / speed samples, rounded up.

    Tempo and pitch change together (Ko et al., 2015).
    """
    return _resampled(samples, round(STEPS * speed), STEPS)


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    with one_thread():  # to the last bit the same in every process
        return resample(torch.from_numpy(samples), rate, wanted).numpy()


# --- Rooms and noise ----------------------------------------------------------------------------


def room_response(decay: float, below: float, sample_rate: int, seed: int) -> Samples:
    """Return the response of a room: the direct sound, 1, and noise that decays exponentially.

    The noise falls by 60 dB in `decay` seconds. In all it has `below` dB less energy than the
    direct sound.
    """
    times = np.arange(1, max(2, round(decay * sample_rate)), dtype=np.float32) / sample_rate
    noise = np.random.default_rng(seed).standard_normal(len(times), np.float32)
    noise *= np.exp(times * np.float32(-math.log(1000) / decay))
    noise *= math.sqrt(10 ** (-below / 10) / _energy(noise))
    return np.concatenate([np.ones(1, np.float32), noise])


def reverberate(samples: Samples, response: Samples) -> Samples:
    """Convolve sound with a room's response; keep its length and its energy."""
    size = fast_size(len(samples) + len(response) - 1)
    spectrum = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    return _scaled(np.fft.irfft(spectrum, size)[: len(samples)], _energy(samples))


def add_noise(samples: Samples, noise: Samples, snr: float) -> Samples:
    """Add noise of the same length, `snr` dB below the sound; silence stays as it is."""
    wanted = _energy(samples) * 10 ** (-snr / 10)
    noisy: Samples = samples + _scaled(noise, wanted)
    return noisy


def _energy(samples: Samples) -> float:
    return float(np.sum(np.square(samples, dtype=np.float64)))


def _scaled(samples: Samples, energy: float) -> Samples:
    """Scale sound to an energy; return silence as it is."""
    there_is = _energy(samples)
    scale = np.float32(math.sqrt(energy / there_is)) if there_is else np.float32(1)
    scaled: Samples = scale * samples
    return scaled


@dataclass(frozen=True)
class Noise:
    """A sound file to cut noise from."""

    path: Path
    seconds: float

    def samples(self, num_samples: int, sample_rate: int, place: float) -> Samples:
        """Read so many samples; `place` in [0, 1) says from where. Repeat a file that is short."""
        wanted = num_samples / sample_rate
        start = place * max(0.0, self.seconds - wanted)
        try:
            with one_thread():
                part = decode(self.path, sample_rate, _accept, start=start, duration=wanted)
        except (ValueError, OSError) as error:  # UnreadableSound, RateError
            raise _unreadable(self.path, error) from None
        return np.resize(part.numpy(), num_samples)  # zeros if there are no samples


def read_noises(folder: Path) -> list[Noise]:
    """Read the headers of all sounds in a folder; raise a DataError if there are none."""
    files = list(sound_files(folder))
    with ThreadPoolExecutor() as threads:
        noises = [noise for noise in threads.map(_noise_of, files) if noise.seconds > 0]
    if not noises:
        raise DataError(f"all sounds in {folder} are empty; record them again")
    return noises


def _noise_of(path: Path) -> Noise:
    try:
        return Noise(path, soundfile.info(path).duration)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(getattr(error, "error_string", error)).rstrip(".")
    return Origin(path).error(
        f"the noise cannot be read ({reason}); convert it, or take it out of the folder"
    )


def _accept(sound: soundfile.SoundFile) -> None:
    """Accept a sound of any rate and number of channels."""


# --- Levels, bands and codecs -------------------------------------------------------------------


def change_gain(samples: Samples, decibels: float) -> Samples:
    """Raise the level of sound by so many dB. Nothing is clipped."""
    return samples * np.float32(10 ** (decibels / 20))


def band_limit(samples: Samples, sample_rate: int, low: float, high: float) -> Samples:
    """Remove the frequencies below `low` and above `high` hertz; the edges are cosines."""
    size = fast_size(len(samples) + sample_rate // 10)  # so that the filter does not wrap around
    hertz = np.arange(size // 2 + 1) * (sample_rate / size)
    passed = np.ones(len(hertz), np.float32)
    if low > 0:
        passed *= _rising(hertz, (1 - EDGE) * low, low)
    if high < sample_rate / 2:
        passed *= 1 - _rising(hertz, high, (1 + EDGE) * high)
    spectrum = np.fft.rfft(samples, size) * passed
    return np.fft.irfft(spectrum, size)[: len(samples)].astype(np.float32)


def _rising(hertz: np.ndarray, start: float, end: float) -> Samples:
    """Return a step from 0 at `start` to 1 at `end`."""
    share = np.clip((hertz - start) / (end - start), 0, 1)
    step: Samples = (0.5 - 0.5 * np.cos(math.pi * share)).astype(np.float32)
    return step


def mu_law(samples: Samples) -> Samples:
    """Quantise samples to 256 levels on the logarithmic curve of G.711; clip them to [-1, 1]."""
    clipped = np.clip(samples, -1, 1)
    curved = np.sign(clipped) * np.log1p(MU * np.abs(clipped)) / np.float32(math.log1p(MU))
    level = np.round((curved + 1) * (MU / 2)) * np.float32(2 / MU) - 1
    found: Samples = np.sign(level) * np.expm1(np.abs(level) * math.log1p(MU)) / MU
    return found.astype(np.float32)


def narrow(samples: Samples, sample_rate: int) -> Samples:
    """Resample sound to 8 kHz and back; sound of 8 kHz or less stays as it is."""
    if sample_rate <= 8000:
        return samples
    back = _resampled(_resampled(samples, sample_rate, 8000), 8000, sample_rate)
    return back[: len(samples)]


def compress(
    samples: Samples, sample_rate: int, codec: Literal["mp3", "vorbis"], compression: float
) -> Samples:
    """Encode sound as MP3 or Ogg Vorbis in memory, and decode it; clip it to [-1, 1]."""
    container, subtype = FORMATS[codec]
    file = io.BytesIO()
    level = {"format": container, "subtype": subtype, "compression_level": compression}
    soundfile.write(file, np.clip(samples, -1, 1), sample_rate, **level)
    file.seek(0)
    decoded, _ = soundfile.read(file, dtype="float32")
    return np.pad(decoded, (0, max(0, len(samples) - len(decoded))))[: len(samples)]


def _check_codec(codec: Codec, sample_rate: int) -> None:
    """Raise a DataError if libsndfile cannot write a codec, or the rate cannot be converted."""
    if codec == "narrow" and sample_rate // math.gcd(sample_rate, 8000) > MAX_PHASES:
        raise DataError(
            f"{sample_rate} and 8000 samples a second have too little in common; leave narrow out "
            "of train.sound.codecs"
        )
    if codec in FORMATS and not soundfile.check_format(*FORMATS[codec]):
        raise DataError(
            f"libsndfile {soundfile.__libsndfile_version__} writes no {codec}; install a newer "
            f"one, or leave {codec} out of train.sound.codecs"
        )


@cache
def _fast_sizes() -> np.ndarray:
    """Return all products of 2, 3 and 5 below 2^28, sorted."""
    sizes = {2**a * 3**b * 5**c for a in range(29) for b in range(18) for c in range(13)}
    return np.array(sorted(size for size in sizes if size <= 2**28))


def fast_size(least: int) -> int:
    """Return the smallest size from `least` on whose FFT is fast."""
    sizes = _fast_sizes()
    return int(sizes[np.searchsorted(sizes, least)]) if least <= sizes[-1] else least
