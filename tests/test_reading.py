"""Sounds read in groups: on the CPU, and as for a GPU, whose frames are computed together."""

import json
import threading

import numpy as np
import pytest
import soundfile
import torch
from test_model import SOUND, Drawn, model_of
from torch.testing import assert_close

from transduce import SearchOptions
from transduce.audio import batched, windows
from transduce.audio.batched import frames_of_sounds, frames_together
from transduce.audio.features import SPECTROGRAM, Features, FeatureSettings, Statistics
from transduce.data.manifest import read_manifest
from transduce.data.pairs import DataError
from transduce.model import model as module
from transduce.model import reading, signature
from transduce.model.evaluate import evaluate
from transduce.model.reading import GroupSizes, Reader

RATE, GREEDY = 16_000, SearchOptions(with_timings=False)
pytestmark = pytest.mark.filterwarnings("ignore:max_labels_per_frame")  # models are not trained


def noise(num_samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(num_samples, generator=generator)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Read ahead, and compute the frames of a group together, on the CPU."""
    monkeypatch.setattr(reading.Reader, "_on_cpu", False)
    monkeypatch.setattr(signature, "frames_of_sounds", frames_together)


@pytest.fixture
def sounds(tmp_path):
    """Write sounds of different lengths, one of which is no sound, and one too short."""
    paths = [tmp_path / f"{n}.flac" for n in range(12)]
    for n, path in enumerate(paths):
        soundfile.write(path, noise(1500 + 700 * (n * 5 % 12), n).numpy(), RATE)
    paths[3].write_bytes(b"no sound")
    soundfile.write(paths[7], noise(300).numpy(), RATE)
    return paths


@pytest.mark.parametrize("settings", [FeatureSettings(), SPECTROGRAM], ids=["cepstra", "log_mel"])
@pytest.mark.parametrize("most", [1, 100, 10_000])
def test_sounds_together_have_the_frames_of_each_alone(monkeypatch, settings, most):
    monkeypatch.setattr(batched, "WINDOWS", most)
    features = Features(settings)
    statistics = Statistics(torch.full((settings.size,), 2.0), torch.full((settings.size,), 3.0))
    waves = [noise(n, n) for n in (5000, 100, 12_345, 400, 0, 5001)]
    alone = frames_of_sounds(features, waves, statistics)
    for frames, expected in zip(frames_together(features, waves, statistics), alone, strict=True):
        assert_close(frames, expected, atol=1e-4, rtol=0)
    assert [len(frames) for frames in alone] == [29, 0, 75, 1, 0, 29]


@pytest.mark.parametrize("compute", [frames_of_sounds, frames_together])
def test_a_sound_that_is_not_finite_has_no_frames_and_the_others_have(compute):
    waves = [noise(3000, n) for n in range(3)]
    waves[1][100] = torch.nan
    found = compute(Features(), waves)
    assert found[1] is None and [len(found[i]) for i in (0, 2)] == [17, 17]


def test_a_sound_file_is_opened_once(monkeypatch, sounds):
    opened, opener = [], soundfile.SoundFile._open
    monkeypatch.setattr(
        soundfile.SoundFile, "_open", lambda *rest: opened.append(rest) or opener(*rest)
    )
    [found] = model_of(SOUND).transcribe(sounds[:1], GREEDY)
    assert len(opened) == 1 and found.recording.sample_rate == RATE


def results(model, sources, **options):
    """Return the labels of each input, or its error, and the shares that `progress` was given."""
    shares = []
    found = model.transcribe(sources, GREEDY, progress=shares.append, **options)
    return [
        str(one) if isinstance(one, DataError) else (one.hypotheses[0].labels, one.recording)
        for one in found
    ], shares


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_groups_that_are_read_ahead_have_the_results_and_errors_of_each_alone(
    request, sounds, at_once
):
    model, samples = model_of(SOUND), noise(4000, 77)
    stereo = sounds[0].with_name("stereo.wav")
    soundfile.write(stereo, np.stack([noise(5000).numpy()] * 2, 1), 8000)
    frames = torch.zeros(9, 26)
    sources = [*sounds, samples, stereo, "missing.wav", frames, torch.tensor([0.0, torch.nan])]
    expected = results(model, sources)
    request.getfixturevalue("as_on_a_gpu")
    assert results(model, sources, at_once=at_once) == expected
    assert [n for n, one in enumerate(expected[0]) if isinstance(one, str)] == [3, 7, 14, 16]


def test_long_sound_is_read_ahead_in_windows(request, monkeypatch, tmp_path):
    for name, seconds in (("LONGEST", 1.0), ("SEARCHED", 0.5), ("REST", 0.2)):
        monkeypatch.setattr(windows, name, seconds)
    model, path = model_of(SOUND), tmp_path / "long.wav"
    soundfile.write(path, noise(5 * RATE).numpy(), RATE)
    sources = [path, noise(3 * RATE, 1), noise(RATE // 2, 2)]
    expected, shares = results(model, sources)
    assert len(shares) > 8 and sum(shares) == pytest.approx(3)
    request.getfixturevalue("as_on_a_gpu")
    for frames in (10, 100_000):  # a sound in several groups, and all in one
        monkeypatch.setitem(module.HELD_FRAMES, "cpu", frames)
        assert results(model, sources)[0] == expected


def test_one_group_is_read_while_another_is_searched(as_on_a_gpu, monkeypatch, set_num_threads):
    set_num_threads(1)
    monkeypatch.setitem(module.FIRST_INPUTS, "cpu", 4)
    sources, model = Drawn([noise(1000 + n, n) for n in range(40)]), model_of(SOUND)
    is_ahead, most = threading.Event(), []
    search = module.search_examples

    def wait_and_search(*arguments):
        searched = 4 * (len(most) + 1)
        is_ahead.wait(0.3)  # for the thread to read what it may
        most.append(sources.count - searched)
        return search(*arguments)

    monkeypatch.setattr(module, "search_examples", wait_and_search)
    assert len(list(model.transcribe(sources, GREEDY, at_once=4))) == 40
    # The next group, and two sounds that its thread reads ahead, and one as each is taken.
    assert most[0] >= 4 and max(most) <= 4 + 2


def test_a_caller_who_stops_early_leaves_no_thread(as_on_a_gpu):
    before = threading.active_count()
    found = model_of(SOUND).transcribe((noise(2000) for _ in range(3000)), GREEDY, at_once=2)
    next(found)
    found.close()
    assert threading.active_count() == before


def test_an_error_of_the_source_of_inputs_reaches_the_caller(as_on_a_gpu):
    def sources():
        yield noise(2000)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(model_of(SOUND).transcribe(sources(), GREEDY))


def test_an_evaluation_in_groups_is_that_of_all_pairs(request, monkeypatch, sounds):
    manifest, model = sounds[0].with_name("all.jsonl"), model_of(SOUND)
    lines = [{"audio_filepath": path.name, "text": "aa b aa"} for path in sounds]
    manifest.write_text("\n".join(map(json.dumps, lines)))
    pairs = read_manifest(manifest, SOUND.target_notation)
    with pytest.raises(DataError, match=r"3\.flac"):
        evaluate(model, pairs)
    skipped = [], []
    expected = evaluate(model, pairs, skipped=skipped[0])
    request.getfixturevalue("as_on_a_gpu")
    sizes = GroupSizes(3, 3, 1000)
    groups = Reader.groups
    monkeypatch.setattr(Reader, "groups", lambda self, given, _: groups(self, given, sizes))
    found = evaluate(model, pairs, skipped=skipped[1])
    assert found.bits_per_label == pytest.approx(expected.bits_per_label, rel=1e-5)
    assert found.detail == expected.detail
    assert [*map(str, skipped[1])] == [*map(str, skipped[0])] and len(skipped[0]) == 2
    with pytest.raises(DataError, match="no pair can be read"):
        evaluate(model, pairs[3:4], skipped=[])


def test_an_evaluation_refuses_a_sound_that_training_would_refuse(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(4000).numpy(), 8000)
    (tmp_path / "all.jsonl").write_text('{"audio_filepath": "a.wav", "text": "aa"}\n')
    pairs = read_manifest(tmp_path / "all.jsonl", SOUND.target_notation)
    with pytest.raises(DataError, match="has 8000 samples a second where 16000 are wanted"):
        evaluate(model_of(SOUND), pairs)
