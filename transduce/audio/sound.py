"""Sound files to samples."""

from __future__ import annotations

import re
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from transduce.audio.resampling import resample
from transduce.data.pairs import Audio, Origin

NO_SUCH_FILE = 7  # libsndfile's SFE_BAD_FILE


def read_wave(
    audio: Audio, sample_rate: int, origin: Origin | None = None, *, convert: bool = False
) -> Tensor:
    """The samples [N] in [-1, 1] of a sound file: WAV, FLAC, Opus, NIST SPHERE and the like.

    One that has another sample rate, or several channels, is refused, because what a model learns
    from should be of one kind; with `convert` it is resampled, and the mean of its channels taken.

    What is wrong with it is a DataError that begins with `origin`, the line that names the file.
    """
    origin, path = origin or Origin(audio.path), audio.path
    if not path.is_file():
        raise origin.error(f"there is no file {path}; check the path")
    try:
        header = sphere_header(path)
        if header is not None and "shorten" in header.get("sample_coding", ""):
            raise origin.error(
                f"{path} is compressed by shorten; decompress it with `sph2pipe -f wav` or `sox`"
            )
        with soundfile.SoundFile(path) as file:
            rate = file.samplerate
            if rate != sample_rate and not convert:
                raise origin.error(
                    f"{path} has {rate} samples a second where {sample_rate} are "
                    f"wanted; convert it with `sox {path.name} -r {sample_rate} new.wav`"
                )
            if file.channels != 1 and not convert:
                raise origin.error(
                    f"{path} has {file.channels} channels; mix them into one with "
                    f"`sox {path.name} -c 1 new.wav`"
                )
            wanted = -1  # to the end
            if audio.start is not None:
                first = round(audio.start * rate)
                if first >= file.frames > 0:
                    raise origin.error(
                        f"{path} has {file.frames / rate:.2f} seconds, so that the offset "
                        f"{audio.start:.2f} is past its end; correct the offset"
                    )
                file.seek(min(first, file.frames))
                if audio.duration is not None:
                    wanted = round(audio.duration * rate)
            samples = file.read(wanted, dtype="float32", always_2d=True).mean(1)
    # A TypeError is for a .raw file, which does not say what is in it.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        reason = f" ({str(getattr(error, 'error_string', error)).rstrip('.')})"
        if getattr(error, "code", None) == NO_SUCH_FILE:  # it exists: this is said of a bad MP3
            reason = ""
        raise origin.error(
            f"{path} is not audio that can be read{reason}; record or convert it again"
        ) from None
    promised = audio.duration
    if header is not None and audio.start is None and header.get("sample_count", "").isdigit():
        promised = int(header["sample_count"]) / rate
    seconds = len(samples) / rate
    # A recording that stops early has lost what its transcript goes on to say.
    if promised is not None and seconds < 0.95 * promised - 0.1:
        raise origin.error(
            f"{path} ends after {seconds:.2f} of its {promised:.2f} seconds; copy it again"
        )
    try:
        return resample(torch.from_numpy(samples), rate, sample_rate)
    except ValueError as error:
        raise origin.error(
            f"{path}: {error}; convert it with `sox {path.name} -r {sample_rate} new.wav`"
        ) from None


def sphere_header(path: Path) -> dict[str, str] | None:
    """The fields of a NIST SPHERE file's header; None if it is another kind of file."""
    with path.open("rb") as file:
        magic, size = file.readline(8), file.readline(16)
        if magic.strip() != b"NIST_1A" or not size.strip().isdigit():
            return None
        header = file.read(int(size) - len(magic) - len(size))
    fields = {}
    for line in header.decode("latin-1").split("end_head")[0].splitlines():
        if found := re.match(r"(\S+) -(?:i|r|s\d+) (.*)", line):
            fields[found[1]] = found[2].strip()
    return fields
