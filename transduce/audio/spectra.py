"""Windows of sound to log mel energies or cepstra on the CPU, compiled by Numba.

A group of windows goes through all steps side by side, a window in each lane of the vectors, so
that its numbers stay in the cache. Every lane takes the same operations in the same order: a frame
depends on its own window alone, to the last bit, wherever the window is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.simd.functions import log
from transduce.kernels.simd.options import compiled

LANES = 16  # windows of a group: two AVX2 registers, or one of AVX-512


class Tables(NamedTuple):
    """The constants of the transform from windows of N samples to frames, in float32."""

    hamming: np.ndarray  # [N], times the scale of samples
    cosine: np.ndarray  # [fft_size / 2], of the angles -2 pi k / fft_size
    sine: np.ndarray  # [fft_size / 2]
    filters: np.ndarray  # [bins, channels]
    first: np.ndarray  # [channels], the first bin of each filter that is not zero
    last: np.ndarray  # [channels], and the one after the last
    cosines: np.ndarray  # [channels, cepstra]
    shift: int
    pre_emphasis: np.float32
    as_cepstra: bool


def tables(
    hamming: Tensor,
    filters: Tensor,
    cosines: Tensor,
    fft_size: int,
    shift: int,
    pre_emphasis: float,
    as_cepstra: bool,
) -> Tables:
    """Collect the constants of `frames_of`."""
    angles = -2 * math.pi * np.arange(fft_size // 2) / fft_size
    dense = filters.numpy()
    inside = dense > 0
    first = np.where(inside.any(0), inside.argmax(0), 0)
    last = np.where(inside.any(0), len(dense) - inside[::-1].argmax(0), 0)
    return Tables(
        hamming.numpy(),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        *(dense, first, last, cosines.numpy(), shift, np.float32(pre_emphasis), as_cepstra),
    )


def frames_of(waves: Tensor, constants: Tables, num_frames: int) -> Tensor:
    """Return the first `num_frames` frames [B, T, D] of samples [B, N], without deltas."""
    channels, num_cepstra = constants.cosines.shape
    size = 1 + num_cepstra if constants.as_cepstra else channels
    frames = torch.empty(len(waves), num_frames, size)
    _frames(waves.contiguous().numpy(), constants, frames.numpy())
    return frames


@compiled
def _frames(waves, tables, frames):
    half, N = tables.cosine.size, tables.hamming.size
    x = np.empty((N, LANES), np.float32)
    re, im, re_next, im_next = (
        np.empty((half, LANES), np.float32), np.empty((half, LANES), np.float32),
        np.empty((half, LANES), np.float32), np.empty((half, LANES), np.float32),
    )  # fmt: skip
    power = np.empty((half + 1, LANES), np.float32)
    log_mel = np.empty((tables.first.size, LANES), np.float32)
    for b in range(waves.shape[0]):
        for t in range(0, frames.shape[1], LANES):
            number = min(LANES, frames.shape[1] - t)
            _load(waves[b, t * tables.shift :], number, tables.shift, x)
            log_energy = _centre(x)
            _emphasise(x, tables, re, im)
            _transform(tables, re, im, re_next, im_next)
            _powers(tables, re, im, power)
            _filter(tables, power, log_mel)
            _store(tables, number, log_energy, log_mel, frames[b, t : t + number])


@compiled
def _load(wave, number, shift, x):
    """Copy windows into the lanes, in the scale of 16-bit integers; lanes that are left repeat."""
    scale = np.float32(32768)
    for lane in range(LANES):
        start = min(lane, number - 1) * shift
        for n in range(x.shape[0]):
            x[n, lane] = scale * wave[start + n]


@compiled
def _centre(x):
    """Subtract the mean of each window; return ln of its energy."""
    total, energy = np.zeros(LANES, np.float64), np.zeros(LANES, np.float64)
    for n in range(x.shape[0]):
        for lane in range(LANES):
            total[lane] += x[n, lane]
    mean = np.empty(LANES, np.float32)
    for lane in range(LANES):
        mean[lane] = total[lane] / x.shape[0]
    for n in range(x.shape[0]):
        for lane in range(LANES):
            x[n, lane] -= mean[lane]
            energy[lane] += np.float64(x[n, lane]) * x[n, lane]
    result = np.empty(LANES, np.float32)
    for lane in range(LANES):
        result[lane] = energy[lane]
    _log(result)
    return result


@compiled
def _log(x):
    """Replace energies by their logarithms; NaN and infinity stay."""
    smallest, largest = np.float32(np.finfo(np.float32).eps), np.float32(np.finfo(np.float32).max)
    for lane in range(LANES):
        energy = x[lane]
        log_energy = log(max(energy, smallest))
        x[lane] = log_energy if energy <= largest else energy


@compiled
def _emphasise(x, tables, re, im):
    """Pre-emphasise and weight the windows; write them as complex numbers of two samples each."""
    hamming, pre_emphasis = tables.hamming, tables.pre_emphasis
    N = hamming.size
    re[:], im[:] = 0, 0
    for n in range(N):
        row = re[n // 2] if n % 2 == 0 else im[n // 2]
        here, before, weight = x[n], x[max(0, n - 1)], hamming[n]
        for lane in range(LANES):
            row[lane] = (here[lane] - pre_emphasis * before[lane]) * weight


@compiled
def _transform(tables, re, im, re_next, im_next):
    """Replace complex numbers by their discrete Fourier transform (Stockham's algorithm)."""
    half, stride, even = tables.cosine.size, 1, True
    length = half
    while length > 1:
        if even:
            _pass(tables, length, stride, re, im, re_next, im_next)
        else:
            _pass(tables, length, stride, re_next, im_next, re, im)
        even = not even
        length //= 2
        stride *= 2
    if not even:
        re[:], im[:] = re_next, im_next


@compiled
def _pass(tables, length, stride, re, im, re_next, im_next):
    """Take one pass of radix 2 over transforms of `length` numbers each."""
    middle = length // 2
    for p in range(middle):
        c, s = tables.cosine[2 * p * stride], tables.sine[2 * p * stride]
        for q in range(stride):
            a, b = q + stride * p, q + stride * (p + middle)
            low, high = q + stride * 2 * p, q + stride * (2 * p + 1)
            for lane in range(LANES):
                re_a, re_b, im_a, im_b = re[a, lane], re[b, lane], im[a, lane], im[b, lane]
                re_next[low, lane] = re_a + re_b
                im_next[low, lane] = im_a + im_b
                d, e = re_a - re_b, im_a - im_b
                re_next[high, lane] = d * c - e * s
                im_next[high, lane] = d * s + e * c


@compiled
def _powers(tables, re, im, power):
    """Compute the power spectrum of the samples from the transform of their pairs."""
    half, half_of = tables.cosine.size, np.float32(0.5)
    for lane in range(LANES):
        total, difference = re[0, lane] + im[0, lane], re[0, lane] - im[0, lane]
        power[0, lane], power[half, lane] = total * total, difference * difference
    for k in range(1, half):
        c, s = tables.cosine[k], tables.sine[k]
        for lane in range(LANES):
            even_re = half_of * (re[k, lane] + re[half - k, lane])
            even_im = half_of * (im[k, lane] - im[half - k, lane])
            odd_re = half_of * (im[k, lane] + im[half - k, lane])
            odd_im = half_of * (re[half - k, lane] - re[k, lane])
            real = even_re + (odd_re * c - odd_im * s)
            imaginary = even_im + (odd_re * s + odd_im * c)
            power[k, lane] = real * real + imaginary * imaginary


@compiled
def _filter(tables, power, log_mel):
    """Compute ln of the energy in each filter."""
    for channel in range(tables.first.size):
        row = log_mel[channel]
        row[:] = 0
        for k in range(tables.first[channel], tables.last[channel]):
            weight = tables.filters[k, channel]
            for lane in range(LANES):
                row[lane] += weight * power[k, lane]
        _log(row)


@compiled
def _store(tables, number, log_energy, log_mel, frames):
    """Write the frames of a group: log mel energies, or log energy and cepstra."""
    if not tables.as_cepstra:
        for t in range(number):
            for channel in range(frames.shape[1]):
                frames[t, channel] = log_mel[channel, t]
        return
    sums = np.empty(LANES, np.float32)
    for t in range(number):
        frames[t, 0] = log_energy[t]
    for i in range(frames.shape[1] - 1):
        sums[:] = 0
        for channel in range(log_mel.shape[0]):
            weight = tables.cosines[channel, i]
            for lane in range(LANES):
                sums[lane] += weight * log_mel[channel, lane]
        for t in range(number):
            frames[t, 1 + i] = sums[t]
