"""From one number of samples a second to another, by a sinc under a window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ZEROS = 24  # of the sinc on either side, before the window ends
PASSED = 0.95  # of the band that both rates have; the rest is where the filter falls
MAX_PHASES = 1000  # of the filter: rates that have less in common need longer ones


def resample(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """The samples [N] of a wave, taken `wanted` instead of `rate` times a second.

    Output n lies at input time n rate / wanted = n M / L, the rates' common divisor taken out. So
    outputs n, n + L, n + 2L, ... have the same place between their inputs, and are one filter's,
    moved by M: a convolution of L channels with stride M.
    """
    common = math.gcd(rate, wanted)
    M, L = rate // common, wanted // common
    if max(M, L) > MAX_PHASES:
        raise ValueError(f"{rate} and {wanted} samples a second have too little in common")
    if M == L or len(wave) == 0:
        return wave
    band = PASSED * min(M, L)  # twice the highest frequency kept, in units of `common`
    reach = math.ceil(ZEROS * M / band)  # inputs on either side
    inputs = torch.arange(-reach, reach + M, dtype=torch.float64) / M
    outputs = torch.arange(L, dtype=torch.float64) / L
    times = (band * (inputs - outputs[:, None])).clamp(-ZEROS, ZEROS)
    window = torch.cos(times * math.pi / (2 * ZEROS)).square()
    filters = torch.sinc(times) * window * band / M
    padded = torch.nn.functional.pad(wave, (reach, reach + M))
    phases = torch.nn.functional.conv1d(padded[None, None], filters[:, None].to(wave), stride=M)
    return phases[0].T.flatten()[: -(-len(wave) * L // M)].contiguous()
