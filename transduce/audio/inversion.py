"""Log mel spectrograms -> samples: the phases by the algorithm of Griffin and Lim (1984)."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.audio.features import FeatureSettings, mel_filters, window_weights

ITERATIONS = 100  # of Griffin and Lim: more reach a sound whose spectrum is closer, and take longer
FILTER_ITERATIONS = 100  # that find the spectrum behind the filters
# Perraudin et al. (2013): each step goes beyond the projection by this share of the last step.
MOMENTUM = 0.99


def check_invertible(settings: FeatureSettings) -> None:
    """Raise ValueError unless the frames of some settings determine a spectrum."""
    if settings.kind != "log_mel" or settings.num_deltas:
        raise ValueError(
            f"frames of the kind {settings.kind} with {settings.num_deltas} deltas have no way "
            'back to sound; set data.features.kind to "log_mel" and data.features.num_deltas to 0'
        )


def log_mel_to_samples(frames: Tensor, settings: FeatureSettings, *, seed: int = 0) -> Tensor:
    """Return samples [N] in [-1, 1] whose log mel spectrogram is close to `frames` [T, channels].

    The phases begin at random, by `seed`. Sound beyond [-1, 1] is scaled down.
    """
    check_invertible(settings)
    N, shift = settings.window_samples, settings.shift_samples
    fft_size = 1 << (N - 1).bit_length()
    weights = window_weights(settings.convention.weighting, N)
    magnitudes = linear_power(frames, settings, fft_size).sqrt()
    draw = torch.Generator().manual_seed(seed)
    angles = 2 * torch.pi * torch.rand(magnitudes.shape, generator=draw, dtype=torch.float64)
    spectra = torch.polar(magnitudes, angles)
    before = torch.zeros_like(spectra)
    for _ in range(ITERATIONS):
        samples = _overlap_add(spectra, weights, shift)
        consistent = torch.fft.rfft(samples.unfold(0, N, shift) * weights, fft_size)
        ahead = consistent + MOMENTUM * (consistent - before)
        before = consistent
        spectra = torch.polar(magnitudes, ahead.angle())
    emphasised = _overlap_add(spectra, weights, shift)
    samples = _without_emphasis(emphasised, settings.pre_emphasis)
    samples = samples / settings.convention.sample_scale
    return (samples / samples.abs().max().clamp(min=1)).float()


def linear_power(frames: Tensor, settings: FeatureSettings, fft_size: int) -> Tensor:
    """Return a power spectrum [T, fft_size / 2 + 1] that the mel filters turn into e^frames.

    The multiplicative updates of Lee and Seung (2000) keep it from being negative, and those for
    the divergence weigh relative errors, which logarithms show.
    """
    mel = frames.double().cpu().clamp(max=60.0).exp()
    filters = mel_filters(settings, fft_size).double()
    least = torch.finfo(torch.float64).tiny
    shares = filters / filters.sum(0).clamp(min=least)
    power = mel @ shares.T
    for _ in range(FILTER_ITERATIONS):
        ratios = mel / (power @ filters).clamp(min=least)
        power = power * (ratios @ filters.T) / filters.sum(1).clamp(min=least)
    return power


def _overlap_add(spectra: Tensor, weights: Tensor, shift: int) -> Tensor:
    """Return the samples [N] whose weighted windows are nearest to the spectra [T, F]."""
    size = len(weights)
    windows = torch.fft.irfft(spectra)[:, :size] * weights
    places = (torch.arange(len(windows))[:, None] * shift + torch.arange(size)).flatten()
    total = windows.new_zeros(int(places[-1]) + 1)
    norm = torch.zeros_like(total)
    total.index_add_(0, places, windows.flatten())
    norm.index_add_(0, places, weights.square().repeat(len(windows)))
    samples: Tensor = total / norm.clamp(min=1e-8)
    return samples


def _without_emphasis(samples: Tensor, pre_emphasis: float) -> Tensor:
    """Undo x(n) - pre_emphasis x(n-1)."""
    numbers, last = samples.tolist(), 0.0
    for n, number in enumerate(numbers):
        last = numbers[n] = number + pre_emphasis * last
    return torch.tensor(numbers, dtype=samples.dtype)
