"""Decode the sound files that a client sends, from memory and within limits."""

from __future__ import annotations

import io

import soundfile
from torch import Tensor

from transduce.audio.resampling import RateError
from transduce.audio.sound import UnreadableSound, decode

MAX_CHANNELS = 8
RATES = (1_000, 384_000)  # the lowest and the highest sample rate


def decode_sound(
    content: bytes, name: str, sample_rate: int, *, max_bytes: int, max_seconds: float
) -> Tensor:
    """Decode the bytes of a sound file to samples [N] in [-1, 1] at `sample_rate`.

    Average its channels. Raise a ValueError that names the file if it exceeds a limit, cannot be
    decoded, or has samples that are not finite.
    """
    if len(content) > max_bytes:
        raise ValueError(
            f"the file {name} is larger than {max_bytes // 10**6} MB; send a shorter part"
        )

    def check(sound: soundfile.SoundFile) -> None:
        rate = sound.samplerate
        if not RATES[0] <= rate <= RATES[1]:
            raise ValueError(
                f"the file {name} has {rate} samples a second; convert it to {sample_rate}"
            )
        if sound.channels > MAX_CHANNELS:
            raise ValueError(f"the file {name} has {sound.channels} channels; mix them into one")
        if sound.frames > max_seconds * rate:
            raise ValueError(
                f"the file {name} is longer than {max_seconds:g} seconds; send a shorter part"
            )

    try:
        wave = decode(io.BytesIO(content), sample_rate, check)
    except UnreadableSound:
        raise ValueError(
            f"the file {name} is not sound that can be read; send a WAV, FLAC, Ogg or MP3 file"
        ) from None
    except RateError as error:
        raise ValueError(f"the file {name}: {error}; convert it to {sample_rate}") from None
    if not wave.isfinite().all():
        raise ValueError(f"the file {name} has samples that are not finite; convert it again")
    return wave
