"""Transcripts as text, JSON and TextGrids."""

import json
import random
import re
from itertools import pairwise
from math import exp
from pathlib import Path

import pytest

from transduce import Alphabet, Hypothesis, Timing
from transduce.model.transcripts import LAST, LEAD, Transcript, join_words, json_lines

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


def test_several_hypotheses_print_with_their_input_probability_and_score():
    table = 'a.wav\t0.6065\t-0.1250\tAA B B "\na.wav\t0.1353\t-2.0000\tB'
    assert transcript(BEST, SECOND).as_text() == transcript(BEST, SECOND).as_table() == table
    assert transcript(SECOND).as_table() == "a.wav\t0.1353\t-2.0000\tB"


def test_timestamps_are_seconds_for_sound_and_vectors_otherwise():
    lines = heard().as_text(timestamps=True).splitlines()
    assert lines[0] == "AA\t0.205\t0.250\t0.350\t0.900"  # start, peak, end, confidence
    assert transcript().as_text(timestamps=True).splitlines() == [
        "AA\t2\t2\t5\t0.900",  # it lasts until the next
        "B\t5\t5\t5.5\t0.800",  # two labels divide a vector
        "B\t5.5\t5\t9\t0.700",
        '"\t9\t9\t10\t1.000',  # the last lasts to the end of its vector
    ]


def test_json_has_every_hypothesis_with_its_timings():
    sound = {"seconds_per_vector": 0.1, "seconds": 6.0, "offset": 0.01, "path": Path("in/a.wav")}
    line = json_lines([transcript(BEST, SECOND, **sound)])
    found = json.loads(line)
    assert [h["symbols"] for h in found["hypotheses"]] == [["AA", "B", "B", '"'], ["B"]]
    [timing] = found["hypotheses"][1]["timings"]
    assert timing == {
        "symbol": "B",
        "start": pytest.approx(0.415),  # LEAD before the peak, the middle of vector 4
        "peak": pytest.approx(0.46),
        "end": pytest.approx(0.56),  # LAST after the peak, because nothing follows
        "earliest": pytest.approx(0.31),  # the start of vector 3
        "latest": pytest.approx(0.61),  # the end of vector 5
        "confidence": 0.5,
    }
    assert found["input"] == "a.wav" and found["path"] == "in/a.wav"
    assert found["seconds"] == 6.0 and found["times_in"] == "seconds"


def intervals(grid):
    number = r"([\d.]+)"
    pattern = rf'xmin = {number}\s+xmax = {number}\s+text = "((?:[^"]|"")*)"'
    return [(float(a), float(b), text) for a, b, text in re.findall(pattern, grid)]


def heard(*hypotheses, seconds=1.2):
    return transcript(*hypotheses, seconds_per_vector=0.1, seconds=seconds)


def test_a_textgrid_covers_the_sound_and_its_pauses_without_gaps():
    grid = heard().as_textgrid()
    found = intervals(grid)
    numbers = re.findall(r"intervals \[(\d+)\]", grid)
    assert [int(number) for number in numbers] == list(range(1, len(found) + 1))
    # The peaks are 0.25; 0.525 and 0.575, which share a vector; 0.95.
    assert [text for *_, text in found] == ["", "AA", "", "B", "B", "", '""', ""]
    assert found[0][0] == 0 and found[-1][1] == 1.2
    for (_, end, _), (start, _, _) in pairwise(found):
        assert end == start
    assert found[1][:2] == pytest.approx((0.25 - LEAD, 0.25 + LAST))
    assert found[3][:2] == pytest.approx((0.525 - LEAD, 0.55))
    assert found[4][:2] == pytest.approx((0.55, 0.575 + LAST))


def test_a_label_lasts_until_the_next_unless_a_pause_is_between():
    at = Hypothesis((1, 2, 2), -1.0, -1.0, (1, 3, 6))  # peaks 0.15, 0.35, 0.65
    found = heard(at, seconds=2.0).spans(at)
    assert found[0].end == found[1].start == pytest.approx(0.35 - LEAD)
    assert found[1].end == pytest.approx(0.35 + LAST)  # 0.3 s to the next peak hold a pause
    assert found[2].end == pytest.approx(0.65 + LAST)
    near = Hypothesis((1, 2), -1.0, -1.0, (1, 1))
    first, second = heard(near).spans(near)
    assert first.end == second.start == pytest.approx(0.15)  # half-way, nearer than LEAD


@pytest.mark.parametrize("seed", range(20))
def test_intervals_never_overlap_and_stay_within_the_sound(seed):
    numbers = random.Random(seed)
    frames = tuple(sorted(numbers.randrange(60) for _ in range(numbers.randrange(25))))
    labels = (1,) * len(frames)
    seconds = 60 * 0.02 + numbers.choice((-0.015, 0.0, 0.012))  # the last vector may be cut off
    found = transcript(
        Hypothesis(labels, -1.0, -1.0, frames), seconds_per_vector=0.02, seconds=seconds
    )
    edges = intervals(found.as_textgrid())
    assert edges[0][0] == 0 and edges[-1][1] == pytest.approx(seconds)
    assert sum(text == "AA" for *_, text in edges) == len(frames)
    for (low, high, _), (start, _, _) in pairwise([*edges, (seconds, 0, "")]):
        assert low < high == pytest.approx(start)
    for span in found.spans(found.hypotheses[0]):
        assert span.start <= span.peak <= span.end


def test_times_that_were_not_computed_are_an_error():
    untimed = transcript(Hypothesis((1,), -1.0, -1.0, ()))
    for write in (untimed.as_textgrid, lambda: untimed.as_text(timestamps=True)):
        with pytest.raises(ValueError, match="with_timings=True"):
            write()
    assert untimed.as_json()["hypotheses"][0]["timings"] == []


def test_words_are_joined_and_their_best_combinations_kept():
    def word(name, *options):
        found = tuple(Hypothesis(y, p, p / len(y), ()) for y, p in options)
        return Transcript(name, found, PHONES, " ")

    ice, cream = word("ice", ((1,), -0.1), ((2,), -2.0)), word("cream", ((2, 2), -0.3))
    joined = join_words("ice cream", [ice, cream], 2, length_normalised=True)
    assert joined.as_table() == (
        f"ice cream\t{exp(-0.4):.4f}\t{-0.4 / 3:.4f}\tAA B B\n"
        f"ice cream\t{exp(-2.3):.4f}\t{-2.3 / 3:.4f}\tB B B"
    )
    assert join_words("ice!", [ice], 2, length_normalised=True).name == "ice!"


def test_an_empty_output_is_one_empty_interval():
    silent = transcript(Hypothesis((), -0.1, -0.1, ()), seconds_per_vector=0.1, seconds=0.7)
    assert intervals(silent.as_textgrid()) == [(0.0, 0.7, "")]
    assert silent.as_text() == silent.as_text(timestamps=True) == ""
