"""The frames of many sounds, which a GPU computes in few batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.audio.features import Features, Statistics

WINDOWS = 65_536  # computed at once, padding included: some kilobytes of memory each, against calls


@torch.no_grad()
def frames_of_sounds(
    features: Features, waves: Sequence[Tensor], statistics: Statistics | None = None
) -> list[Tensor | None]:
    """Compute the frames [T, D] of each sound of samples [N], on the device of `features`.

    Normalise them by the statistics, if there are any. Return None for a sound whose frames are not
    finite. On the CPU, where threads compute several sounds at a time, each is a batch by itself.
    """
    if features.weights.device.type != "cpu":
        return frames_together(features, waves, statistics)
    each = (_normalised(features(wave[None])[0][0], statistics) for wave in waves)
    return [frames if bool(frames.isfinite().all()) else None for frames in each]


@torch.no_grad()
def frames_together(
    features: Features, waves: Sequence[Tensor], statistics: Statistics | None = None
) -> list[Tensor | None]:
    """Do the same in few batches: copy all sounds at once, and pad those of similar length."""
    found: list[Tensor | None] = [None] * len(waves)
    device = features.weights.device
    sounds = _copies(waves, device)
    for indices in _batches(features, waves):
        num_samples = torch.tensor([len(waves[i]) for i in indices], device=device)
        padded = pad_sequence([sounds[i] for i in indices], batch_first=True)
        frames, num_frames = features(padded, num_samples)
        frames = _normalised(frames, statistics)
        finite = frames.isfinite().flatten(1).all(1)
        for i, its, length, is_finite in zip(
            indices, frames, num_frames.tolist(), finite.tolist(), strict=True
        ):
            found[i] = its[:length] if is_finite else None
    return found


def _normalised(frames: Tensor, statistics: Statistics | None) -> Tensor:
    return frames if statistics is None else statistics.normalise(frames)


def _copies(waves: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copy sounds to a device, all in one piece, from memory that the device reads directly."""
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        lengths = [len(wave) for wave in waves]
        whole = torch.empty(sum(lengths), pin_memory=on_gpu)
        torch.cat(list(waves), out=whole)
        return torch.split(whole.to(device, non_blocking=True), lengths)


def _batches(features: Features, waves: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of sounds of similar length, at most WINDOWS with padding, or one sound."""
    shift = features.settings.shift_samples
    left = sorted(range(len(waves)), key=lambda i: len(waves[i]))
    while left:
        longest = 1 + len(waves[left[-1]]) // shift
        batch = left[-max(1, WINDOWS // longest) :]
        del left[-len(batch) :]
        yield batch
