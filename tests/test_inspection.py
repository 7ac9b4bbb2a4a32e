"""What a data set holds: counts, headers, troubles, the largest step, and the command's output."""

import json
import re
from array import array
from dataclasses import replace

import pytest
import soundfile
from commands import transduce
from datasets import RATE, TEXTS, WRITERS, encoded, samples, write_manifest
from hypothesis import given
from hypothesis import strategies as st

from transduce.architectures import network_sizes
from transduce.audio.sound import read_sound_header, read_wave
from transduce.cli.inspect import _bins
from transduce.data.batches import predicted_bytes
from transduce.data.pairs import Audio, DataError, Notation
from transduce.training.inspection import inspect_data, least_vectors
from transduce.training.recipe import Recipe, read_recipe

pytest.importorskip("pyarrow")
CHARACTERS = Notation("characters", None)
SMALL = """
[network]
hidden_size = 8
prediction_size = 8
pooling = 4

[train]
optimiser = "adamw"
max_sequences = 2
max_epochs = 1
"""


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_counted(tmp_path, name):
    found = inspect_data(WRITERS[name](tmp_path), "text", CHARACTERS, Recipe())
    assert list(found.seconds) == [pytest.approx(len(samples(i)) / RATE) for i in range(4)]
    assert list(found.num_labels) == [len(text) for text in TEXTS]
    assert found.symbols == {"a": 5, "b": 5, " ": 2}
    assert (found.rates, found.channels) == ({RATE: 4}, {1: 4})
    assert found.unreadable.count == found.unalignable.count == found.oversized.count == 0


def test_the_largest_step_is_that_of_a_training(tmp_path):
    path = write_manifest(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    found = inspect_data(path, "text", CHARACTERS, read_recipe(tmp_path / "small.toml"))
    paths = ("--data.training", path, "--data.validation", path)
    said = transduce("train", "small.toml", *paths, folder=tmp_path).stdout
    step = found.step
    assert (
        f"the largest step has {step.described()}, and will take about "
        f"{step.num_bytes / 2**20:.1f} MB"
    ) in said


def test_a_step_of_minimum_risk_has_several_candidates_of_each_sequence(tmp_path):
    path = write_manifest(tmp_path)
    recipes = [replace(Recipe(), train=replace(Recipe().train, minimum_risk=n)) for n in (0, 3)]
    one, four = (inspect_data(path, "text", CHARACTERS, recipe).step for recipe in recipes)
    sizes = network_sizes(Recipe().network, Recipe().data.features.size, 3)
    assert one[:3] == four[:3] and one.num_bytes == predicted_bytes(one[:3], sizes)
    assert four.num_bytes == predicted_bytes(four[:3], sizes, candidates=4) > one.num_bytes


def test_troubles_are_counted_and_the_first_are_named(tmp_path):
    path = write_manifest(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["text"] = "ab" * 30  # more labels than frames after pooling
    lines[1]["text"] = "a" * 7 + "b" * 6  # of 14 vectors, which suffice without the repeats
    (tmp_path / "sounds" / "c.flac").write_text("no sound")
    (tmp_path / "sounds" / "short.wav").write_bytes(encoded(0, "WAV")[: 44 + 600])
    lines += [{"audio_filepath": f"sounds/{one}", "text": "a"} for one in ("short.wav", "none.wav")]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {}]))
    (tmp_path / "small.toml").write_text(SMALL)
    recipe = read_recipe(tmp_path / "small.toml", {"train.max_cells": "300"})
    found = inspect_data(path, "text", CHARACTERS, recipe)
    assert len(found) == 3
    assert found.unreadable.count == len(found.unreadable.first) == 4
    assert any("line 3: " in one and "not audio that" in one for one in found.unreadable.first)
    assert any("line 5: there are 19 ms of" in one for one in found.unreadable.first)
    assert [re.sub(".*line ", "", one) for one in found.unalignable.first] == [
        "1: 60 labels, of which 0 repeat the one before, need 60 frames after pooling where there "
        "are 12",
        "2: 13 labels, of which 11 repeat the one before, need 24 frames after pooling where there "
        "are 14",
    ]
    assert found.oversized.count == 1 and found.step is not None


@given(st.lists(st.sampled_from("ab"), max_size=7))
def test_ctc_needs_a_vector_for_each_label_and_each_null_between_equal_ones(target):
    """The shortest alignment puts a null between equal labels, and nothing else."""
    alignment = []
    for symbol in target:
        alignment += [None] * (alignment[-1:] == [symbol]) + [symbol]
    assert least_vectors(tuple(target)) == len(alignment)


def test_a_header_says_what_decoding_finds(tmp_path):
    path = write_manifest(tmp_path)
    sound = path.parent / "sounds" / "a.flac"
    for audio in (Audio(sound), Audio(sound, 0.1, 0.2), Audio(sound, 0.4, 0.15)):
        header = read_sound_header(audio)
        seconds = len(read_wave(audio, RATE)) / RATE
        assert header == (pytest.approx(seconds, abs=1 / RATE), RATE, 1)
    bad = [Audio(sound, 30.0, 1.0), Audio(sound, None, 9.0), Audio(path), Audio("none.wav")]
    for audio in bad:
        with pytest.raises(DataError) as decoded:
            read_wave(audio, RATE)
        with pytest.raises(DataError) as read:
            read_sound_header(audio)
        assert str(read.value) == str(decoded.value)


def test_the_command_prints_tables_and_draws_a_figure(tmp_path):
    path = write_manifest(tmp_path)
    with path.open("a") as file:
        file.write("{\n")
    for suffix in ("png", "svg"):
        figure = tmp_path / f"data.{suffix}"
        done = transduce("inspect", path, "--figure", figure, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert figure.stat().st_size > 10_000
    for part in (
        r"format +│ a JSONL manifest",
        r"sequences +│ 4 ",
        r"cannot be read +│ 1 ",
        r"hours +│ 0.00",
        r"seconds +│ 0.50 to 0.65, median 0.57",
        r"samples a second +│ 16000",
        r"CTC cannot align +│ 0",
        r"the largest step +│ [\d.]+ MB: 4 sequences, each twice, of up to 63 frames and 4",
        r"symbols: a 5  b 5  ␣ 2",
        r"fewer than 10 times: ␣ a b",
        r"1 cannot be read:\n  .*all\.jsonl, line 5: the line is not JSON",
        r"data\.svg\n$",
    ):
        assert re.search(part, done.stdout), (part, done.stdout)


def test_texts_are_inspected_too(tmp_path):
    (tmp_path / "a.tsv").write_text("abc\tx y\nab\tx\nno tab\n")
    done = transduce("inspect", "a.tsv", "--figure", "a.pdf", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"format +│ pairs of texts", done.stdout)
    assert "hours" not in done.stdout and "symbols: x 2  y 1" in done.stdout
    assert "those of pairs-transducer" in done.stdout


@pytest.mark.parametrize(
    "options, symbols",
    [
        ((), "x 2  y 1"),
        (("--split", "characters"), "x 2  ␣ 1  y 1"),
        (("--recipe", "characters.toml"), "x 2  ␣ 1  y 1"),
        (("--recipe", "characters.toml", "--split", "spaces"), "x 2  y 1"),
    ],
)
def test_symbols_are_split_as_the_option_says_or_else_the_recipe(tmp_path, options, symbols):
    (tmp_path / "a.tsv").write_text("abc\tx y\nab\tx\n")
    (tmp_path / "characters.toml").write_text('[data]\ntarget_notation.split = "characters"\n')
    done = transduce("inspect", "a.tsv", *options, folder=tmp_path)
    assert re.search(rf"^symbols: {symbols}$", done.stdout, re.MULTILINE), done


@pytest.mark.parametrize(
    "values, bins",
    [
        (array("q", [1, 3, 3]), {"1": 1, "2": 0, "3": 2}),
        (array("q", [7]), {"7": 1}),
        (array("q", range(1, 30)), {f"{n}-{n + 2}": 3 - (n == 28) for n in range(1, 30, 3)}),
        (array("d", [0.5, 0.51]), {f"0.{n}-0.{n + 1}": n in (500, 509) for n in range(500, 510)}),
        (
            array("d", [1, 2, 21]),
            {f"{n}.0-{n + 2}.0": {1: 2, 19: 1}.get(n, 0) for n in range(1, 20, 2)},
        ),
    ],
)
def test_no_two_bins_look_the_same(values, bins):
    assert [(within, int(count)) for within, count, _ in _bins(values)] == list(bins.items())


def test_histograms_of_different_lengths_stand_side_by_side(tmp_path):
    (tmp_path / "a.tsv").write_text("abc\tx\nab\tx\n")
    lines = transduce("inspect", "a.tsv", folder=tmp_path).stdout.splitlines()
    rows = [line.split() for line in lines if line.endswith(" ") and "█" in line]
    assert [row[::2] for row in rows] == [["2", "█" * 24, "2"], ["3", "█" * 24]]


def test_the_exit_code_is_1_if_nothing_can_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n" * 7)
    done = transduce("inspect", "a.jsonl", folder=tmp_path)
    assert done.returncode == 1
    assert "7 cannot be read:" in done.stdout and "  and 2 more" in done.stdout
    assert done.stderr == (
        "transduce: nothing in a.jsonl can be read; correct it, or give other data\n"
    )
    (tmp_path / "folder").mkdir()
    for name, problem in (
        ("none.jsonl", "cannot be read (there is no such file); check the path\n"),
        ("folder", "is a folder without a data set; give data in one of the formats"),
    ):
        done = transduce("inspect", name, folder=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"transduce: {name} {problem}")


def test_other_rates_and_channels_are_counted(tmp_path):
    path = write_manifest(tmp_path)
    stereo = samples(0)[:, None].repeat(2, 1)
    soundfile.write(tmp_path / "sounds" / "a.flac", stereo, 8000)
    done = transduce("inspect", path, folder=tmp_path)
    assert re.search(r"samples a second +│ 16000 \(3\), 8000 \(1\)", done.stdout)
    assert re.search(r"channels +│ 1 \(3\), 2 \(1\)", done.stdout)
