"""The second opinion of phones, against all ways through their states, and its part in a misfit."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hmms import SYMBOLS, D, random_hmm

from transduce.alignment.acoustics import phone_deficits
from transduce.alignment.boundaries import Boundaries
from transduce.alignment.phone_hmm import ACOUSTIC_SCALE, Edge
from transduce.alignment.result import ACOUSTIC, DOUBT, AlignedPhone, AlignedWord


def best_path(log_likelihoods):
    """Try all ways to divide frames [T, 3] among three states."""
    T = len(log_likelihoods)
    return max(
        sum(log_likelihoods[a:b, i].sum() for i, (a, b) in enumerate(pairwise((0, *way, T))))
        for way in combinations(range(1, T), 2)
    )


def test_a_deficit_is_the_lead_of_the_phone_that_fits_best():
    hmm = random_hmm()
    frames = torch.randn(12, D, generator=torch.Generator().manual_seed(3))
    first, last = 2, 9
    likelihoods = hmm.alone.log_likelihoods(frames[first:last], range(13)).double()
    scores = [float(best_path(likelihoods[:, 3 * i : 3 * i + 3])) for i in range(4)]
    scores.append(float(likelihoods[:, 12].sum()))  # silence
    spans = [(hmm.time(first), hmm.time(last))] * 4
    found = phone_deficits(hmm, frames, SYMBOLS, spans)
    wanted = [ACOUSTIC_SCALE * (max(scores) - own) / (last - first) for own in scores[:4]]
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_short_spans_and_spans_beyond_the_sound_have_three_frames():
    hmm = random_hmm()
    frames = torch.randn(8, D, generator=torch.Generator().manual_seed(4))
    end = hmm.time(8)
    found = phone_deficits(hmm, frames, ["A"] * 3, [(end, end), (end + 1, end + 2), (0.0, 0.0)])
    inside = phone_deficits(
        hmm, frames, ["A"] * 3, [(hmm.time(5), end)] * 2 + [(hmm.time(0), hmm.time(3))]
    )
    assert np.isfinite(found).all()
    assert found == pytest.approx(inside)


def test_other_phones_that_fit_better_make_a_word_fit_less():
    phone = AlignedPhone("A", Boundaries(Edge(0, 0, 0), Edge(1, 1, 1), 1.0))
    word = AlignedWord("a", (phone, phone), -12.0, ("B",))
    other = AlignedWord("a", (phone, phone), -12.0, ("B",), 1.2)
    assert word.misfit == 3.0 and word.doubtful and word.fits
    assert other.misfit == pytest.approx(3.0 + ACOUSTIC * 1.2 / 4) and not other.fits
    assert not AlignedWord("a", (phone, phone), -3.9 * DOUBT, ("B",)).doubtful
