"""Conversion between sample rates, by a windowed sinc filter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUM_ZEROS = 24  # zeros of the sinc on either side: more make a steeper, longer filter
PASSBAND = 0.95  # share of the common band that passes; more needs a steeper filter
MAX_PHASES = 1000  # filters of one conversion: bounds the memory of unusual rates


class RateError(ValueError):
    """A pair of sample rates whose common divisor is too small to convert between them."""


def resample(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """Convert the samples [N] of `wave` from `rate` to `wanted` samples a second.

    Output n lies at input time n rate / wanted = n M / L in lowest terms. Outputs n, n + L,
    n + 2L, ... lie equally far from their nearest inputs, so one filter computes them all, moved
    by M inputs each time: a convolution with L output channels and stride M.
    """
    common = math.gcd(rate, wanted)
    M, L = rate // common, wanted // common
    if max(M, L) > MAX_PHASES:
        raise RateError(f"{rate} and {wanted} samples a second have too little in common")
    if M == L or len(wave) == 0:
        return wave
    band = PASSBAND * min(M, L)  # twice the highest frequency kept, in units of `common`
    reach = math.ceil(NUM_ZEROS * M / band)  # inputs on either side of an output
    inputs = torch.arange(-reach, reach + M, dtype=torch.float64) / M
    outputs = torch.arange(L, dtype=torch.float64) / L
    times = (band * (inputs - outputs[:, None])).clamp(-NUM_ZEROS, NUM_ZEROS)
    window = torch.cos(times * math.pi / (2 * NUM_ZEROS)).square()
    filters = torch.sinc(times) * window * band / M
    padded = torch.nn.functional.pad(wave, (reach, reach + M))
    phases = torch.nn.functional.conv1d(padded[None, None], filters[:, None].to(wave), stride=M)
    return phases[0].T.flatten()[: -(-len(wave) * L // M)].contiguous()
