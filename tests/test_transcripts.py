"""Transcripts as text, JSON and TextGrids."""

import json
import re
from itertools import pairwise

import pytest

from transduce import Alphabet, Hypothesis, Timing
from transduce.model.transcripts import Transcript, json_lines

PHONES = Alphabet(["AA", "B", '"'])
BEST = Hypothesis(
    (1, 2, 2, 3),
    -0.5,
    -0.125,
    (2, 5, 5, 9),
    (Timing(2, 1, 3, 0.9), Timing(5, 5, 5, 0.8), Timing(5, 5, 6, 0.7), Timing(9, 8, 9, 1.0)),
)
SECOND = Hypothesis((2,), -2.0, -2.0, (4,), (Timing(4, 3, 5, 0.5),))


def transcript(*hypotheses, **options):
    return Transcript("a.wav", hypotheses or (BEST,), PHONES, " ", **options)


def test_one_hypothesis_prints_as_its_output():
    assert transcript().as_text() == 'AA B B "'


def test_characters_are_joined_without_spaces():
    letters = Transcript("word", (SECOND,), Alphabet("xyz"), "")
    assert letters.as_text() == "y"


def test_several_hypotheses_print_with_their_probabilities():
    assert transcript(BEST, SECOND).as_text() == '0.6065\tAA B B "\n0.1353\tB'


def test_timestamps_are_seconds_for_sound_and_vectors_otherwise():
    lines = transcript(seconds_per_vector=0.01).as_text(timestamps=True).splitlines()
    assert lines[0] == "AA\t0.010\t0.020\t0.030\t0.900"
    assert transcript().as_text(timestamps=True).splitlines()[0] == "AA\t1\t2\t3\t0.900"


def test_json_has_every_hypothesis_with_its_timings():
    line = json_lines([transcript(BEST, SECOND, seconds_per_vector=0.5, seconds=6.0)])
    found = json.loads(line)
    assert [h["symbols"] for h in found["hypotheses"]] == [["AA", "B", "B", '"'], ["B"]]
    assert found["hypotheses"][1]["timings"] == [
        {"start": 1.5, "peak": 2.0, "end": 2.5, "confidence": 0.5}
    ]
    assert found["seconds"] == 6.0 and found["times_in"] == "seconds"


def intervals(grid):
    number = r"([\d.]+)"
    pattern = rf'xmin = {number}\s+xmax = {number}\s+text = "((?:[^"]|"")*)"'
    return [(float(a), float(b), text) for a, b, text in re.findall(pattern, grid)]


def test_a_textgrid_covers_the_sound_without_gaps():
    found = intervals(transcript(seconds_per_vector=0.1, seconds=1.2).as_textgrid())
    assert [text for *_, text in found] == ["", "AA", "B", "B", '""']
    assert found[0][0] == 0 and found[-1][1] == 1.2
    for (_, end, _), (start, _, _) in pairwise(found):
        assert end == pytest.approx(start)
    assert found[2][:2] == pytest.approx((0.5, 0.55))  # two labels share one vector


def test_an_empty_output_is_one_empty_interval():
    silent = transcript(Hypothesis((), -0.1, -0.1, ()), seconds_per_vector=0.1, seconds=0.7)
    assert intervals(silent.as_textgrid()) == [(0.0, 0.7, "")]
    assert silent.as_text() == silent.as_text(timestamps=True) == ""
