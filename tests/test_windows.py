"""Long sound: windows that end in pauses, and their transcripts as one."""

from itertools import pairwise, product

import numpy as np
import pytest
import soundfile
import torch

import transduce
from transduce.audio import windows
from transduce.audio.windows import quietest, sample_windows, sound_windows
from transduce.data.pairs import Audio, DataError, Origin, Pair
from transduce.decoding import Hypothesis, Timing
from transduce.decoding.hypothesis import join_hypotheses
from transduce.decoding.options import SearchOptions

RATE, STEP = 16_000, 0.03


@pytest.fixture(scope="module")
def recogniser():
    return transduce.load("english-phone-recogniser")


@pytest.fixture
def short_windows(monkeypatch):
    """Let windows have at most 4 seconds, and end in one of the last two."""
    for name, seconds in (("LONGEST", 4.0), ("SEARCHED", 2.0), ("REST", 0.5)):
        monkeypatch.setattr(windows, name, seconds)


def noise_with_pauses(seconds, pauses, rate=RATE):
    wave = np.random.default_rng(0).normal(0, 0.1, round(seconds * rate)).astype(np.float32)
    for start, end in pauses:
        wave[round(start * rate) : round(end * rate)] *= 0.01
    return wave


def test_the_quietest_moment_is_the_middle_of_a_pause():
    wave = noise_with_pauses(5, [(1.0, 1.2), (3.1, 3.6)])
    assert quietest(wave, RATE) == pytest.approx(3.35, abs=0.12)
    assert quietest(wave[:100], RATE) == 0


@pytest.mark.parametrize("rate", [16_000, 44_100, 11_025])
def test_windows_end_in_pauses_and_follow_each_other(tmp_path, short_windows, rate):
    middles = [3.0, 6.0, 8.6]
    path = tmp_path / "long.wav"
    wave = noise_with_pauses(11.0, [(t - 0.2, t + 0.2) for t in middles], rate)
    soundfile.write(path, wave, rate)
    found = list(sound_windows(Audio(path), STEP))
    assert [window.is_last for window in found] == [False, False, False, True]
    assert sum(window.share for window in found) == pytest.approx(1)
    parts = [window.sound for window in found]
    assert parts[0].start == 0 and parts[-1].start + parts[-1].duration == pytest.approx(11.0)
    for before, after in pairwise(parts):
        assert after.start == before.start + before.duration
        assert before.duration / STEP == pytest.approx(round(before.duration / STEP), abs=1e-6)
        assert 0.5 <= before.duration <= 4
    assert [part.start for part in parts[1:]] == pytest.approx(middles, abs=0.1)


def test_samples_have_the_windows_of_their_file(tmp_path, short_windows):
    wave = noise_with_pauses(11.0, [(2.8, 3.2), (5.5, 6.1), (8.6, 9.0)])
    soundfile.write(tmp_path / "long.wav", wave, RATE, subtype="FLOAT")
    of_file = [
        window.sound.duration for window in sound_windows(Audio(tmp_path / "long.wav"), STEP)
    ]
    of_samples = list(sample_windows(torch.from_numpy(wave), RATE, STEP))
    assert [len(window.sound) / RATE for window in of_samples] == pytest.approx(of_file)
    assert torch.equal(torch.cat([w.sound for w in of_samples]), torch.from_numpy(wave))


def test_short_sound_and_what_cannot_be_read_are_windows_by_themselves(tmp_path):
    soundfile.write(tmp_path / "short.wav", np.zeros(RATE), RATE)
    (tmp_path / "broken.wav").write_text("no sound")
    for name in ("short.wav", "broken.wav", "missing.wav"):
        audio = Audio(tmp_path / name)
        assert list(sound_windows(audio, STEP)) == [(audio, 1.0, True)]


def test_a_part_of_a_sound_has_windows_within_it(tmp_path, short_windows):
    soundfile.write(tmp_path / "long.wav", noise_with_pauses(20, []), RATE)
    parts = [w.sound for w in sound_windows(Audio(tmp_path / "long.wav", 2.0, 9.0), STEP)]
    assert parts[0].start == 2.0 and len(parts) > 1
    assert parts[-1].start + parts[-1].duration == pytest.approx(11.0)


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("kind", ["path", "pair", "samples"])
def test_the_transcript_of_long_sound_is_that_of_its_windows(
    tmp_path, short_windows, recogniser, kind
):
    path = tmp_path / "long.wav"
    soundfile.write(path, noise_with_pauses(11, [(2.8, 3.2), (5.5, 6.1), (8.6, 9.0)]), RATE)
    options = SearchOptions(beam_width=3, with_timings=True)
    step = recogniser.signature.features.shift * recogniser.config.pooling
    parts = [window.sound for window in sound_windows(Audio(path), step)]
    assert len(parts) == 4
    expected = list(recogniser.transcripts(parts, options))
    samples = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
    source = {"path": path, "pair": Pair("x", Audio(path), (), Origin(path)), "samples": samples}[
        kind
    ]
    shares = []
    [whole, again] = recogniser.transcribe([source, path], options, progress=shares.append)
    assert sum(shares) == pytest.approx(2) and len(shares) == 8
    assert whole.symbols == again.symbols == sum((one.symbols for one in expected), ())
    assert whole.seconds == pytest.approx(11.0)
    times = [
        (timing.frame + round(part.start / step), timing.confidence)
        for part, one in zip(parts, expected, strict=True)
        for timing in one.hypotheses[0].timings
    ]
    assert [(t.frame, t.confidence) for t in whole.hypotheses[0].timings] == times
    spans = whole.spans(whole.hypotheses[0])
    assert (
        all(a.end <= b.start + 1e-9 for a, b in pairwise(spans)) and spans[-1].end <= whole.seconds
    )


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_long_sound_has_as_many_outputs_as_asked_for(short_windows, recogniser):
    samples = noise_with_pauses(9, [])
    best = recogniser(samples, beam_width=3, n_best=3).hypotheses
    assert len({h.labels for h in best}) == 3
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_a_long_file_that_is_cut_off_is_an_error_and_the_next_is_read(
    tmp_path, short_windows, recogniser
):
    path = tmp_path / "long.flac"
    soundfile.write(path, noise_with_pauses(11, []), RATE)
    whole = path.read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) // 2])
    shares = []
    sources = [tmp_path / "cut.flac", path]
    options = SearchOptions(with_timings=True)
    [cut, fine] = recogniser.transcribe(sources, options, progress=shares.append)
    [alone] = recogniser.transcribe([path], options)
    assert isinstance(cut, DataError) and "cut.flac" in str(cut)
    assert fine.symbols == alone.symbols
    assert sum(shares) == pytest.approx(2)


def hypotheses(*log_probs, first=1):
    return [
        Hypothesis((n,), log_prob, log_prob, (n,), (Timing(n, n, n + 1, 0.5),))
        for n, log_prob in enumerate(log_probs, first)
    ]


def test_joined_hypotheses_are_the_best_combinations():
    earlier = hypotheses(-1.0, -1.5, -4.0)
    later = hypotheses(-0.1, -0.3, -3.0, first=4)
    found = join_hypotheses(earlier, later, 10, 4, length_normalised=False)
    sums = sorted((a.log_prob + b.log_prob for a, b in product(earlier, later)), reverse=True)
    assert [h.log_prob for h in found] == pytest.approx(sums[:4])
    assert found[0].labels == (1, 4) and found[0].frames == (1, 14)
    assert found[0].timings[1] == Timing(14, 14, 15, 0.5)
    halved = join_hypotheses(earlier, later, 10, 1, length_normalised=True)
    assert [h.score for h in halved] == pytest.approx([sums[0] / 2])


def test_joined_hypotheses_are_distinct():
    one, two, both = (
        Hypothesis(labels, -1.0 - len(labels), 0.0, ()) for labels in ((1,), (2,), (1, 2))
    )
    empty = Hypothesis((), -0.5, 0.0, ())
    found = join_hypotheses([one, both], [two, empty], 5, 9, length_normalised=False)
    assert sorted(h.labels for h in found) == [(1,), (1, 2), (1, 2, 2)]
    [same] = [h for h in found if h.labels == (1, 2)]
    assert same.log_prob == max(one.log_prob + two.log_prob, both.log_prob + empty.log_prob)


def test_of_equally_probable_joined_hypotheses_that_of_the_first_rank_is_kept():
    ones = [Hypothesis(labels, -1.0, -1.0, frames) for labels, frames in (((1,), (3,)), ((), ()))]
    found = join_hypotheses(ones, ones[::-1], 5, 4, length_normalised=False)
    assert [(h.labels, h.frames) for h in found] == [((1,), (3,)), ((1, 1), (3, 8)), ((), ())]
