"""Changes of sound: each does what its settings say, and draws from a stream of its own."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from transduce.audio.augmentation import (
    Augmenter,
    SoundAugment,
    add_noise,
    band_limit,
    change_gain,
    change_speed,
    compress,
    fast_size,
    mu_law,
    narrow,
    reverberate,
    room_response,
)
from transduce.data.pairs import DataError

RATE = 16_000
KINDS = ("speed", "room", "noise", "gain", "band", "codec")


def noise_of(num_samples=RATE, seed=0, scale=0.1):
    draw = np.random.default_rng(seed)
    return (scale * draw.standard_normal(num_samples)).astype(np.float32)


def tone(hertz, seconds=1.0):
    return np.sin(2 * math.pi * hertz * np.arange(round(seconds * RATE)) / RATE).astype(np.float32)


def peak(samples):
    """Return the strongest frequency in hertz."""
    return np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples)


def decibels(ratio):
    return 10 * math.log10(ratio)


def energy_between(samples, low, high):
    hertz = np.fft.rfftfreq(len(samples), 1 / RATE)
    inside = (hertz >= low) & (hertz < high)
    return float((np.abs(np.fft.rfft(samples.astype(np.float64))) ** 2)[inside].sum())


@pytest.fixture
def noises(tmp_path):
    """A folder with a long noise in stereo at another rate, and a short one in a subfolder."""
    (tmp_path / "more").mkdir()
    stereo = np.stack([noise_of(5 * 8000, 1), noise_of(5 * 8000, 2)], 1)
    soundfile.write(tmp_path / "long.wav", stereo, 8000)
    soundfile.write(tmp_path / "more" / "short.flac", noise_of(RATE // 10, 3), RATE)
    (tmp_path / "licence.txt").write_text("not a sound")
    return tmp_path


@pytest.mark.parametrize("speed, length", [(0.9, 17_778), (1.0, 16_000), (1.1, 14_546)])
def test_speed_changes_the_duration_and_the_pitch(speed, length):
    changed = change_speed(tone(1000), speed)
    assert len(changed) == length and changed.dtype == np.float32
    assert peak(changed) == pytest.approx(1000 * speed, abs=2)


def test_gain_is_in_decibels():
    samples = noise_of()
    np.testing.assert_allclose(change_gain(samples, 20), 10 * samples, rtol=1e-6)
    np.testing.assert_allclose(change_gain(samples, -6.0206), samples / 2, rtol=1e-5)


@pytest.mark.parametrize("snr", [-5.0, 0.0, 12.5])
def test_noise_has_the_signal_to_noise_ratio_that_was_asked(snr):
    samples = tone(440)
    added = add_noise(samples, noise_of(), snr).astype(np.float64) - samples
    ratio = np.square(samples, dtype=np.float64).sum() / np.square(added).sum()
    assert decibels(ratio) == pytest.approx(snr, abs=0.01)


def test_silence_takes_no_noise_and_silent_noise_changes_nothing():
    silence, samples = np.zeros(RATE, np.float32), noise_of()
    assert not add_noise(silence, samples, 0.0).any()
    assert np.array_equal(add_noise(samples, silence, 0.0), samples)
    assert not reverberate(silence, room_response(0.3, 0.0, RATE, 0)).any()


@pytest.mark.parametrize("decay, below", [(0.2, 0.0), (0.6, 10.0)])
def test_the_response_of_a_room_decays_by_60_db_and_has_the_energy_that_was_asked(decay, below):
    response = room_response(decay, below, RATE, seed=5)
    echo = response[1:].astype(np.float64)
    assert response[0] == 1 and len(response) == round(decay * RATE)
    assert decibels(1 / np.square(echo).sum()) == pytest.approx(below, abs=0.01)
    tenth = len(echo) // 10
    first, last = np.square(echo[:tenth]).mean(), np.square(echo[-tenth:]).mean()
    assert decibels(first / last) == pytest.approx(54, abs=2)  # 0.9 of 60 dB


def test_reverberation_is_the_convolution_with_the_response_at_the_same_level():
    samples, response = noise_of(3000), room_response(0.05, 3.0, RATE, 1)
    found = reverberate(samples, response)
    expected = np.convolve(samples.astype(np.float64), response)[: len(samples)]
    expected *= math.sqrt(np.square(samples, dtype=np.float64).sum() / np.square(expected).sum())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("low, high", [(300, 3400), (0, 4000), (500, math.inf)])
def test_a_band_keeps_what_is_inside_and_removes_what_is_outside(low, high):
    samples = noise_of(4 * RATE)
    found = band_limit(samples, RATE, low, high)
    assert found.dtype == np.float32 and len(found) == len(samples)
    before, after = (energy_between(one, low, min(high, 8000)) for one in (samples, found))
    assert decibels(after / before) == pytest.approx(0, abs=0.1)
    for outside in ((0, 0.85 * low), (1.15 * high, 8000)):
        if outside[0] < outside[1]:
            before, after = (energy_between(one, *outside) for one in (samples, found))
            assert decibels(after / before) < -40


def test_narrow_sound_has_nothing_above_4_khz_and_its_length():
    samples = noise_of(RATE + 1)
    found = narrow(samples, RATE)
    assert len(found) == len(samples)
    assert energy_between(found, 4200, 8000) < 1e-4 * energy_between(samples, 4200, 8000)
    assert energy_between(found, 100, 3500) > 0.95 * energy_between(samples, 100, 3500)
    assert narrow(samples, 8000) is samples


def test_mu_law_has_256_levels_that_are_finer_near_zero():
    grid = np.linspace(-1.5, 1.5, 100_001, dtype=np.float32)
    levels = np.unique(mu_law(grid))
    assert len(levels) == 256 and levels[0] == -1 and levels[-1] == 1
    assert np.diff(levels).min() < 1e-3 < 0.03 < np.diff(levels).max()
    np.testing.assert_array_equal(mu_law(levels), levels)
    small = tone(440) / 100  # whose error would be 40 % of it on 256 equal steps
    assert np.abs(mu_law(small) - small).max() < 0.05 * np.abs(small).max()


@pytest.mark.parametrize("codec", ["mp3", "vorbis"])
def test_codecs_keep_the_length_and_most_of_the_sound(codec):
    samples = (tone(440) + tone(1300)) / 3
    found = compress(samples, RATE, codec, 0.9)
    assert found.dtype == np.float32 and len(found) == len(samples)
    error = np.square(found[800:-800] - samples[800:-800]).sum() / np.square(samples).sum()
    assert 1e-9 < error < 0.05


def test_sizes_of_transforms_have_small_factors():
    assert [fast_size(n) for n in (1, 7, 11, 17, 97, 160_001)] == [
        1,
        8,
        12,
        18,
        100,
        160_000 + 2000,
    ]


# --- Streams ------------------------------------------------------------------------------------


def all_kinds(noises):
    on = dict.fromkeys(KINDS, 1.0)
    codecs = ("mu_law", "narrow", "mp3", "vorbis")
    return SoundAugment(**on, noise_folder=noises, codecs=codecs)


def test_nothing_is_changed_by_default():
    wave = torch.from_numpy(noise_of())
    assert torch.equal(Augmenter(SoundAugment(), RATE, 0)(wave, 0, 0), wave)
    assert not SoundAugment().is_on


def test_the_same_seed_epoch_and_index_give_the_same_sound_and_others_another(noises):
    settings, wave = all_kinds(noises), torch.from_numpy(noise_of())
    first = Augmenter(settings, RATE, 7)
    kept = wave.clone()
    found = first(wave, 3, 11)
    assert torch.equal(wave, kept)  # the original is not overwritten
    first(wave, 4, 12)  # what was drawn before does not matter
    assert torch.equal(first(wave, 3, 11), found)
    assert torch.equal(Augmenter(settings, RATE, 7)(wave, 3, 11), found)
    others = [first(wave, 4, 11), first(wave, 3, 12), Augmenter(settings, RATE, 8)(wave, 3, 11)]
    assert all(not torch.equal(other, found) for other in others)


def test_a_kind_that_is_switched_on_does_not_change_what_the_others_draw(noises, monkeypatch):
    drawn = {}
    for kind in KINDS:
        name = f"_{kind}"

        def record(self, samples, draw, kind=kind):
            drawn.setdefault(kind, []).append((draw.random(), draw.getrandbits(20)))
            return samples

        monkeypatch.setattr(Augmenter, name, record)
    wave = torch.from_numpy(noise_of())
    alone = {}
    for kind in KINDS:
        settings = SoundAugment(**{kind: 0.5}, noise_folder=noises)
        for index in range(40):
            Augmenter(settings, RATE, 0)(wave, 1, index)
        alone[kind] = drawn.pop(kind)
        assert not drawn and 10 < len(alone[kind]) < 30
    for index in range(40):
        Augmenter(replace(all_kinds(noises), **dict.fromkeys(KINDS, 0.5)), RATE, 0)(wave, 1, index)
    assert drawn == alone
    assert len(set(map(tuple, alone.values()))) == len(KINDS)


def test_the_range_of_speeds_has_that_of_an_unchanged_sound():
    assert SoundAugment(slowest=0.8).speeds == (1.0, 1.0)  # no speed is changed
    assert SoundAugment(speed=0.1, slowest=0.8, fastest=0.9).speeds == (0.8, 1.0)
    assert SoundAugment(speed=0.1, slowest=1.2, fastest=1.3).speeds == (1.0, 1.3)


def test_amounts_are_within_their_bounds(noises):
    wave = torch.from_numpy(tone(440))
    speeds, gains = [], []
    for index in range(30):
        faster = Augmenter(SoundAugment(speed=1.0, slowest=0.8, fastest=0.95), RATE, 0)
        speeds.append(len(wave) / len(faster(wave, 0, index)))
        louder = Augmenter(SoundAugment(gain=1.0, lowest_gain=-10, highest_gain=-5), RATE, 0)
        gains.append(20 * math.log10(louder(wave, 0, index).abs().max() / wave.abs().max()))
    assert 0.799 < min(speeds) < 0.83 and 0.92 < max(speeds) < 0.951
    assert -10 <= min(gains) < -9 and -6 < max(gains) <= -5


def test_noise_comes_from_the_folder_at_any_rate_and_repeats_if_it_is_short(noises):
    settings = SoundAugment(noise=1.0, noise_folder=noises, lowest_snr=10.0, highest_snr=10.0)
    wave = torch.from_numpy(tone(440, 2.0))
    augmenter = Augmenter(settings, RATE, 0)
    assert [noise.path.name for noise in augmenter.noises] == ["long.wav", "short.flac"]
    kinds = set()
    for index in range(12):
        added = (augmenter(wave, 0, index) - wave).numpy()
        ratio = float((wave**2).sum() / np.square(added).sum())
        assert decibels(ratio) == pytest.approx(10, abs=0.01)
        repeats = np.allclose(added[: RATE // 10], added[RATE // 10 : RATE // 5], atol=1e-6)
        kinds.add(repeats)
    assert kinds == {True, False}


def test_a_folder_without_readable_noise_is_one_sentence(tmp_path):
    settings = SoundAugment(noise=1.0, noise_folder=tmp_path)
    with pytest.raises(DataError, match="has no sound files; known suffixes are"):
        Augmenter(settings, RATE, 0)
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"bad.wav: the noise cannot be read \(.*\); convert it"):
        Augmenter(settings, RATE, 0)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"speed": 1.5}, "speed must be a probability, not 1.5"),
        ({"slowest": 0.1}, "slowest and fastest must be between 0.5 and 2, not 0.1 and 1.1"),
        ({"fastest": 2.5}, "slowest and fastest must be between 0.5 and 2, not 0.9 and 2.5"),
        ({"lowest_snr": 30.0}, "lowest_snr must be at most highest_snr, 20.0, not 30.0"),
        ({"longest_decay": 100.0}, "must be between 0.01 and 10 seconds, not 0.1 and 100.0"),
        ({"lowest_gain": -1e6}, "lowest_gain must be between -100 and 100, not -1000000.0"),
        ({"noise": 0.5}, "noise needs a noise_folder; set it, or noise to 0"),
        ({"codec": 0.5, "codecs": ()}, "codec needs codecs to choose from"),
    ],
)
def test_impossible_settings_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SoundAugment(**wrong)


def test_settings_are_read_from_a_recipe_and_its_options(tmp_path):
    from transduce.training.recipe import read_recipe, recipe_toml

    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[train.sound]\nnoise = 0.3\nnoise_folder = "noises"\nspeed = 1\n')
    settings = read_recipe(recipe, {"train.sound.codecs": "mu_law,mp3", "train.sound.codec": "0.2"})
    assert settings.train.sound == SoundAugment(
        *(1.0, 0.9, 1.1),
        noise=0.3,
        noise_folder=Path(tmp_path / "noises"),
        codec=0.2,
        codecs=("mu_law", "mp3"),
    )
    recipe.write_text(recipe_toml(settings))
    assert read_recipe(recipe) == settings
