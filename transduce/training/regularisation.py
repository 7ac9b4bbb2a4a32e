"""Regularisation: weight noise, averaged weights (EMA), and SpecAugment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from transduce.data.batches import Batch
from transduce.training.recipe import SpecAugment


@contextmanager
def weight_noise(
    weights: Sequence[Tensor], deviation: float, generator: torch.Generator
) -> Iterator[None]:
    """Add Gaussian noise to the weights; restore them exactly on exit.

    Each step draws new noise; in online training that is each sequence, as in the paper.
    """
    if deviation == 0:
        yield
        return
    clean = [tensor.detach().clone() for tensor in weights]
    with torch.no_grad():
        for tensor in weights:
            noise = torch.empty_like(tensor).normal_(0.0, deviation, generator=generator)
            tensor.add_(noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(weights, clean, strict=True):
                tensor.copy_(before)


class MovingAverage:
    """The exponential moving average (EMA) of the weights; the first steps decay faster."""

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.weights, self.decay = weights, decay
        self.tensors = [tensor.detach().clone() for tensor in weights]

    @torch.no_grad()
    def update(self, num_steps: int) -> None:
        """Add the weights after `num_steps` steps to the average."""
        # The lower decay of the first steps forgets the initial weights.
        share = 1 - min(self.decay, num_steps / (num_steps + 9))
        for average, weights in zip(self.tensors, self.weights, strict=True):
            average.lerp_(weights, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in place of the weights; restore the weights exactly on exit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, average in zip(self.weights, self.tensors, strict=True):
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)


def spec_augment(batch: Batch, settings: SpecAugment, copies: int = 1) -> Batch:
    """Stretch the frames of a batch, repeat it `copies` times, and mask bands by 0, the mean.

    All copies of an utterance are stretched alike in time; each has its own masks and its own
    stretch in frequency. Text is only repeated.
    """
    if batch.frames.ndim != 3:
        return batch.repeat(copies)
    batch = _stretch_time(batch, settings.time_stretch).repeat(copies)
    frames, num_frames = batch.frames, batch.num_frames
    if settings.frequency_stretch:
        frames = _stretch_frequency(frames, settings.frequency_stretch)
    B, T, D = frames.shape
    widest = (settings.time_share * num_frames).clamp(max=settings.time_width)
    masked = torch.zeros(B, T, D, dtype=torch.bool, device=frames.device)
    for _ in range(settings.time_masks):
        masked |= _bands(num_frames, widest, T)[:, :, None]
    for _ in range(settings.frequency_masks):
        size = torch.full_like(num_frames, D)
        masked |= _bands(size, size.clamp(max=settings.frequency_width), D)[:, None, :]
    return replace(batch, frames=frames.masked_fill(masked, 0.0))


def _stretch_time(batch: Batch, most: float) -> Batch:
    """Stretch each utterance in time by a random factor in 1 ± `most`; interpolate frames."""
    if most == 0:
        return batch
    frames, before = batch.frames, batch.num_frames
    factor = 1 + most * (2 * torch.rand(len(frames), device=frames.device) - 1)
    after = (before * factor).round().to(before.dtype).clamp(min=1)
    # The first and the last frame stay in their places.
    step = (before - 1) / (after - 1).clamp(min=1)
    at = torch.arange(int(after.max()), device=frames.device)
    here = at < after[:, None]
    places = torch.where(here, at * step[:, None], 0.0)
    below = torch.minimum(places.long(), before[:, None] - 1)
    above = torch.minimum(below + 1, before[:, None] - 1)
    share = (places - below)[..., None]
    rows = torch.arange(len(frames), device=frames.device)[:, None]
    between = frames[rows, below] * (1 - share) + frames[rows, above] * share
    return replace(batch, frames=between * here[..., None], num_frames=after)


def _stretch_frequency(frames: Tensor, most: float) -> Tensor:
    """Stretch each utterance's spectrum by a random factor in 1 ± `most`."""
    B, _, D = frames.shape
    factor = 1 + most * (2 * torch.rand(B, device=frames.device) - 1)
    at = torch.arange(D, device=frames.device)
    places = (at * factor[:, None]).clamp(max=D - 1)  # [B, D]: the source of each coefficient
    shares = (1 - (places[:, None, :] - at[:, None]).abs()).clamp(min=0)  # [B, from, to]
    return frames @ shares


def _bands(lengths: Tensor, widest: Tensor, size: int) -> Tensor:
    """Draw one band in each row, [B, size], at most `widest` wide and within the row's length."""
    drawn = torch.rand(2, len(lengths), device=lengths.device)
    width = (drawn[0] * (widest.floor() + 1)).floor()
    start = (drawn[1] * (lengths - width + 1)).floor()
    at = torch.arange(size, device=lengths.device)
    return (at >= start[:, None]) & (at < (start + width)[:, None])
