"""Log mel spectrograms turned back into sound."""

import math

import pytest
import torch

from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.audio.inversion import linear_power, log_mel_to_samples
from transduce.audio.outputs import FrameOutputs

SETTINGS = FeatureSettings("log_mel", 8000, window=0.04, num_channels=40, num_deltas=0)


def tones(seconds=0.5):
    """Return a sound whose harmonics glide, as a voice's do, with an envelope."""
    n = torch.arange(round(8000 * seconds)) / 8000
    pitch = 2 * math.pi * (140 * n + 30 * n.square())
    voice = sum(torch.sin(k * pitch) / k for k in range(1, 20))
    return 0.1 * voice * torch.sin(math.pi * n / seconds)


def frames_of(samples, settings=SETTINGS):
    return Features(settings)(samples[None])[0][0]


def test_the_sound_of_a_spectrogram_has_that_spectrogram():
    frames = frames_of(tones())
    again = frames_of(log_mel_to_samples(frames, SETTINGS))
    assert again.shape == frames.shape
    loud = frames > frames.max() - 10  # within 43 dB of the loudest
    assert (again - frames)[loud].abs().mean() < 0.3  # 1.3 dB
    wrong = frames_of(0.01 * torch.randn(4000, generator=torch.Generator().manual_seed(0)))
    assert (wrong - frames)[loud].abs().mean() > 1.5


def test_the_filters_of_the_linear_spectrum_give_the_mel_spectrum():
    frames = frames_of(tones())
    features = Features(SETTINGS)
    power = linear_power(frames, SETTINGS, features.fft_size)
    assert (power >= 0).all()
    again = (power @ features.filters.double()).log()
    assert (again - frames).abs().mean() < 0.05


def test_a_seed_gives_the_same_sound_and_silence_stays_silent():
    frames = frames_of(tones(0.1))
    assert torch.equal(*(log_mel_to_samples(frames, SETTINGS, seed=3) for _ in range(2)))
    silence = frames_of(torch.zeros(800))
    assert log_mel_to_samples(silence, SETTINGS).abs().max() < 1e-4


def test_loud_frames_are_scaled_into_the_range_of_samples():
    samples = log_mel_to_samples(frames_of(tones(0.1)) + 20, SETTINGS)
    assert samples.abs().max() == pytest.approx(1.0)
    assert torch.isfinite(log_mel_to_samples(torch.full((4, 40), 1e30), SETTINGS)).all()


@pytest.mark.parametrize("settings", [FeatureSettings(), FeatureSettings("log_mel")])
def test_frames_that_determine_no_spectrum_are_refused(settings):
    with pytest.raises(ValueError, match="have no way back to sound"):
        log_mel_to_samples(torch.zeros(3, settings.size), settings)


@pytest.mark.parametrize("stacking", [1, 2, 3])
def test_outputs_are_normalised_and_stacked_and_become_the_frames_again(stacking):
    frames = frames_of(tones(0.1))[:7]
    outputs = FrameOutputs(SETTINGS, Statistics.over([frames]), stacking)
    found = outputs.of_frames(frames)
    assert found.shape == (math.ceil(7 / stacking), outputs.size)
    again = outputs.to_frames(found)
    torch.testing.assert_close(again[:7], frames)
    assert (again[7:] == again[6]).all()  # the last frame, repeated
    assert outputs.shift == pytest.approx(0.01 * stacking)
