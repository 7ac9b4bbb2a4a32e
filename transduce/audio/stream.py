"""Samples that come in pieces -> frames x, bit for bit those of the whole sound."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.audio.features import Features, Statistics, append_deltas


class FrameStream:
    """The frames of one sound, normalised, as its samples come in.

    A frame is ready once its window is complete and, where there are deltas, the frames that they
    reach to the right.
    """

    def __init__(self, features: Features, statistics: Statistics) -> None:
        self.features, self.statistics = features, statistics
        self.num_samples = 0
        self._samples = torch.empty(0)  # from the start of the next window on
        self._skipped = 0  # samples between two windows that are still to come, if windows gap
        # Frames without deltas: those still to be returned, and what their deltas reach back to.
        self._static = torch.empty(0, features.settings.size // (1 + features.settings.num_deltas))
        self._first = 0  # the number of frames before them
        self._latest = torch.empty(0)  # the last window of samples, to mirror them at the end
        # The first samples, until there are enough to mirror them: None if that is done.
        self._beginning = torch.empty(0) if features.settings.convention.centred else None

    @torch.no_grad()
    def accept(self, samples: Tensor, *, is_last: bool = False) -> Tensor:
        """Take float32 samples [N] in [-1, 1]; return the frames [T, D] that are ready.

        The last piece of the sound gets all frames that are left.
        """
        settings = self.features.settings
        self.num_samples += len(samples)
        if settings.convention.centred:
            if is_last and self.num_samples < settings.window_samples:
                assert self._beginning is not None
                whole = torch.cat([self._beginning, samples])
                return self.statistics.normalise(self.features(whole[None])[0][0])
            self._latest = torch.cat([self._latest, samples])[-settings.window_samples :].clone()
            samples = self._mirrored(samples, is_last)
        skipped = min(self._skipped, len(samples))
        self._skipped -= skipped
        wave = torch.cat([self._samples, samples[skipped:]])
        if len(wave) >= settings.window_samples:
            new = self.features.static(wave[None])[0]
            used = len(new) * settings.shift_samples
            self._skipped += max(0, used - len(wave))
            wave = wave[used:].clone()
            self._static = torch.cat([self._static, new]) if len(self._static) else new
        self._samples = wave
        return self.statistics.normalise(self._with_deltas(is_last))

    def _mirrored(self, samples: Tensor, is_last: bool) -> Tensor:
        """Return the samples with the mirrored sound before the first and after the last one."""
        window, shift = self.features.settings.window_samples, self.features.settings.shift_samples
        before = window // 2 - shift // 2
        if self._beginning is not None:
            samples = torch.cat([self._beginning, samples])
            if len(samples) < window:
                self._beginning = samples
                return samples[:0]
            self._beginning, self._skipped = None, max(0, -before)
            samples = torch.cat([samples[: max(0, before)].flip(0), samples])
        if is_last:
            num_frames = self.features.settings.num_frames(self.num_samples)
            after = (num_frames - 1) * shift + window - before - self.num_samples
            if after > 0:
                samples = torch.cat([samples, self._latest[-after:].flip(0)])
        return samples

    def _with_deltas(self, is_last: bool) -> Tensor:
        """Return the frames whose deltas are complete; forget what no later delta reaches."""
        settings = self.features.settings
        reach, static = settings.lookahead, self._static
        behind = min(reach, self._first)  # frames at the start that were returned before
        number = len(static) - behind - (0 if is_last else reach)
        if number <= 0:
            return static.new_empty(0, settings.size)
        if reach == 0:  # there are no deltas
            self._static = static[:0]
            return static
        frames = append_deltas(static[None], torch.tensor([len(static)]), settings)[0]
        forgotten = max(0, behind + number - reach)
        self._static = static[forgotten:].clone()
        self._first += number
        return frames[behind : behind + number]
