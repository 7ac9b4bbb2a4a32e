"""Sound that a browser sends or plays: decoded from memory, bounded, never by a path."""

from __future__ import annotations

import io

import numpy as np
import soundfile
import torch
from torch import Tensor

from transduce.audio.resampling import resample

MAX_BYTES = 20_000_000  # of a file
MAX_SECONDS = 60
MAX_CHANNELS = 8
RATES = (1_000, 384_000)  # samples a second that a file may have


def decode_sound(content: bytes, name: str, sample_rate: int) -> Tensor:
    """The samples [N] in [-1, 1] of a sound file's bytes, in one channel at `sample_rate`.

    What cannot be used is a ValueError that names the file.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"the file {name} is larger than {MAX_BYTES // 10**6} MB; send a shorter part"
        )
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, channels = file.samplerate, file.channels
            if not RATES[0] <= rate <= RATES[1]:
                raise ValueError(
                    f"the file {name} has {rate} samples a second; convert it to {sample_rate}"
                )
            if channels > MAX_CHANNELS:
                raise ValueError(f"the file {name} has {channels} channels; mix them into one")
            if file.frames > MAX_SECONDS * rate:
                raise ValueError(
                    f"the file {name} is longer than {MAX_SECONDS} seconds; send a shorter part"
                )
            samples = file.read(dtype="float32", always_2d=True).mean(1)
    # A TypeError is for a kind of file that does not say what is in it.
    except (soundfile.SoundFileError, OSError, TypeError):
        raise ValueError(
            f"the file {name} is not sound that can be read; send a WAV, FLAC, Ogg or MP3 file"
        ) from None
    if not np.isfinite(samples).all():
        raise ValueError(f"the file {name} has samples that are not finite; convert it again")
    try:
        return resample(torch.from_numpy(samples), rate, sample_rate)
    except ValueError as error:  # of rates that nobody records at
        raise ValueError(f"the file {name}: {error}; convert it to {sample_rate}") from None


def encode_wav(wave: Tensor, sample_rate: int) -> bytes:
    """A WAV file of 16-bit samples, for a browser to play."""
    content = io.BytesIO()
    soundfile.write(content, wave.numpy(), sample_rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
