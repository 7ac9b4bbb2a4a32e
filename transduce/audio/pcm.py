"""Sound of 16 bits whose bytes come in pieces -> samples: raw PCM, or WAV."""

from __future__ import annotations

import codecs
import struct

import numpy as np

SAMPLE_BYTES = 2
PCM, EXTENSIBLE = 1, 0xFFFE  # format tags of WAV
# A program that writes WAV to a pipe does not know the length, and puts 0 or about the largest.
ENDLESS_BYTES = 0x7FFF0000
MOST_HEADER = 1 << 20  # bytes before the samples of a WAV
# The bytes at the start that are looked at for text: at least so many, because a few bytes of sound
# may be letters by chance, and at most so many.
TEXT_BYTES = 8, 512
OTHERS = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"RIFX": "RIFX", b"NIST": "NIST SPHERE"}


class RawPcm:
    """Little-endian samples of 16 bits and one channel; a piece may begin and end within one."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_whole(self) -> bool:
        """Whether the bytes so far end with a sample."""
        return not self._rest

    def accept(self, content: bytes) -> np.ndarray:
        """Take further bytes; return the samples that they complete, int16 [N]."""
        content = self._rest + content
        whole = len(content) // SAMPLE_BYTES * SAMPLE_BYTES
        self._rest = content[whole:]
        return np.frombuffer(content[:whole], dtype="<i2").astype(np.int16)


class PcmOrWav:
    """Raw PCM, or WAV if the bytes begin with its header, at one sample rate.

    Raise a ValueError for a WAV of another rate, width or number of channels, and for other kinds
    of sound files.
    """

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._pcm = RawPcm()
        self._header: bytearray | None = bytearray()  # until it is read
        self._chunk = 12  # where the next chunk of the header begins
        self._is_checked = False  # whether the format is ours
        self._left: int | None = None  # bytes of samples still to come; None: to the end

    def accept(self, content: bytes) -> np.ndarray:
        """Take further bytes; return the samples that they complete, int16 [N]."""
        if self._header is not None:
            self._header += content
            start = self._start_of_samples(self._header)
            if start is None:
                return np.empty(0, np.int16)
            content, self._header = bytes(self._header[start:]), None
        if self._left is not None:  # further chunks of a WAV file are not sound
            content = content[: self._left]
            self._left -= len(content)
        return self._pcm.accept(content)

    def finish(self) -> None:
        """Raise a ValueError if the sound ends within its header or within a sample."""
        if self._header:
            raise ValueError("the sound ends within its header; send all of it")
        if not self._pcm.is_whole:
            raise ValueError("the sound ends within a sample; send 16 bits for each")

    def _start_of_samples(self, header: bytearray) -> int | None:
        """Return where the samples begin; None if more of the header must come."""
        for magic, kind in OTHERS.items():
            if header.startswith(magic):
                raise ValueError(
                    f"the sound is of the format {kind}, not raw samples or WAV; "
                    "`transduce recognize -` reads whole files"
                )
        if len(header) < 4 and b"RIFF".startswith(bytes(header)):
            return None
        if not header.startswith(b"RIFF"):
            if _is_text(bytes(header)):
                raise ValueError(
                    "the sound begins as text does; send samples of 16 bits, raw or as WAV"
                )
            return 0
        if len(header) < 12:
            return None
        if header[8:12] != b"WAVE":
            raise ValueError("the sound begins as a RIFF file that is not WAV; send WAV, or raw")
        return self._start_of_data(header)

    def _start_of_data(self, header: bytearray) -> int | None:
        """Read the chunks of a WAV up to its samples, each once; return where these begin."""
        while self._chunk <= MOST_HEADER:
            start = self._chunk + 8
            if len(header) < start:
                return None
            name, size = struct.unpack_from("<4sI", header, self._chunk)
            if name == b"data":
                if not self._is_checked:
                    raise ValueError("the WAV has no format before its samples; write it again")
                self._left = size if 0 < size < ENDLESS_BYTES else None
                return start
            if size > MOST_HEADER:
                raise ValueError(f"the header of the WAV claims {size} bytes; write it again")
            if name == b"fmt ":
                if len(header) < start + min(size, 26):
                    return None
                self._check_format(header[start : start + size])
                self._is_checked = True
            self._chunk = start + size + size % 2
        raise ValueError("the WAV has no samples in its first megabyte; write it again")

    def _check_format(self, chunk: bytearray) -> None:
        """Raise a ValueError unless the format is ours."""
        if len(chunk) < 16:
            raise ValueError("the WAV's format is too short; write it again")
        tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
        if tag == EXTENSIBLE and len(chunk) >= 26:
            (tag,) = struct.unpack_from("<H", chunk, 24)
        if (tag, channels, rate, bits) != (PCM, 1, self.sample_rate, 16):
            kind = f"{bits} bits" if tag == PCM else f"{bits} bits that are not integers"
            count = f"{channels} channel{'s' if channels != 1 else ''}"
            wanted = self.sample_rate
            raise ValueError(
                f"the WAV has {rate} samples a second, {kind}, and {count}; send {wanted} "
                f"a second, 16 bits, one channel, as `arecord -f S16_LE -r {wanted} -c 1` does"
            )


def _is_text(content: bytes) -> bool:
    """Return whether the bytes of a sound's first piece are text; quiet samples have zeros."""
    least, most = TEXT_BYTES
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content[:most])
    except UnicodeDecodeError:
        return False
    return len(content) >= least and all(one.isprintable() or one.isspace() for one in text)
