"""Frames of sound in pieces, against those of the whole sound, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transduce.audio.features import SPECTROGRAM, Features, FeatureSettings, Statistics
from transduce.audio.stream import FrameStream

SETTINGS = {
    "cepstra": FeatureSettings(sample_rate=2000),
    "log mel": FeatureSettings("log_mel", 2000, num_deltas=0, num_channels=12),
    "two deltas": FeatureSettings(sample_rate=1000, num_deltas=2, delta_reach=3),
    "windows with gaps": FeatureSettings(sample_rate=1000, window=0.005, shift=0.012),
    "sherpa": FeatureSettings("sherpa", 2000, num_deltas=0, num_channels=12),
    "sherpa with deltas": FeatureSettings("sherpa_streaming", 1000, num_channels=9),
    "sherpa with gaps": FeatureSettings("sherpa", 2000, num_channels=12, window=0.02, shift=0.033),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_frames_that_are_compared_differ_from_each_other(name):
    frames = Features(SETTINGS[name])(torch.randn(1, 900) / 10)[0][0]
    assert len(frames) > 10 and bool((frames.std(0) > 0.01).all())


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=30, deadline=None)
@example(length=438, cuts=[])  # the end mirrors samples between two windows
@given(length=st.integers(0, 900), cuts=st.lists(st.integers(0, 900), max_size=30))
def test_any_pieces_give_the_frames_of_the_whole_sound(name, length, cuts):
    features = Features(SETTINGS[name])
    size = features.settings.size
    statistics = Statistics(torch.linspace(-3, 3, size), torch.linspace(1, 2, size))
    wave = torch.randn(length, generator=torch.Generator().manual_seed(length)) / 10
    stream, found = FrameStream(features, statistics), []
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    for first, last in pairwise(edges):
        found.append(stream.accept(wave[first:last]))
    found.append(stream.accept(wave[:0], is_last=True))
    whole = features(wave[None])[0][0]
    assert torch.equal(torch.cat(found), statistics.normalise(whole))
    assert stream.num_samples == length


def test_one_sample_at_a_time_gives_the_frames_of_the_whole_sound():
    features = Features(SETTINGS["cepstra"])
    statistics = Statistics(torch.zeros(26), torch.ones(26))
    wave = torch.randn(400) / 10
    stream = FrameStream(features, statistics)
    found = [stream.accept(sample[None]) for sample in wave]
    found.append(stream.accept(wave[:0], is_last=True))
    assert torch.equal(torch.cat(found), features(wave[None])[0][0])


def test_a_frame_does_not_depend_on_where_its_window_is():
    features, wave = Features(SPECTROGRAM), torch.randn(1, 16_000) / 10
    whole, _ = features(wave)
    for t in (0, 1, 15, 16, 17, 50, 97):
        alone, _ = features(wave[:, 160 * t : 160 * t + 400])
        assert torch.equal(alone[0, 0], whole[0, t])


def test_the_compiled_frames_are_as_exact_as_those_of_pytorch():
    """The root mean square of the errors is compared. The largest error is that of the logarithm of
    one energy near 0, which differs fivefold from one draw to the next, in both."""
    wave = torch.randn(1, 16_000) / 10
    for settings_ in (FeatureSettings(), SPECTROGRAM, FeatureSettings("sherpa", num_channels=40)):
        features = Features(settings_)
        exact = Features(settings_).double()(wave.double())[0]
        plain = features(wave.requires_grad_())[0].detach()  # by PyTorch's own operations
        found = features(wave.detach())[0]
        assert not torch.equal(found, plain)
        errors = [(frames - exact).square().mean().sqrt() for frames in (found, plain)]
        assert errors[0] <= 2 * errors[1]
