"""Frames of sound as the outputs of a network: normalised and stacked, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.audio.features import FeatureSettings, Statistics


@dataclass(frozen=True, eq=False)
class FrameOutputs:
    """How the frames of a sound become the outputs of a network that speaks."""

    features: FeatureSettings
    statistics: Statistics  # of the training set's frames
    stacking: int = 1  # consecutive frames in an output

    @property
    def size(self) -> int:
        """Return D, the numbers in an output."""
        return self.stacking * self.features.size

    @property
    def shift(self) -> float:
        """Return the seconds from one output to the next."""
        return self.stacking * self.features.shift

    def of_frames(self, frames: Tensor) -> Tensor:
        """Return the outputs [U, size] of frames [T, size of a frame].

        The last frame is repeated where the last output would have fewer than the others.
        """
        missing = -len(frames) % self.stacking
        whole = torch.cat([frames, frames[-1:].expand(missing, -1)])
        return self.statistics.normalise(whole).reshape(-1, self.size)

    def to_frames(self, outputs: Tensor) -> Tensor:
        """Return the frames [U * stacking, size of a frame] of outputs [U, size]."""
        frames = outputs.reshape(-1, self.features.size)
        mean, deviation = (x.to(frames) for x in (self.statistics.mean, self.statistics.deviation))
        return frames * deviation + mean
