"""States in bands of frames, against all ways to divide the frames among them."""

import numpy as np
import pytest
import torch
from hmms import CLASSES, SETTINGS, SYMBOLS, random_mixtures

from transduce.alignment import bands
from transduce.alignment.bands import Heard, boundary_statistics, state_ends
from transduce.alignment.phone_hmm import (
    ACOUSTIC_SCALE,
    REACH,
    STATES,
    TAIL,
    PhoneHMM,
    boundary_posterior,
    far_from_spans,
    median_and_quantiles,
    state_lattice,
)
from transduce.lattice.loss import best_alignment

PHONES, PAUSES = "AEP", [False, False, True]


def hard_hmm():
    """Return a model whose states are hard to tell apart."""
    generator = torch.Generator().manual_seed(0)
    alone = random_mixtures(13, 0.3, 3, generator)
    beside = random_mixtures(37, 0.3, 2, generator)
    return PhoneHMM(SYMBOLS, CLASSES, SETTINGS, torch.ones(39), alone, beside)


def planted(hmm, durations):
    """Draw frames near the means of the states; return these, the frames and their true spans."""
    generator = torch.Generator().manual_seed(1)
    states = hmm.state_sequence(PHONES, PAUSES)
    pairs = zip(states.alone, durations, strict=True)
    centres = torch.cat([hmm.alone.means[s, :1].expand(n, -1) for s, n in pairs])
    edges = np.cumsum([0, *durations])
    frames = centres + torch.randn(centres.shape, generator=generator)
    spans = [(float(edges[u]), float(edges[u + STATES])) for u in states.first]
    return states, frames, spans


def mixtures(hmm, states):
    return [
        (hmm.alone.densities, np.array(states.alone)),
        (hmm.beside.densities, np.array(states.beside)),
    ]


def assert_as_over_all_ways(hmm, states, frames, spans, limit):
    """Compare both kernels with the sums over all ways within `limit` spans."""
    heard = hmm._heard(states, spans, len(frames))
    found = boundary_statistics(frames.numpy(), mixtures(hmm, states), heard, ACOUSTIC_SCALE, TAIL)
    far = far_from_spans(states, limit, len(frames))
    median, low, high = median_and_quantiles(
        boundary_posterior(hmm.log_likelihoods(frames, states) - far)
    )
    assert found[0] == pytest.approx(median, abs=0.1)
    assert found[1].tolist() == low
    assert found[2].tolist() == high
    ends = state_ends(frames.numpy(), mixtures(hmm, states)[:1], heard)
    alone = hmm.alone.log_likelihoods(frames, states.alone) - far
    last, _ = best_alignment(*state_lattice(alone.double()))
    assert ends.tolist() == [t + u + 1 for u, t in enumerate(last)]


def test_bands_around_the_right_spans_change_nothing():
    hmm = hard_hmm()
    states, frames, spans = planted(hmm, [60, 9, 12, 8, 11, 9, 14, 30, 7, 8, 12, 90])
    assert_as_over_all_ways(hmm, states, frames, spans, spans)


@pytest.mark.parametrize("wrong", [lambda a, b: (a + 30, b + 30), lambda a, b: (a / 2, b / 2)])
def test_bands_in_wrong_places_become_wider(wrong, monkeypatch):
    monkeypatch.setattr(bands, "MARGIN", 2)
    hmm = hard_hmm()
    states, frames, spans = planted(hmm, [20, 9, 12, 8, 11, 9, 14, 30, 7, 8, 12, 20])
    spans = [wrong(*span) for span in spans]
    assert_as_over_all_ways(hmm, states, frames, spans, spans)


def test_a_phone_stays_within_reach_of_its_span():
    hmm = hard_hmm()
    states, frames, spans = planted(hmm, [20, 9, 12, 8, 11, 9, 14, 30, 7, 8, 12, 200])
    later = [(start + 100, end + 100) for start, end in spans]
    assert_as_over_all_ways(hmm, states, frames, later, later)
    heard = hmm._heard(states, later, len(frames))
    ends = state_ends(frames.numpy(), mixtures(hmm, states), heard)
    assert ends[0] >= later[0][0] - REACH > spans[0][0]


def test_spans_that_leave_no_way_bind_no_state():
    hmm = hard_hmm()
    states, frames, _ = planted(hmm, [90, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30])
    nowhere = [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    heard = Heard(hmm._heard(states, nowhere, len(frames)).spans, np.full(12, 1.0))
    anywhere = Heard(heard.spans, np.full(12, np.inf))
    found, wanted = (
        boundary_statistics(frames.numpy(), mixtures(hmm, states), one, ACOUSTIC_SCALE, TAIL)
        for one in (heard, anywhere)
    )
    assert found == pytest.approx(wanted)


def test_as_many_frames_as_states_leave_one_way():
    hmm = hard_hmm()
    states, frames, spans = planted(hmm, [1] * 12)
    heard = hmm._heard(states, spans, len(frames))
    found = boundary_statistics(frames.numpy(), mixtures(hmm, states), heard, ACOUSTIC_SCALE, TAIL)
    assert found.tolist() == [list(range(1, 12))] * 3
    ends = state_ends(frames.numpy(), mixtures(hmm, states), heard)
    assert ends.tolist() == list(range(1, 12))
