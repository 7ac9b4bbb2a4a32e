"""From sound to the frames x: the paper's cepstra, or spectrograms, and their normalisation.

The conventions are Kaldi's, whose own are HTK's: windows that lie within the sound, the mean of
each taken out, pre-emphasis within the window, samples on the scale of 16-bit integers.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair
from transduce.resampling import resample

# Raised whenever the same settings give other numbers: the cache then starts anew.
VERSION = 1
NO_SUCH_FILE = 7  # libsndfile's SFE_BAD_FILE


@dataclass(frozen=True)
class FeatureSettings:
    """What the frames are. The defaults are the paper's, 26 numbers a frame."""

    kind: Literal["cepstra", "log_mel"] = "cepstra"
    sample_rate: int = 16_000  # samples a second
    window: float = 0.025  # seconds, each under a Hamming window
    shift: float = 0.010  # seconds from one window to the next
    pre_emphasis: float = 0.97
    num_channels: int = 26  # of the mel filter bank, from 0 to half the sample rate
    num_cepstra: int = 12  # beside the energy; log_mel has none of either
    lifter: float = 22.0  # makes the cepstra about equally large; 0 leaves them
    num_deltas: int = 1  # how many times differences in time are appended
    delta_reach: int = 2  # frames before and after that a difference looks at

    def __post_init__(self) -> None:
        if self.kind not in ("cepstra", "log_mel"):
            raise ValueError(f"kind must be cepstra or log_mel, not {self.kind!r}")
        if self.kind == "cepstra" and not 1 <= self.num_cepstra < self.num_channels:
            raise ValueError(
                f"num_cepstra must be between 1 and num_channels - 1 = {self.num_channels - 1}, "
                f"not {self.num_cepstra}"
            )
        for name in ("sample_rate", "num_channels", "num_cepstra", "num_deltas", "delta_reach"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        for name in ("sample_rate", "window", "shift", "num_channels", "delta_reach"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("window", "shift"):
            if getattr(self, f"{name}_samples") < 1:
                raise ValueError(
                    f"{name} must be at least a sample, 1 / {self.sample_rate} seconds, "
                    f"not {getattr(self, name)}"
                )
        if self.num_deltas < 0:
            raise ValueError(f"num_deltas must not be negative, as {self.num_deltas} is")

    @property
    def size(self) -> int:
        """How many numbers a frame has."""
        static = self.num_channels if self.kind == "log_mel" else self.num_cepstra + 1
        return static * (1 + self.num_deltas)

    def as_spectrogram(self) -> FeatureSettings:
        """A picture of the sound in the same windows, whatever the features are."""
        return replace(self, kind="log_mel", num_channels=64, num_deltas=0)

    @property
    def window_samples(self) -> int:
        return round(self.window * self.sample_rate)

    @property
    def shift_samples(self) -> int:
        return round(self.shift * self.sample_rate)


SPECTROGRAM = FeatureSettings(kind="log_mel", num_channels=40, num_deltas=0)


class Features(nn.Module):
    """Sounds to frames, batched, on the device the module is on."""

    hamming: Tensor
    filters: Tensor
    cosines: Tensor

    def __init__(self, settings: FeatureSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = settings or FeatureSettings()
        N = settings.window_samples
        self.fft_size = 1 << (N - 1).bit_length()
        hamming = torch.hamming_window(N, periodic=False, dtype=torch.float64)
        for name, table in (
            ("hamming", hamming),
            ("filters", mel_filters(settings.num_channels, self.fft_size, settings.sample_rate)),
            ("cosines", _liftered_cosines(settings)),
        ):
            self.register_buffer(name, table.float(), persistent=False)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """How many windows lie within so many samples."""
        settings = self.settings
        beyond = num_samples - settings.window_samples
        return torch.where(beyond < 0, 0, beyond // settings.shift_samples + 1)

    def forward(self, waves: Tensor, num_samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Frames [B, T, size] and how many each has [B], from samples in [-1, 1], [B, N].

        What lies beyond an utterance's num_samples is not looked at; its frames there are zero.
        """
        settings = self.settings
        if waves.ndim != 2:
            raise ValueError(f"waves must be [B, N], not {list(waves.shape)}")
        if waves.dtype != self.hamming.dtype:
            raise ValueError(
                f"waves must be {self.hamming.dtype} in [-1, 1], not {waves.dtype}; convert them"
            )
        if num_samples is None:
            num_samples = torch.full((len(waves),), waves.shape[1], device=waves.device)
        _check_num_samples(num_samples, *waves.shape)
        num_frames = self.num_frames(num_samples)
        if waves.shape[1] < settings.window_samples:
            return waves.new_zeros(len(waves), 0, settings.size), num_frames
        windows = 32768 * waves.unfold(1, settings.window_samples, settings.shift_samples)
        windows = windows - windows.mean(-1, keepdim=True)
        frames = self._static(windows)
        inside = torch.arange(frames.shape[1], device=frames.device) < num_frames[:, None]
        parts = [frames]
        for _ in range(settings.num_deltas):
            parts.append(deltas(parts[-1], num_frames, settings.delta_reach))
        return torch.cat(parts, -1).masked_fill(~inside[..., None], 0.0), num_frames

    def _static(self, windows: Tensor) -> Tensor:
        """[B, T, channels], or [B, T, 1 + cepstra] with the energy first, from [B, T, samples]."""
        smallest = torch.finfo(windows.dtype).eps
        before = torch.cat([windows[..., :1], windows[..., :-1]], -1)
        emphasised = (windows - self.settings.pre_emphasis * before) * self.hamming
        spectrum = torch.view_as_real(torch.fft.rfft(emphasised, self.fft_size))
        power = spectrum.square().sum(-1)
        log_mel = (power @ self.filters).clamp(min=smallest).log()
        if self.settings.kind == "log_mel":
            return log_mel
        log_energy = windows.square().sum(-1, keepdim=True).clamp(min=smallest).log()
        return torch.cat([log_energy, log_mel @ self.cosines], -1)


def _check_num_samples(num_samples: Tensor, B: int, N: int) -> None:
    if not isinstance(num_samples, Tensor) or num_samples.dtype not in (torch.int64, torch.int32):
        kind = getattr(num_samples, "dtype", type(num_samples).__name__)
        raise ValueError(f"num_samples must be a tensor of integers, not {kind}")
    if num_samples.shape != (B,):
        raise ValueError(f"num_samples must be [B] = [{B}], not {list(num_samples.shape)}")
    for b, count in enumerate(num_samples.tolist()):
        if not 0 <= count <= N:
            raise ValueError(f"num_samples[{b}] must be between 0 and {N}, not {count}")


def mel(hertz: Tensor) -> Tensor:
    return 1127 * (1 + hertz / 700).log()


def mel_filters(num_channels: int, fft_size: int, sample_rate: int) -> Tensor:
    """Triangles that overlap by half and are equally wide in mel, [fft_size / 2 + 1, channels]."""
    hertz = torch.arange(fft_size // 2 + 1, dtype=torch.float64) * sample_rate / fft_size
    top = mel(torch.tensor(sample_rate / 2, dtype=torch.float64))
    width = top / (num_channels + 1)
    peaks = width * torch.arange(1, num_channels + 1, dtype=torch.float64)
    return (1 - (mel(hertz)[:, None] - peaks).abs() / width).clamp(min=0)


def deltas(frames: Tensor, num_frames: Tensor, reach: int) -> Tensor:
    """The slope of each coefficient about each frame, [B, T, D], by least squares.

    Before an utterance's first frame and after its last, these are repeated.
    """
    B, T, D = frames.shape
    last = (num_frames - 1).clamp(min=0)[:, None]
    here = torch.arange(T, device=frames.device)
    slope = torch.zeros_like(frames)
    for n in range(1, reach + 1):
        later, earlier = (here + n).minimum(last), (here - n).clamp(min=0).expand(B, T)
        ahead, behind = (frames.gather(1, t[..., None].expand(B, T, D)) for t in (later, earlier))
        slope += n * (ahead - behind)
    return slope / (2 * sum(n * n for n in range(1, reach + 1)))


def _liftered_cosines(settings: FeatureSettings) -> Tensor:
    """The cosine transform of log filter outputs to cepstra 1, 2, ..., [channels, cepstra]."""
    channels = torch.arange(settings.num_channels, dtype=torch.float64)
    n = torch.arange(1, settings.num_cepstra + 1, dtype=torch.float64)
    angles = math.pi / settings.num_channels * (channels[:, None] + 0.5) * n
    cosines = math.sqrt(2 / settings.num_channels) * angles.cos()
    if settings.lifter:
        cosines *= 1 + settings.lifter / 2 * (math.pi * n / settings.lifter).sin()
    return cosines


# --- Normalisation ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Statistics:
    """The mean and the deviation of each coefficient over the training set, each [D].

    They belong to the model: what it is given must be normalised as what it learnt from.
    """

    mean: Tensor
    deviation: Tensor

    @classmethod
    def over(cls, sequences: Iterable[Tensor]) -> Statistics:
        """Of all the frames of the sequences, each [T, D]. A constant's deviation counts as 1."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        centre = None
        for frames in sequences:
            if centre is None and len(frames):
                # Sums of squares about any frame are smaller than about zero, and so more exact.
                centre = frames[0].double()
            if centre is not None:
                wide = frames.double() - centre
                count += len(wide)
                total, squares = total + wide.sum(0), squares + wide.square().sum(0)
        if centre is None:
            raise DataError("there are no frames to take statistics of; give a training set")
        shift = total / count
        deviation = (squares / count - shift.square()).clamp(min=0).sqrt()
        constant = deviation <= 1e-6 * (centre + shift).abs()
        deviation = torch.where(constant, 1.0, deviation)
        return cls((centre + shift).float(), deviation.float())

    def normalise(self, frames: Tensor) -> Tensor:
        """Frames [..., D] with mean 0 and deviation 1 over the training set."""
        return (frames - self.mean.to(frames.device)) / self.deviation.to(frames.device)


# --- Reading ------------------------------------------------------------------------------------


def read_wave(
    audio: Audio, sample_rate: int, origin: Origin | None = None, *, convert: bool = False
) -> Tensor:
    """The samples [N] in [-1, 1] of a sound file: WAV, FLAC, Opus, NIST SPHERE and the like.

    One that has another sample rate, or several channels, is refused, because what a model learns
    from should be of one kind; with `convert` it is resampled, and the mean of its channels taken.

    What is wrong with it is a DataError that begins with `origin`, the line that names the file.
    """
    origin, path = origin or Origin(audio.path), audio.path
    if not path.is_file():
        raise origin.error(f"there is no file {path}; check the path")
    try:
        header = sphere_header(path)
        if header is not None and "shorten" in header.get("sample_coding", ""):
            raise origin.error(
                f"{path} is compressed by shorten; decompress it with `sph2pipe -f wav` or `sox`"
            )
        with soundfile.SoundFile(path) as file:
            rate = file.samplerate
            if rate != sample_rate and not convert:
                raise origin.error(
                    f"{path} has {rate} samples a second where {sample_rate} are "
                    f"wanted; convert it with `sox {path.name} -r {sample_rate} new.wav`"
                )
            if file.channels != 1 and not convert:
                raise origin.error(
                    f"{path} has {file.channels} channels; mix them into one with "
                    f"`sox {path.name} -c 1 new.wav`"
                )
            wanted = -1  # to the end
            if audio.start is not None:
                first = round(audio.start * rate)
                if first >= file.frames > 0:
                    raise origin.error(
                        f"{path} has {file.frames / rate:.2f} seconds, so that the offset "
                        f"{audio.start:.2f} is past its end; correct the offset"
                    )
                file.seek(min(first, file.frames))
                if audio.duration is not None:
                    wanted = round(audio.duration * rate)
            samples = file.read(wanted, dtype="float32", always_2d=True).mean(1)
    # A TypeError is for a .raw file, which does not say what is in it.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        reason = f" ({str(getattr(error, 'error_string', error)).rstrip('.')})"
        if getattr(error, "code", None) == NO_SUCH_FILE:  # it exists: this is said of a bad MP3
            reason = ""
        raise origin.error(
            f"{path} is not audio that can be read{reason}; record or convert it again"
        ) from None
    promised = audio.duration
    if header is not None and audio.start is None and header.get("sample_count", "").isdigit():
        promised = int(header["sample_count"]) / rate
    seconds = len(samples) / rate
    # A recording that stops early has lost what its transcript goes on to say.
    if promised is not None and seconds < 0.95 * promised - 0.1:
        raise origin.error(
            f"{path} ends after {seconds:.2f} of its {promised:.2f} seconds; copy it again"
        )
    try:
        return resample(torch.from_numpy(samples), rate, sample_rate)
    except ValueError as error:
        raise origin.error(
            f"{path}: {error}; convert it with `sox {path.name} -r {sample_rate} new.wav`"
        ) from None


def sphere_header(path: Path) -> dict[str, str] | None:
    """The fields of a NIST SPHERE file's header; None if it is another kind of file."""
    with path.open("rb") as file:
        magic, size = file.readline(8), file.readline(16)
        if magic.strip() != b"NIST_1A" or not size.strip().isdigit():
            return None
        header = file.read(int(size) - len(magic) - len(size))
    fields = {}
    for line in header.decode("latin-1").split("end_head")[0].splitlines():
        if found := re.match(r"(\S+) -(?:i|r|s\d+) (.*)", line):
            fields[found[1]] = found[2].strip()
    return fields


def read_features(source: Frames, size: int | None = None, origin: Origin | None = None) -> Tensor:
    """The frames [T, D] of a .npy file; a DataError if it is anything else, or D is not `size`."""
    origin, path = origin or Origin(source.path), source.path
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise origin.error(f"{path} is not a .npy file; write it with numpy.save") from None
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise origin.error(f"{path} is not an array of frames by numbers; save one of [T, D]")
    if size is not None and array.shape[1] != size:
        raise origin.error(
            f"{path} has {array.shape[1]} numbers a frame where {size} are wanted; "
            "compute it with the settings of the others"
        )
    if not len(array):
        raise origin.error(f"{path} has no frames; leave the line out")
    with np.errstate(over="ignore"):
        frames = array.astype(np.float32)
    if not np.isfinite(frames).all():
        raise origin.error(f"{path} has a number that is not finite in float32; compute it again")
    return torch.from_numpy(frames)


class FrameReader:
    """The frames of pairs, [T, D] and not normalised: computed once, then kept in a folder.

    The cache is keyed by the audio's bytes, the part and length that are asked for and the
    settings, so neither another path nor a later date makes frames anew, and another setting never
    gives old ones. Files are put in place whole,
    by renaming, so any number of processes may share the folder.
    """

    def __init__(
        self,
        settings: FeatureSettings | None = None,
        cache: str | Path | None = None,
        *,
        convert: bool = False,  # what has another sample rate, or several channels
    ) -> None:
        self.features = Features(settings)
        self.cache = None if cache is None else Path(cache)
        self.convert = convert

    def __call__(self, pair: Pair) -> Tensor:
        """The pair's frames; a DataError if there are none to be had."""
        source = pair.source
        if isinstance(source, Frames):
            return read_features(source, origin=pair.origin)
        if not isinstance(source, Audio):
            raise pair.origin.error("the source is text, not audio; give the source alphabet")
        if self.cache is None:
            return self._computed(source, pair.origin)
        kept = self.cache / f"{self._key(source, pair.origin)}.npy"
        if (frames := _load_if_whole(kept, self.features.settings.size)) is not None:
            return frames
        frames = self._computed(source, pair.origin)
        _save_by_rename(kept, frames)
        return frames

    def all(
        self,
        pairs: Sequence[Pair],
        skipped: list[DataError] | None = None,
        num_threads: int | None = None,
        size: int | None = None,
    ) -> Iterator[tuple[Pair, Tensor]]:
        """Each pair with its frames, in order, several being read at once; bad pairs are skipped
        if there is a list to keep the reasons in. Frames of another size than `size`, or than the
        first ones have, are bad."""
        num_threads = num_threads or os.cpu_count() or 1
        threads = ThreadPoolExecutor(num_threads)
        try:
            results = _in_order(threads, partial(_frames_or_error, self), pairs, 2 * num_threads)
            for pair, frames in zip(pairs, results, strict=True):
                if isinstance(frames, Tensor) and frames.shape[1] != (
                    size := size or frames.shape[1]
                ):
                    frames = pair.origin.error(
                        f"there are {frames.shape[1]} numbers a frame where others have {size}; "
                        "compute them with the same settings"
                    )
                if isinstance(frames, Tensor):
                    yield pair, frames
                elif skipped is None:
                    raise frames
                else:
                    skipped.append(frames)
        finally:
            threads.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _computed(self, audio: Audio, origin: Origin) -> Tensor:
        settings = self.features.settings
        wave = read_wave(audio, settings.sample_rate, origin, convert=self.convert)
        if len(wave) < settings.window_samples:
            raise origin.error(
                f"{audio.path} has {1000 * len(wave) / settings.sample_rate:.0f} ms of sound where "
                f"a window takes {1000 * settings.window:.0f}; leave the line out"
            )
        frames: Tensor = self.features(wave[None])[0][0]
        if not frames.isfinite().all():
            raise origin.error(f"{audio.path} has samples that are not finite; convert it again")
        return frames

    def _key(self, audio: Audio, origin: Origin) -> str:
        try:
            content = audio.path.read_bytes()
        except OSError as error:
            raise origin.error(
                f"{audio.path} cannot be read ({error.strerror}); check it"
            ) from None
        # With the duration, so that a wrong one is found out and not hidden by an earlier reading.
        part = (audio.start, audio.duration) + (("converted",) if self.convert else ())
        settings = sorted(asdict(self.features.settings).items())
        what = repr((VERSION, settings, part)).encode()
        return hashlib.sha256(what + hashlib.sha256(content).digest()).hexdigest()


def _in_order(
    threads: ThreadPoolExecutor,
    read: Callable[[Pair], Tensor | DataError],
    pairs: Iterable[Pair],
    ahead: int,
) -> Iterator[Tensor | DataError]:
    """What `read` makes of the pairs, at most `ahead` of them before they are asked for: the frames
    of a corpus may not fit into memory."""
    rest = iter(pairs)
    waiting = deque(threads.submit(read, pair) for pair in islice(rest, ahead))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(threads.submit(read, pair) for pair in islice(rest, 1))
        yield result


def _frames_or_error(reader: FrameReader, pair: Pair) -> Tensor | DataError:
    try:
        return reader(pair)
    except DataError as error:
        return error


def _load_if_whole(path: Path, size: int) -> Tensor | None:
    """The frames of a cache file, or None if it is not there or was damaged by other hands."""
    try:
        return read_features(Frames(path), size)
    except DataError:
        return None


def _save_by_rename(path: Path, frames: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.save(content, frames.numpy())
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".unfinished", delete=False) as file:
        try:
            file.write(content.getvalue())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
