"""Boundaries of states in bands of frames, against the sum over all ways to divide the frames."""

import numpy as np
import pytest
import torch

from transduce.alignment import bands
from transduce.alignment.bands import boundary_statistics
from transduce.alignment.phone_hmm import (
    ACOUSTIC_SCALE,
    TAIL,
    PhoneHMM,
    _mean_and_quantiles,
    boundary_posterior,
)
from transduce.audio.features import FeatureSettings

SETTINGS = FeatureSettings(window=0.020, shift=0.005, num_deltas=2, delta_reach=3)
STATES = [12, 0, 1, 2, 9, 10, 11, 3, 4, 5, 12]


def random_hmm():
    """Return a model of four phones whose states are hard to tell apart."""
    generator = torch.Generator().manual_seed(0)
    shape = (13, 3, SETTINGS.size)
    means = 0.4 * torch.randn(shape, generator=generator)
    variances = 0.5 + torch.rand(shape, generator=generator)
    log_weights = torch.randn(13, 3, generator=generator).log_softmax(1)
    return PhoneHMM(
        tuple("ABCD"), SETTINGS, torch.ones(SETTINGS.size), means, variances, log_weights
    )


def planted(hmm, durations):
    """Draw frames near the means of STATES; return them and the true span of each state."""
    generator = torch.Generator().manual_seed(1)
    pairs = zip(STATES, durations, strict=True)
    centres = torch.cat([hmm.means[s, :1].expand(n, -1) for s, n in pairs])
    edges = np.cumsum([0, *durations])
    frames = centres + torch.randn(centres.shape, generator=generator)
    return frames, np.stack([edges[:-1], edges[1:]], 1).astype(float)


def whole(hmm, frames):
    """Return the mean and quantiles of every boundary over all ways to divide the frames."""
    posterior = boundary_posterior(hmm.log_likelihoods(frames, torch.tensor(STATES)))
    return _mean_and_quantiles(posterior)


def in_bands(hmm, frames, spans):
    return boundary_statistics(
        frames.numpy(), hmm.densities, np.array(STATES), spans, ACOUSTIC_SCALE, TAIL
    )


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], abs=1e-2)
    assert found[1].tolist() == wanted[1]
    assert found[2].tolist() == wanted[2]


def test_bands_around_the_right_spans_change_nothing():
    hmm = random_hmm()
    frames, spans = planted(hmm, [60, 9, 12, 8, 30, 11, 9, 14, 7, 8, 90])
    assert_same(in_bands(hmm, frames, spans), whole(hmm, frames))


@pytest.mark.parametrize("wrong", [lambda s: s + 70, lambda s: 0 * s, lambda s: s[:, :1] / 4 + s])
def test_bands_in_wrong_places_become_wider(wrong, monkeypatch):
    monkeypatch.setattr(bands, "MARGIN", 2)
    hmm = random_hmm()
    frames, spans = planted(hmm, [20, 9, 12, 8, 30, 11, 9, 14, 7, 8, 20])
    assert_same(in_bands(hmm, frames, wrong(spans)), whole(hmm, frames))


def test_as_many_frames_as_states_leave_one_way():
    hmm = random_hmm()
    frames, spans = planted(hmm, [1] * len(STATES))
    mean, low, high = in_bands(hmm, frames, spans)
    assert mean.tolist() == low.tolist() == high.tolist() == list(range(1, len(STATES)))
