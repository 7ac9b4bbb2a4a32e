"""Samples -> frames x: cepstra (MFCC) as in the paper, or log mel spectrograms; normalisation.

The conventions are Kaldi's and HTK's: windows lie within the sound, each loses its mean and is
pre-emphasised, and samples have the scale of 16-bit integers. The kinds "sherpa" and
"sherpa_streaming" follow sherpa-onnx instead, so that an exported model gets the frames there that
it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from transduce.data.pairs import DataError
from transduce.settings import check_at_most

MOST_FILTER_WEIGHTS = 100_000_000  # of the mel filter bank: a bound on its memory


Count = TypeVar("Count", int, Tensor)
Kind = Literal["cepstra", "log_mel", "sherpa", "sherpa_streaming"]


@dataclass(frozen=True)
class Convention:
    """What the kind of frames decides: how windows are cut and weighted, and the mel filters."""

    weighting: Literal["hamming", "povey", "hann"] = "hamming"
    sample_scale: float = 32768.0  # of samples in [-1, 1]
    centred: bool = False  # a window around the middle of each shift; the sound is mirrored outside
    remove_mean: bool = True  # of each window
    mel_scale: Literal["htk", "slaney"] = "htk"
    unused: float = 0.0  # hertz between the last filter and half the sample rate


OURS = Convention()
SHERPA = Convention("povey", 1.0, True, False, "slaney", 400.0)
SHERPA_STREAMING = Convention("hann", 1.0, True, False, "slaney")
CONVENTIONS: dict[Kind, Convention] = {
    "cepstra": OURS,
    "log_mel": OURS,
    "sherpa": SHERPA,
    "sherpa_streaming": SHERPA_STREAMING,
}


@dataclass(frozen=True)
class FeatureSettings:
    """The kind and the parameters of frames. The defaults are the paper's, 26 numbers a frame."""

    # sherpa: the log mel spectrogram that sherpa-onnx computes for NeMo's transducers;
    # sherpa_streaming: the one that it computes for their streaming recogniser, and for CTC.
    kind: Kind = "cepstra"
    sample_rate: int = 16_000  # samples a second
    window: float = 0.025  # seconds
    shift: float = 0.010  # seconds from one window to the next
    pre_emphasis: float = 0.97
    num_channels: int = 26  # filters of the mel filter bank
    num_cepstra: int = 12  # besides the log energy; only cepstra have either
    lifter: float = 22.0  # scales the cepstra to similar sizes; 0: no scaling
    num_deltas: int = 1  # orders of time derivatives (deltas) to append
    delta_reach: int = 2  # frames on either side that a delta uses

    def __post_init__(self) -> None:
        if self.kind not in CONVENTIONS:
            *first, last = CONVENTIONS
            raise ValueError(f"kind must be {', '.join(first)} or {last}, not {self.kind!r}")
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
        check_at_most(self, 1_000_000, "sample_rate")
        check_at_most(self, 10, "window", "shift", "num_deltas")
        check_at_most(self, 1000, "num_channels", "delta_reach")
        if self.window_samples * self.num_channels > MOST_FILTER_WEIGHTS:
            raise ValueError(
                f"window times num_channels must be at most {MOST_FILTER_WEIGHTS} samples, not "
                f"{self.window_samples} times {self.num_channels}"
            )
        if self.num_deltas < 0:
            raise ValueError(f"num_deltas must be at least 0, not {self.num_deltas}")
        if self.convention.unused >= self.sample_rate / 2:
            raise ValueError(
                f"the mel filters of {self.kind} end {self.convention.unused:g} Hz below half the "
                f"sample rate, so sample_rate must be more than {2 * self.convention.unused:g}"
            )

    @property
    def size(self) -> int:
        """Return D, the numbers in a frame."""
        static = self.num_cepstra + 1 if self.kind == "cepstra" else self.num_channels
        return static * (1 + self.num_deltas)

    @property
    def convention(self) -> Convention:
        """Return the convention of the kind."""
        return CONVENTIONS[self.kind]

    @property
    def lookahead(self) -> int:
        """Return the frames to the right on which the deltas of a frame depend."""
        return self.num_deltas * self.delta_reach

    def as_spectrogram(self) -> FeatureSettings:
        """Return settings for a spectrogram of the same windows, to draw the sound."""
        return replace(self, kind="log_mel", num_channels=64, num_deltas=0)

    def num_frames(self, num_samples: Count) -> Count:
        """Return how many windows fit into `num_samples`, or have their middle there."""
        if self.convention.centred:
            return (num_samples + self.shift_samples // 2) // self.shift_samples
        whole = (num_samples - self.window_samples) // self.shift_samples + 1
        return max(0, whole) if isinstance(whole, int) else whole.clamp(min=0)

    @property
    def window_samples(self) -> int:
        """Return the samples in a window."""
        return round(self.window * self.sample_rate)

    @property
    def shift_samples(self) -> int:
        """Return the samples from one window to the next."""
        return round(self.shift * self.sample_rate)

    @property
    def margin(self) -> float:
        """Return the seconds of sound before the first frame's time, and after the last one's.

        A frame stands for `shift` seconds around the middle of its window.
        """
        return 0.0 if self.convention.centred else (self.window - self.shift) / 2


BLOCK = 16_384  # windows transformed at once: memory, some kilobytes each, against calls
SPECTROGRAM = FeatureSettings(kind="log_mel", num_channels=40, num_deltas=0)


class Features(nn.Module):
    """A module that computes the frames of a batch of sounds, on its own device."""

    weights: Tensor
    filters: Tensor
    cosines: Tensor

    def __init__(self, settings: FeatureSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = settings or FeatureSettings()
        N = settings.window_samples
        self.fft_size = 1 << (N - 1).bit_length()
        self._tables: Any = None  # of the compiled kernels
        for name, table in (
            ("weights", window_weights(settings.convention.weighting, N)),
            ("filters", mel_filters(settings, self.fft_size)),
            ("cosines", _liftered_cosines(settings)),
        ):
            self.register_buffer(name, table.float(), persistent=False)

    def forward(self, waves: Tensor, num_samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute frames [B, T, size] and their numbers [B] from samples [B, N] in [-1, 1].

        Ignore the samples beyond num_samples [B]; set the frames there to zero.
        """
        settings = self.settings
        if waves.ndim != 2:
            raise ValueError(f"waves must be [B, N], not {list(waves.shape)}")
        if waves.dtype != self.weights.dtype:
            raise ValueError(
                f"waves must be {self.weights.dtype} in [-1, 1], not {waves.dtype}; convert them"
            )
        if num_samples is None:
            num_samples = torch.full((len(waves),), waves.shape[1], device=waves.device)
        _check_num_samples(num_samples, *waves.shape)
        num_frames = settings.num_frames(num_samples)
        if settings.convention.centred:
            waves = self._mirrored(waves, num_samples)
        if waves.shape[1] < settings.window_samples:
            return waves.new_zeros(len(waves), 0, settings.size), num_frames
        frames = self.static(waves)
        inside = torch.arange(frames.shape[1], device=frames.device) < num_frames[:, None]
        frames = append_deltas(frames, num_frames, settings)
        return frames.masked_fill(~inside[..., None], 0.0), num_frames

    def static(self, waves: Tensor) -> Tensor:
        """Compute the frames of samples [B, N], at least a window, without deltas.

        Without gradients, a frame of float32 samples on the CPU depends on its own window alone, to
        the last bit; compiled kernels compute it.
        """
        settings = self.settings
        length, shift = settings.window_samples, settings.shift_samples
        on_cpu = waves.device.type == "cpu" and waves.dtype == torch.float32 and self.fft_size > 1
        if on_cpu and not (torch.is_grad_enabled() and waves.requires_grad):
            from transduce.audio.spectra import frames_of, tables

            if self._tables is None:
                self._tables = tables(
                    *(self.weights, self.filters, self.cosines, self.fft_size, shift),
                    *(settings.pre_emphasis, settings.kind == "cepstra"),
                    *(settings.convention.sample_scale, settings.convention.remove_mean),
                )
            return frames_of(waves.detach(), self._tables, 1 + (waves.shape[1] - length) // shift)
        windows = waves.unfold(1, length, shift)
        return torch.cat([self._static(block) for block in torch.split(windows, BLOCK, 1)], 1)

    def _mirrored(self, waves: Tensor, num_samples: Tensor) -> Tensor:
        """Return the samples that all windows cover; mirror each sound beyond its ends."""
        window, shift = self.settings.window_samples, self.settings.shift_samples
        T = (waves.shape[1] + shift // 2) // shift
        before = window // 2 - shift // 2
        there = torch.arange((T - 1) * shift + window if T else 0, device=waves.device)
        length = num_samples.clamp(min=1)[:, None]
        place = (there - before) % (2 * length)  # the mirrored sound repeats itself
        return waves.gather(1, torch.where(place < length, place, 2 * length - 1 - place))

    def _static(self, windows: Tensor) -> Tensor:
        """Compute the frames of windows [B, T, window_samples] without deltas.

        They are log mel [B, T, num_channels], or log energy and cepstra [B, T, 1 + num_cepstra].
        """
        smallest = torch.finfo(torch.float32).eps  # in every precision, as Kaldi
        convention = self.settings.convention
        windows = convention.sample_scale * windows
        if convention.remove_mean:
            windows = windows - windows.mean(-1, keepdim=True)
        before = torch.cat([windows[..., :1], windows[..., :-1]], -1)
        emphasised = (windows - self.settings.pre_emphasis * before) * self.weights
        spectrum = torch.view_as_real(torch.fft.rfft(emphasised, self.fft_size))
        power = spectrum.square().sum(-1)
        log_mel = (power @ self.filters).clamp(min=smallest).log()
        if self.settings.kind != "cepstra":
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


def window_weights(weighting: str, size: int) -> Tensor:
    """Return the weights of the samples of a window in float64, as Kaldi defines them."""
    if weighting == "hamming":
        return torch.hamming_window(size, periodic=False, dtype=torch.float64)
    if weighting == "hann":
        return torch.hann_window(size, periodic=True, dtype=torch.float64)
    return torch.hann_window(size, periodic=False, dtype=torch.float64) ** 0.85


def hertz_to_mel(hertz: Tensor) -> Tensor:
    """Convert frequencies to HTK's mel scale."""
    return 1127 * (1 + hertz / 700).log()


def slaney_to_hertz(mel: Tensor) -> Tensor:
    """Convert Slaney's mel scale to frequencies: linear up to 1000 Hz, then logarithmic."""
    return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * math.log(6.4) / 27))


def hertz_to_slaney(hertz: float) -> float:
    """Convert a frequency to Slaney's mel scale."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def mel_filters(settings: FeatureSettings, fft_size: int) -> Tensor:
    """Return triangular filters [fft_size / 2 + 1, num_channels], equally wide in mel.

    HTK's are triangles in mel, with height 1; Slaney's are triangles in hertz, with area 1.
    """
    num_channels, sample_rate = settings.num_channels, settings.sample_rate
    hertz = torch.arange(fft_size // 2 + 1, dtype=torch.float64) * sample_rate / fft_size
    top = sample_rate / 2 - settings.convention.unused
    steps = torch.arange(num_channels + 2, dtype=torch.float64)
    if settings.convention.mel_scale == "htk":
        width = hertz_to_mel(torch.tensor(top, dtype=torch.float64)) / (num_channels + 1)
        peaks = width * steps[1:-1]
        return (1 - (hertz_to_mel(hertz)[:, None] - peaks).abs() / width).clamp(min=0)
    edges = slaney_to_hertz(hertz_to_slaney(top) / (num_channels + 1) * steps)
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (hertz[:, None] - left) / (peak - left)
    falling = (right - hertz[:, None]) / (right - peak)
    return rising.minimum(falling).clamp(min=0) * 2 / (right - left)


def append_deltas(frames: Tensor, num_frames: Tensor, settings: FeatureSettings) -> Tensor:
    """Append the deltas of all orders to frames [B, T, D]: [B, T, (1 + num_deltas) D]."""
    parts = [frames]
    for _ in range(settings.num_deltas):
        parts.append(deltas(parts[-1], num_frames, settings.delta_reach))
    return torch.cat(parts, -1)


def deltas(frames: Tensor, num_frames: Tensor, reach: int) -> Tensor:
    """Return the slope of each coefficient around each frame, [B, T, D], by least squares.

    Repeat an utterance's first and last frame beyond its ends.
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
    """Return the cosine transform [num_channels, num_cepstra] to cepstra 1, 2, ..., liftered."""
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
    """The mean and the standard deviation of each coefficient over the training set.

    They are part of a model: its inputs need the same normalisation as its training set.
    """

    mean: Tensor  # [D]
    deviation: Tensor  # [D]

    @classmethod
    def over(cls, sequences: Iterable[Tensor]) -> Statistics:
        """Compute them over all frames of the sequences [T, D]; a constant has deviation 1."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        centre = None
        for frames in sequences:
            if centre is None and len(frames):
                # Squares around a frame are smaller than around zero, and their sum more exact.
                centre = frames[0].double()
            if centre is not None:
                wide = frames.double() - centre
                count += len(wide)
                total, squares = total + wide.sum(0), squares + wide.square().sum(0)
        if centre is None:
            raise DataError("there are no frames to compute statistics of; give a training set")
        shift = total / count
        deviation = (squares / count - shift.square()).clamp(min=0).sqrt()
        constant = deviation <= 1e-6 * (centre + shift).abs()
        deviation = torch.where(constant, 1.0, deviation)
        return cls((centre + shift).float(), deviation.float())

    def normalise(self, frames: Tensor) -> Tensor:
        """Shift and scale frames [..., D] to mean 0 and deviation 1 over the training set."""
        return (frames - self.mean.to(frames.device)) / self.deviation.to(frames.device)
