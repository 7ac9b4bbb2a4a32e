"""Resampling: frequencies within both bands stay, higher ones vanish."""

import math

import pytest
import torch

from transduce.audio.resampling import RateError, resample

RATES = [(44_100, 16_000), (48_000, 16_000), (22_050, 16_000), (8_000, 16_000), (16_000, 11_025)]


def tone(hertz, rate, seconds=0.5):
    return torch.sin(2 * math.pi * hertz * torch.arange(round(rate * seconds)) / rate)


@pytest.mark.parametrize("rate, wanted", RATES)
@pytest.mark.parametrize("hertz", [0.5, 440, 3000])
def test_a_tone_is_the_same_tone_taken_at_other_times(rate, wanted, hertz):
    found, expected = resample(tone(hertz, rate), rate, wanted), tone(hertz, wanted)
    assert abs(len(found) - len(expected)) <= 1
    edge = wanted // 50  # the filter reaches beyond the ends of the tone
    inside = slice(edge, len(expected) - edge)
    assert (found[inside] - expected[inside]).abs().max() < 2e-3


@pytest.mark.parametrize("rate, wanted", [(44_100, 16_000), (48_000, 16_000)])
def test_what_the_new_rate_cannot_carry_is_gone(rate, wanted):
    found = resample(tone(10_000, rate), rate, wanted)
    assert found[320:-320].abs().max() < 2e-3


def test_the_length_is_as_many_as_fit():
    assert len(resample(torch.zeros(441), 44_100, 16_000)) == 160
    assert len(resample(torch.zeros(442), 44_100, 16_000)) == 161
    assert len(resample(torch.zeros(0), 44_100, 16_000)) == 0


def test_the_same_rate_leaves_the_wave():
    wave = torch.randn(100)
    assert torch.equal(resample(wave, 16_000, 16_000), wave)


def test_rates_with_too_little_in_common_are_refused():
    with pytest.raises(RateError, match="44101 and 16000 samples a second"):
        resample(torch.zeros(10), 44_101, 16_000)
