"""A recording of the page's microphone that the model hears while it grows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from transduce.audio.pcm import RawPcm
from transduce.model.model import Model
from transduce.model.utterances import Message, Utterances

BEAM_WIDTH = 4


class Recording:
    """The samples so far, and the stream that transcribes them.

    One thread at a time may add samples; others may read those that are there.
    """

    def __init__(self, model: Model, sample_rate: int, max_seconds: float) -> None:
        self.utterances = Utterances(model.stream(beam_width=BEAM_WIDTH))
        self.sample_rate, self.max_seconds = sample_rate, max_seconds
        self._pcm = RawPcm()
        self._parts: list[np.ndarray] = []

    def accept(self, content: bytes) -> Message | None:
        """Take samples of 16 bits; return a partial transcript if it says something new."""
        samples = self._pcm.accept(content)
        stream = self.utterances.stream
        if stream.seconds + len(samples) / self.sample_rate > self.max_seconds:
            raise ValueError(
                f"the recording is longer than {self.max_seconds:g} seconds; record a shorter one"
            )
        self._parts.append(samples)
        return self.utterances.partial(stream.accept(samples))

    def wave(self) -> Tensor:
        """Return the samples so far, [N] in [-1, 1]."""
        parts = list(self._parts)
        samples = np.concatenate(parts) if parts else np.empty(0, np.int16)
        return torch.from_numpy(samples.astype(np.float32) / 32768)
