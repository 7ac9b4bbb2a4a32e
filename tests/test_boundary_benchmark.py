"""The protocol of benchmarks/boundaries.py."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def protocol():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import boundaries
    finally:
        sys.path.remove(str(BENCHMARKS))
    return boundaries


def test_closures_join_their_bursts_and_silence_is_left_out(protocol):
    rows = [
        (0, 1600, "h#"), (1600, 3200, "sh"), (3200, 4000, "tcl"), (4000, 4800, "ch"),
        (4800, 5600, "dcl"), (5600, 6400, "y"), (6400, 7200, "q"), (7200, 8000, "kcl"),
        (8000, 8800, "gcl"), (8800, 9600, "g"), (9600, 11200, "h#"),
    ]  # fmt: skip
    assert protocol.reference(rows) == [
        ("SH", 0.1, 0.2), ("CH", 0.2, 0.3), ("D", 0.3, 0.35), ("Y", 0.35, 0.4),
        ("K", 0.45, 0.5), ("G", 0.5, 0.6),
    ]  # fmt: skip


def test_boundaries_are_starts_and_ends_before_pauses(protocol):
    assert protocol.edges([(0.1, 0.2), (0.2, 0.3), (0.5, 0.6)]) == [0.1, 0.2, 0.3, 0.5, 0.6]


def test_errors_are_those_of_equal_phones(protocol):
    scores = protocol.Scores()
    wanted = [protocol.Segment("A", 0.1, 0.2), protocol.Segment("B", 0.2, 0.3)]
    scores.add(["A", "X", "B"], [(0.11, 0.15), (0.15, 0.215), (0.215, 0.33)], wanted)
    assert scores.errors == pytest.approx([0.01, 0.015, 0.03])
    table = scores.table()
    assert table["within 10 ms %"] == pytest.approx(100 / 3)
    assert table["precision %"] == pytest.approx(50.0)  # 0.11 and 0.215 of four boundaries
    assert table["recall %"] == pytest.approx(200 / 3)


def test_errors_are_grouped_by_the_sounds_on_either_side(protocol):
    scores = protocol.Scores()
    wanted = [protocol.Segment("AA", 0.1, 0.2), protocol.Segment("S", 0.2, 0.3)]
    scores.add(["AA", "S"], [(0.11, 0.23), (0.23, 0.36)], wanted)
    assert scores.kinds == [("pause", "vowel"), ("vowel", "fricative"), ("fricative", "pause")]
    assert scores.table_of_kinds().splitlines()[2:] == [
        "| fricative → pause | 1 | 60.0 | 60.0 | 0.0 | 100.0 | 60.0 |",
        "| vowel → fricative | 1 | 30.0 | 30.0 | 0.0 | 0.0 | 30.0 |",
        "| pause → vowel | 1 | 10.0 | 10.0 | 100.0 | 0.0 | 10.0 |",
    ]
