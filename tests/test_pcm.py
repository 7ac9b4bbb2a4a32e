"""Raw sound and WAV that come in pieces."""

import io
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from explored import RATE, sound, wav_bytes

from transduce.audio import pcm
from transduce.audio.pcm import PcmOrWav, RawPcm

SAMPLES = (32767 * sound(0.05)[:, 0]).astype("<i2")
JUNK = b"junk" + (992).to_bytes(4, "little") + bytes(992)


def wav(samples=SAMPLES, rate=RATE, size=None, after=b""):
    """Return a WAV whose header claims `size` bytes of samples, with a further chunk or two."""
    data = samples.tobytes()
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # chunks have even lengths
    claimed = len(data) if size is None else size
    header = b"RIFF" + struct.pack("<I", 0) + b"WAVE" + odd
    return (
        header
        + b"fmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", claimed)
        + data
        + after
    )


def read(content, piece, rate=RATE):
    """Read the samples of bytes that come in pieces of one length."""
    reader = PcmOrWav(rate)
    parts = [reader.accept(content[i : i + piece]) for i in range(0, len(content), piece)]
    reader.finish()
    return np.concatenate(parts)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000, 10_000])
@pytest.mark.parametrize(
    "content",
    [
        SAMPLES.tobytes(),
        wav(),
        wav(after=b"LIST\4\0\0\0more"),
        wav(size=0),
        wav(size=0xFFFFFFFF),
        wav_bytes(SAMPLES, subtype="PCM_16"),
    ],
    ids=["raw", "wav", "a chunk after", "no length", "any length", "libsndfile"],
)
def test_any_pieces_give_the_samples(content, piece):
    found = read(content, piece)
    assert found.dtype == np.int16 and np.array_equal(found, SAMPLES)


def test_the_extensible_format_is_read():
    content = io.BytesIO()
    soundfile.write(content, SAMPLES, RATE, format="WAVEX", subtype="PCM_16")
    assert np.array_equal(read(content.getvalue(), 5), SAMPLES)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loudest", [0, 1, 20, 1000, 32767])
def test_noise_of_any_level_is_not_text(loudest, seed):
    noise = np.random.default_rng(seed).integers(-loudest, loudest, 160, "<i2", endpoint=True)
    assert np.array_equal(read(noise.tobytes(), 320), noise)


def test_each_chunk_of_a_header_is_read_once(monkeypatch):
    places = []

    def unpack_from(form, content, place=0):
        places.append(place)
        return struct.unpack_from(form, content, place)

    monkeypatch.setattr(pcm, "struct", SimpleNamespace(unpack_from=unpack_from))
    content = wav().replace(b"data", 1000 * b"JUNK\0\0\0\0" + b"data", 1)
    assert np.array_equal(read(content, 16), SAMPLES)
    assert len(places) < 1010  # there are 1003; that of the format waits until it is whole


@pytest.mark.parametrize("piece", [1000, 4096, 10_000_000])
def test_samples_begin_within_a_megabyte_whatever_the_pieces(piece):
    before, within, beyond = wav().partition(b"data")[0], 1020 * JUNK, 1050 * JUNK
    assert np.array_equal(read(before + within + wav()[len(before) :], piece), SAMPLES)
    with pytest.raises(ValueError, match="no samples in its first megabyte"):
        read(before + beyond + wav()[len(before) :], piece)


@pytest.mark.parametrize(
    "content, said",
    [
        (wav(rate=8000), "has 8000 samples a second, 16 bits, and 1 channel; send 16000"),
        (wav_bytes(sound(channels=2), subtype="PCM_16"), "16 bits, and 2 channels; send"),
        (wav_bytes(sound(), subtype="PCM_U8"), "8 bits, and 1 channel; send"),
        (wav_bytes(sound(), subtype="FLOAT"), "32 bits that are not integers"),
        (b"fLaC" + bytes(100), "the sound is of the format FLAC, not raw samples or WAV"),
        (b"OggS" + bytes(100), "of the format Ogg"),
        (b"RIFF\0\0\0\0AVI " + bytes(100), "RIFF file that is not WAV"),
        (b"RIFF\0\0\0\0WAVEdata" + bytes(100), "no format before its samples"),
        (b"RIFF\0\0\0\0WAVEfmt \4\0\0\0" + bytes(100), "format is too short"),
        (b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\x7f" + bytes(100), "claims 2147483647 bytes"),
        (b"RIFF\0\0\0\0WAVE" + 1500 * JUNK, "no samples in its first megabyte"),
        (b"hello\nworld\n", "begins as text does; send samples of 16 bits, raw or as WAV"),
        ("Gr\u00fc\u00dfe ".encode() * 1000, "begins as text does"),
        (wav()[:30], "ends within its header"),
        (SAMPLES.tobytes()[:-1], "ends within a sample"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_sound_is_refused_in_a_sentence(content, said):
    with pytest.raises(ValueError) as refused:
        read(content, 4096)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_raw_samples_may_be_divided():
    pcm = RawPcm()
    assert list(pcm.accept(b"\1\0\2")) == [1] and not pcm.is_whole
    assert list(pcm.accept(b"\0\xff\xff")) == [2, -1] and pcm.is_whole
