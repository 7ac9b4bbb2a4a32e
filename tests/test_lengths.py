"""Numbers of frames from durations and headers: right, cached, and without decoding."""

import json

import numpy as np
import pytest
import soundfile

from transduce.audio import lengths
from transduce.audio.cache import FrameReader
from transduce.audio.features import FeatureSettings
from transduce.audio.lengths import num_frames_of
from transduce.data.manifest import Manifest
from transduce.data.pairs import Audio, Notation, Origin, Pair

CHARACTERS = Notation("characters", None)
SHERPA = FeatureSettings("sherpa", num_channels=20, num_deltas=0)


@pytest.fixture
def manifest(tmp_path):
    """Sounds with and without durations and offsets, frames, a missing file and a damaged one."""
    draw, lines = np.random.default_rng(0), []
    for i, suffix in enumerate(("wav", "flac", "opus")):
        samples = draw.standard_normal(16_000 + 1234 * i) / 10
        subtype = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
        soundfile.write(tmp_path / f"{i}.{suffix}", samples, 16_000, **subtype)
        lines.append({"audio_filepath": f"{i}.{suffix}"})
    lines.append({"audio_filepath": "0.wav", "duration": 1.0})
    lines.append({"audio_filepath": "0.wav", "duration": 0.25, "offset": 0.5})
    np.save(tmp_path / "frames.npy", np.zeros((17, 3), np.float32))
    lines.append({"features_filepath": "frames.npy"})
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    lines += [{"audio_filepath": "bad.wav"}, {"audio_filepath": "none.wav"}]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(line | {"text": "x"}) + "\n" for line in lines))
    return Manifest.open(path, CHARACTERS)


@pytest.mark.parametrize("settings", [FeatureSettings(), SHERPA], ids=["cepstra", "sherpa"])
def test_lengths_are_those_of_the_frames_and_nothing_is_decoded(manifest, settings, monkeypatch):
    reader = FrameReader(settings)
    expected = [len(reader(manifest[i])) for i in range(6)] + [1, 1]
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    assert num_frames_of(manifest, settings).tolist() == expected
    assert num_frames_of([manifest[i] for i in range(6)], settings).tolist() == expected[:6]


def test_headers_are_read_once_if_there_is_a_cache(manifest, tmp_path, monkeypatch):
    cache, settings = tmp_path / "cache", FeatureSettings()
    expected = num_frames_of(manifest, settings, cache).tolist()
    calls, read = [], lengths.read_sound_header
    monkeypatch.setattr(lengths, "read_sound_header", lambda one: calls.append(one) or read(one))
    assert num_frames_of(manifest, settings, cache).tolist() == expected
    assert not calls
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])  # a damaged file is replaced
    assert num_frames_of(manifest, settings, cache).tolist() == expected
    assert num_frames_of(manifest, FeatureSettings(shift=0.02), cache).tolist() != expected
    assert len(calls) == 8
    path = manifest.files[0]
    path.write_text(path.read_text().replace("1.flac", "0.wav"))
    found = num_frames_of(Manifest.open(path, CHARACTERS), settings, cache).tolist()
    assert found[1] == expected[0] != expected[1]


def test_a_stated_duration_is_taken_without_opening_the_file(tmp_path):
    sound = Audio(tmp_path / "none.wav", duration=2.0)
    pair = Pair("none", sound, ("x",), Origin(tmp_path / "m.jsonl", 1))
    assert num_frames_of([pair], FeatureSettings()).tolist() == [198]
