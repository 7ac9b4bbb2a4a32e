"""Samples -> frames x: cepstra (MFCC) as in the paper, or log mel spectrograms; normalisation.

The conventions are Kaldi's and HTK's: windows lie within the sound, each loses its mean and is
pre-emphasised, and samples have the scale of 16-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from transduce.data.pairs import DataError
from transduce.settings import check_at_most

MOST_FILTER_WEIGHTS = 100_000_000  # of the mel filter bank: a bound on its memory


@dataclass(frozen=True)
class FeatureSettings:
    """The kind and the parameters of frames. The defaults are the paper's, 26 numbers a frame."""

    kind: Literal["cepstra", "log_mel"] = "cepstra"
    sample_rate: int = 16_000  # samples a second
    window: float = 0.025  # seconds, weighted by a Hamming window
    shift: float = 0.010  # seconds from one window to the next
    pre_emphasis: float = 0.97
    num_channels: int = 26  # filters of the mel filter bank, from 0 to half the sample rate
    num_cepstra: int = 12  # besides the log energy; log_mel has neither
    lifter: float = 22.0  # scales the cepstra to similar sizes; 0: no scaling
    num_deltas: int = 1  # orders of time derivatives (deltas) to append
    delta_reach: int = 2  # frames on either side that a delta uses

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

    @property
    def size(self) -> int:
        """Return D, the numbers in a frame."""
        static = self.num_channels if self.kind == "log_mel" else self.num_cepstra + 1
        return static * (1 + self.num_deltas)

    @property
    def lookahead(self) -> int:
        """Return the frames to the right on which the deltas of a frame depend."""
        return self.num_deltas * self.delta_reach

    def as_spectrogram(self) -> FeatureSettings:
        """Return settings for a spectrogram of the same windows, to draw the sound."""
        return replace(self, kind="log_mel", num_channels=64, num_deltas=0)

    @property
    def window_samples(self) -> int:
        """Return the samples in a window."""
        return round(self.window * self.sample_rate)

    @property
    def shift_samples(self) -> int:
        """Return the samples from one window to the next."""
        return round(self.shift * self.sample_rate)


BLOCK = 16_384  # windows transformed at once: memory, some kilobytes each, against calls
SPECTROGRAM = FeatureSettings(kind="log_mel", num_channels=40, num_deltas=0)


class Features(nn.Module):
    """A module that computes the frames of a batch of sounds, on its own device."""

    hamming: Tensor
    filters: Tensor
    cosines: Tensor

    def __init__(self, settings: FeatureSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = settings or FeatureSettings()
        N = settings.window_samples
        self.fft_size = 1 << (N - 1).bit_length()
        self._tables: Any = None  # of the compiled kernels
        hamming = torch.hamming_window(N, periodic=False, dtype=torch.float64)
        for name, table in (
            ("hamming", hamming),
            ("filters", mel_filters(settings.num_channels, self.fft_size, settings.sample_rate)),
            ("cosines", _liftered_cosines(settings)),
        ):
            self.register_buffer(name, table.float(), persistent=False)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Return how many windows fit into `num_samples`."""
        settings = self.settings
        beyond = num_samples - settings.window_samples
        return torch.where(beyond < 0, 0, beyond // settings.shift_samples + 1)

    def forward(self, waves: Tensor, num_samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute frames [B, T, size] and their numbers [B] from samples [B, N] in [-1, 1].

        Ignore the samples beyond num_samples [B]; set the frames there to zero.
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
                    *(self.hamming, self.filters, self.cosines, self.fft_size, shift),
                    *(settings.pre_emphasis, settings.kind == "cepstra"),
                )
            return frames_of(waves.detach(), self._tables, 1 + (waves.shape[1] - length) // shift)
        windows = waves.unfold(1, length, shift)
        return torch.cat([self._static(block) for block in torch.split(windows, BLOCK, 1)], 1)

    def _static(self, windows: Tensor) -> Tensor:
        """Compute the frames of windows [B, T, window_samples] without deltas.

        They are log mel [B, T, num_channels], or log energy and cepstra [B, T, 1 + num_cepstra].
        """
        smallest = torch.finfo(windows.dtype).eps
        windows = 32768 * windows
        windows = windows - windows.mean(-1, keepdim=True)
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


def hertz_to_mel(hertz: Tensor) -> Tensor:
    """Convert frequencies to the mel scale."""
    return 1127 * (1 + hertz / 700).log()


def mel_filters(num_channels: int, fft_size: int, sample_rate: int) -> Tensor:
    """Return triangular filters [fft_size / 2 + 1, num_channels], equally wide in mel."""
    hertz = torch.arange(fft_size // 2 + 1, dtype=torch.float64) * sample_rate / fft_size
    top = hertz_to_mel(torch.tensor(sample_rate / 2, dtype=torch.float64))
    width = top / (num_channels + 1)
    peaks = width * torch.arange(1, num_channels + 1, dtype=torch.float64)
    return (1 - (hertz_to_mel(hertz)[:, None] - peaks).abs() / width).clamp(min=0)


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
