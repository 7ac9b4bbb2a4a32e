"""Against learning the training set by heart: noise on the weights, masks on the frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from transduce.data.batches import Batch
from transduce.recipe import SpecAugment


@contextmanager
def weight_noise(
    weights: Sequence[Tensor], deviation: float, generator: torch.Generator
) -> Iterator[None]:
    """The weights with Gaussian noise added; afterwards they are what they were, to the last bit.

    Drawn for each step, it is drawn for each sequence in online training, as in the paper.
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


def spec_augment(batch: Batch, settings: SpecAugment) -> Tensor:
    """The batch's frames with bands set to 0, the mean; text is left alone."""
    frames = batch.frames
    if frames.ndim != 3:
        return frames
    B, T, D = frames.shape
    widest = (settings.time_share * batch.num_frames).clamp(max=settings.time_width)
    masked = torch.zeros(B, T, D, dtype=torch.bool, device=frames.device)
    for _ in range(settings.time_masks):
        masked |= _bands(batch.num_frames, widest, T)[:, :, None]
    for _ in range(settings.frequency_masks):
        size = torch.full_like(batch.num_frames, D)
        masked |= _bands(size, size.clamp(max=settings.frequency_width), D)[:, None, :]
    return frames.masked_fill(masked, 0.0)


def _bands(lengths: Tensor, widest: Tensor, size: int) -> Tensor:
    """One band in each row, [B, size]: up to so wide, and within the row's length."""
    drawn = torch.rand(2, len(lengths), device=lengths.device)
    width = (drawn[0] * (widest.floor() + 1)).floor()
    start = (drawn[1] * (lengths - width + 1)).floor()
    at = torch.arange(size, device=lengths.device)
    return (at >= start[:, None]) & (at < (start + width)[:, None])
