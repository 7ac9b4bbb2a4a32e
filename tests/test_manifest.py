"""Manifests: allowed lines, and the error of each kind of bad line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from transduce.data.dictionaries import hold_out
from transduce.data.manifest import Manifest, read_manifest, read_targets, read_tsv
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    encode,
    skipped_report,
    source_alphabet,
    target_alphabet,
)

CHARACTERS = Notation("characters", "NFC")
SPACES = Notation("spaces", "NFC")


@pytest.fixture
def manifest(tmp_path):
    """Return a function that writes a manifest beside a.wav and a.npy, and returns its path."""
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "a.wav").touch()
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))

    def write(*lines, name="m.jsonl"):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


def test_paths_are_relative_to_the_manifest_and_any_field_may_be_the_target(manifest):
    line = {"audio_filepath": "audio/a.wav", "duration": 1.5, "text": "a b", "phones": "AH  B IY"}
    path = manifest(line)
    (pair,) = read_manifest(path, SPACES, "phones")
    assert pair.source == Audio(path.parent / "audio" / "a.wav", None, 1.5)
    assert pair.target == ("AH", "B", "IY")
    assert (pair.name, str(pair.origin)) == ("a", f"{path}, line 1")
    assert read_manifest(path, CHARACTERS)[0].target == ("a", " ", "b")
    assert read_manifest(path, None)[0].target == ()


def test_a_target_of_several_fields_begins_with_a_symbol_for_each_but_the_last(manifest):
    line = {"audio_filepath": "audio/a.wav", "phones": "AH B", "speaker": "J. Doe", "year": 3}
    path = manifest(line)
    (pair,) = read_manifest(path, SPACES, "speaker,phones")
    assert pair.target == ("speaker=J._Doe", "AH", "B")
    assert Manifest.open(path, SPACES, "speaker,phones")[0].target == pair.target
    assert Manifest.open(path, SPACES, "speaker,phones").target_alphabet().symbols == (
        *("AH", "B", "speaker=J._Doe"),
    )
    for target, problem in (("room,phones", "no field 'room'"), ("year,phones", "year is 3; it")):
        with pytest.raises(DataError, match=problem):
            read_manifest(path, SPACES, target)


def test_features_offsets_and_lists_of_symbols(manifest):
    features, part, first_part, empty_line, symbols = (
        {"features_filepath": "a.npy", "text": "x"},
        {"audio_filepath": "audio/a.wav", "offset": 2.5, "duration": 1, "text": "y"},
        {"audio_filepath": "audio/a.wav", "offset": 0, "duration": 1, "text": "y"},
        "",
        {"features_filepath": "a.npy", "text": ["sh", "iy"]},
    )
    path = manifest(features, part, first_part, empty_line, symbols)
    pairs = read_manifest(path, CHARACTERS)
    assert pairs[0].source == Frames(path.parent / "a.npy")
    assert (pairs[1].source.start, pairs[1].source.duration) == (2.5, 1.0)
    assert pairs[1].name == "a@2.5"
    assert (pairs[2].source.start, pairs[2].name) == (0.0, "a@0")
    assert pairs[3].target == ("sh", "iy")
    assert pairs[3].origin.line == 5


BAD_LINES = [
    ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
    ("[1]", "not a JSON object"),
    ({"text": "x"}, "neither audio_filepath nor features_filepath"),
    ({"audio_filepath": "audio/a.wav", "features_filepath": "a.npy", "text": "x"}, "both"),
    ({"audio_filepath": 3, "text": "x"}, "must be a path"),
    ({"audio_filepath": "b.wav", "text": "x"}, "there is no file"),
    ({"audio_filepath": "audio/a.wav", "phones": "x"}, "no field 'text'"),
    ({"audio_filepath": "audio/a.wav", "text": " "}, "text is empty"),
    ({"audio_filepath": "audio/a.wav", "text": []}, "text is empty"),
    ({"audio_filepath": "audio/a.wav", "text": 7}, "must be text, or a list of symbols"),
    ({"audio_filepath": "audio/a.wav", "text": "x", "duration": "1 s"}, "a number of seconds"),
    ({"audio_filepath": "audio/a.wav", "text": "x", "duration": -1}, "a number of seconds"),
    ({"audio_filepath": "audio/a.wav", "text": "x", "offset": 1}, "no duration"),
    ({"audio_filepath": "~nosuch/a.wav", "text": "x"}, "'~nosuch/a.wav' cannot be a path (Could"),
    ({"audio_filepath": "a" * 5000, "text": "x"}, "aaaa"),
    ({"audio_filepath": "audio/a.wav", "text": "x", "duration": 10**400}, "number of seconds"),
    ('{"duration": ' + "1" * 5000 + "}", "a number is too long, or lists are too deep"),
    ('{"text": ' + "[" * 200_000, "a number is too long, or lists are too deep; shorten"),
]


@pytest.mark.parametrize("line, problem", BAD_LINES, ids=[problem for _, problem in BAD_LINES])
def test_a_bad_line_is_one_sentence_with_file_and_line_and_may_be_skipped(manifest, line, problem):
    good = {"audio_filepath": "audio/a.wav", "text": "x"}
    path = manifest(good, line, good)
    with pytest.raises(DataError) as raised:
        read_manifest(path, CHARACTERS)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 2: ")
    assert problem in message
    assert "\n" not in message
    assert ";" in message  # the remedy follows
    skipped = []
    assert [p.origin.line for p in read_manifest(path, CHARACTERS, skipped=skipped)] == [1, 3]
    assert [str(error) for error in skipped] == [message]
    assert skipped_report(skipped, 2) == f"skipped 1 of 3\n  {message}"


def test_a_line_that_is_not_utf8_is_skipped_alone(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufeffa\tb\n".encode() + b"\xff\tb\n" + b"c\td\r\n")
    with pytest.raises(DataError, match=r"line 2: byte 1 is not UTF-8; convert"):
        read_tsv(path, CHARACTERS, SPACES)
    skipped = []
    pairs = read_tsv(path, CHARACTERS, SPACES, skipped)
    assert [(pair.source, pair.target) for pair in pairs] == [(("a",), ("b",)), (("c",), ("d",))]
    assert len(skipped) == 1


def test_paths_may_be_strings(manifest):
    path = manifest({"audio_filepath": "audio/a.wav", "text": "x"})
    assert read_manifest(str(path), CHARACTERS) == read_manifest(path, CHARACTERS)
    table = manifest("a\tb", name="a.tsv")
    assert read_tsv(str(table), CHARACTERS, SPACES) == read_tsv(table, CHARACTERS, SPACES)
    assert read_targets(str(table), SPACES) == read_targets(table, SPACES)
    assert (Audio("a.wav"), Frames("a.npy")) == (Audio(Path("a.wav")), Frames(Path("a.npy")))


@pytest.mark.parametrize("content", ["", "\n  \r\n"])
def test_a_file_with_nothing_in_it_says_so(tmp_path, content):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(DataError, match=r"a\.tsv: the file is empty; write a line"):
        read_tsv(tmp_path / "a.tsv", CHARACTERS, SPACES)


def test_a_missing_manifest_says_so(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file; check the path"):
        read_manifest(tmp_path / "none.jsonl", CHARACTERS)


@pytest.mark.parametrize(
    "form, length", [("NFC", 2), ("NFD", 6), ("NFKC", 2), ("NFKD", 6), (None, 2)]
)
def test_the_normal_form_decides_what_a_character_is(tmp_path, form, length):
    path = tmp_path / "a.tsv"
    path.write_text("각한\tk a k\n", encoding="utf-8")
    (pair,) = read_tsv(path, Notation("characters", form), SPACES)
    assert len(pair.source) == length
    assert pair.target == ("k", "a", "k")


def test_compatibility_forms_are_folded_by_nfkd_alone():
    assert Notation("characters", "NFD").symbols("ﬁé") == ("ﬁ", "e", "\u0301")
    assert Notation("characters", "NFKD").symbols("ﬁé") == ("f", "i", "e", "\u0301")
    with pytest.raises(ValueError, match="normal_form must be NFC"):
        Notation("characters", "nfc")
    with pytest.raises(ValueError, match="split must be characters or spaces"):
        Notation("words", None)


@pytest.mark.parametrize(
    "line, problem",
    [
        ("ab", "there is no tab"),
        ("\tx", "the source is empty"),
        ("a\t", "the target is empty"),
        ("\t", "the source is empty"),
    ],
)
def test_a_bad_tsv_line_says_what_is_missing(tmp_path, line, problem):
    path = tmp_path / "a.tsv"
    path.write_text(f"a\tb\n{line}\n")
    with pytest.raises(DataError, match=f"line 2: {problem}; write"):
        read_tsv(path, CHARACTERS, SPACES)


def test_more_columns_are_alternatives(tmp_path):
    path = tmp_path / "a.ref"
    path.write_text("ABS\tAE B Z\tEY B IY EH S\n")
    (pair,) = read_tsv(path, CHARACTERS, SPACES)
    assert pair.references == (("AE", "B", "Z"), ("EY", "B", "IY", "EH", "S"))


def test_targets_alone_are_read_line_by_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("to be\n\nor not\n")
    assert [pair.target for pair in read_targets(path, SPACES)] == [("to", "be"), ("or", "not")]


def test_an_unseen_symbol_names_the_line(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("ab\tx y\nac\tx z\n")
    first, second = read_tsv(path, CHARACTERS, SPACES)
    assert source_alphabet([first]).symbols == ("a", "b")
    assert encode(first, first.target, target_alphabet([first])) == [1, 2]
    with pytest.raises(DataError, match=r"line 2: 'z', at position 1, is not among .*; correct"):
        encode(second, second.target, target_alphabet([first]))


def test_the_real_manifests_read_whole(corpora):
    pairs = read_manifest(corpora / "librispeech-10s" / "dev.jsonl", SPACES, "phones")
    assert len(pairs) == 249
    assert sum(len(pair.target) for pair in pairs) == 12_259
    assert len(target_alphabet(pairs)) == 39


# --- An index of a manifest ---------------------------------------------------------------------


def test_a_manifest_gives_the_pairs_that_are_read_whole(manifest):
    sound = {"audio_filepath": "audio/a.wav"}
    path = manifest(
        {**sound, "duration": 1.5, "text": "ab"},
        "",
        {**sound, "duration": 2, "text": "abc"},
        {**sound, "text": ["x", "yz"]},
        {**sound, "duration": 0.5, "offset": 1.25, "text": "é"},
        {"features_filepath": "audio/a.wav", "text": "z"},
    )
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    whole, index = read_manifest(path, CHARACTERS), Manifest.open(path, CHARACTERS)
    assert list(index) == whole == index.read() == [index[i] for i in range(len(index))]
    assert [pair.origin.line for pair in index] == [1, 3, 4, 5, 6]
    assert index.lines["num_labels"].tolist() == [2, 3, 2, 1, 1]
    np.testing.assert_equal(index.lines["seconds"], [1.5, 2.0, np.nan, 0.5, np.nan])
    assert index.target_alphabet().symbols == target_alphabet(whole).symbols
    assert index[1:3].target_alphabet().symbols == ("a", "b", "c", "x", "yz")
    both = index[:2].joined(index[3:])
    assert list(both) == whole[:2] + whole[3:]
    assert both.target_alphabet().symbols == target_alphabet(list(both)).symbols


def test_the_index_takes_34_bytes_a_line(manifest):
    lines = [{"audio_filepath": "audio/a.wav", "duration": 1.0, "text": "x"}] * 1000
    assert Manifest.open(manifest(*lines), CHARACTERS).lines.nbytes == 34_000


@pytest.mark.parametrize("line, problem", BAD_LINES, ids=[problem for _, problem in BAD_LINES])
@pytest.mark.parametrize("duration", [None, 1.0])
def test_a_bad_line_has_the_same_sentence_when_it_is_indexed_or_met(
    manifest, line, problem, duration
):
    if duration is not None and isinstance(line, dict):
        line = {"duration": duration} | line
    good = {"audio_filepath": "audio/a.wav", "text": "x"}
    path = manifest(good, line, good)
    try:
        read_manifest(path, CHARACTERS)
        expected = None  # a duration was all that was missing
    except DataError as error:
        expected = str(error)
    skipped, met = [], []
    index = Manifest.open(path, CHARACTERS, skipped=skipped)
    pairs = index.read(met)
    errors = [str(error) for error in skipped + met]
    assert errors == ([] if expected is None else [expected])
    assert len(pairs) == 3 - len(errors)
    if skipped:
        with pytest.raises(DataError, match=re.escape(expected)):
            Manifest.open(path, CHARACTERS)
    elif met:
        with pytest.raises(DataError, match=re.escape(expected)):
            index[1]


def test_an_index_holds_out_the_sources_that_a_list_does(manifest, tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.wav").touch()
    lines = [{"audio_filepath": f"{name}.wav", "text": "x"} for name in "abcdefghabcdefgh"]
    path = manifest(*lines)
    expected = hold_out(read_manifest(path, CHARACTERS), 3, seed=5)
    assert [list(part) for part in Manifest.open(path, CHARACTERS).hold_out(3, 5)] == list(expected)
    with pytest.raises(ValueError, match="cannot hold out 8 of 8 sources"):
        Manifest.open(path, CHARACTERS).hold_out(8, 0)


def test_a_manifest_that_is_missing_or_empty_says_so_when_it_is_opened(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file; check the path"):
        Manifest.open(tmp_path / "none.jsonl", CHARACTERS)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"empty\.jsonl: the file is empty; write a line"):
        Manifest.open(tmp_path / "empty.jsonl", CHARACTERS)
