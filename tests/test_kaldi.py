"""Kaldi data directories: the order of their files, and the error of each kind of bad line."""

import pytest
from datasets import NAMES, TEXTS, write_kaldi, write_segments
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transduce.data.kaldi import read_kaldi
from transduce.data.pairs import Audio, DataError, Notation

CHARACTERS = Notation("characters", None)


def pairs_of(folder, skipped=None):
    records = read_kaldi(folder, ("text",), skipped)
    return [record.pair(CHARACTERS) for record in records]


BAD_WAVES = [
    ("b sox b.wav -t wav - |", "'b' is the output of a shell command, which is not run; write the"),
    ("b cat b.wav|", "the output of a shell command"),
    ("b data/raw.ark:123", "'b' lies in a Kaldi archive, which is not read; write the sounds to"),
    ("b", "there is no path for 'b'; name a sound file"),
    ("b -", "there is no path for 'b'"),
    ("b none.flac", "there is no file"),
    ("b " + "x" * 5000, "cannot be a path"),
]


@pytest.mark.parametrize("line, problem", BAD_WAVES, ids=[problem for _, problem in BAD_WAVES])
def test_a_bad_line_of_wav_scp_is_a_sentence_and_may_be_skipped(tmp_path, line, problem):
    folder = write_kaldi(tmp_path)
    waves = (folder / "wav.scp").read_text().splitlines()
    waves[1] = line
    (folder / "wav.scp").write_text("\n".join(waves))
    with pytest.raises(DataError) as raised:
        pairs_of(folder)
    message = str(raised.value)
    assert message.startswith(f"{folder / 'wav.scp'}, line 2: ") and problem in message
    assert ";" in message and "\n" not in message
    skipped = []
    assert [pair.name for pair in pairs_of(folder, skipped)] == ["a", "c", "d"]
    assert str(skipped[0]) == message
    # The text of the utterance has lost its sound.
    assert len(skipped) == 2
    assert str(skipped[1]).startswith(f"{folder / 'text'}, line 2: utterance 'b' has no line of")


BAD_SEGMENTS = [
    ("b all 1", "there must be four columns"),
    ("b none 0 1", "recording 'none' is not in wav.scp; add it"),
    ("b all 1 0.5", "1 and 0.5 are not the start and end of a segment; give seconds"),
    ("b all x 1", "x and 1 are not the start and end"),
    ("b all 0 inf", "0 and inf are not the start and end"),
    ("b all nan 1", "nan and 1 are not"),
]


@pytest.mark.parametrize("line, problem", BAD_SEGMENTS, ids=[p for _, p in BAD_SEGMENTS])
def test_a_bad_segment_is_a_sentence_and_may_be_skipped(tmp_path, line, problem):
    folder = write_segments(tmp_path)
    lines = (folder / "segments").read_text().splitlines()
    lines[1] = line
    (folder / "segments").write_text("\n".join(lines))
    with pytest.raises(DataError, match="segments, line 2: ") as raised:
        pairs_of(folder)
    assert problem in str(raised.value)
    skipped = []
    assert [pair.name for pair in pairs_of(folder, skipped)] == ["a", "c", "d"]
    assert str(skipped[0]) == str(raised.value)


def test_segments_of_a_bad_recording_are_counted_one_by_one(tmp_path):
    folder = write_segments(tmp_path)
    (folder / "wav.scp").write_text("all gunzip -c all.gz |\n")
    with pytest.raises(DataError, match=r"wav\.scp, line 1: the sound of 'all' is the output of a"):
        pairs_of(folder)
    skipped = []
    assert pairs_of(folder, skipped) == []
    assert sum("shell command" in str(error) for error in skipped) == 4


def test_what_one_file_lacks_is_said(tmp_path):
    folder = write_kaldi(tmp_path)
    texts = (folder / "text").read_text().splitlines()
    (folder / "text").write_text("\n".join([texts[0], *texts[2:], "e new", "c again", "d"]))
    skipped = []
    assert [pair.name for pair in pairs_of(folder, skipped)] == ["a", "c", "d"]
    assert [str(error).removeprefix(f"{folder}/") for error in skipped] == [
        "text, line 5: 'c' is on line 2 already; leave one of them out",
        "text, line 6: 'd' is on line 3 already; leave one of them out",
        "wav.scp, line 2: utterance 'b' has no line in text; add it, or run utils/fix_data_dir.sh",
        "text, line 4: utterance 'e' has no line of its own in wav.scp, or one that cannot be "
        "used; correct it, or run utils/fix_data_dir.sh",
    ]


def test_an_empty_text_and_a_folder_without_sounds_are_named(tmp_path):
    folder = write_kaldi(tmp_path)
    (folder / "text").write_text("a\n")
    with pytest.raises(DataError, match=r"wav\.scp, line 1: text is empty; transcribe it"):
        pairs_of(folder)
    (folder / "wav.scp").unlink()
    with pytest.raises(DataError, match=r"kaldi: there is no wav\.scp, which names the sounds"):
        pairs_of(folder)


def test_any_file_of_lines_may_be_the_target(tmp_path):
    folder = write_kaldi(tmp_path)
    (folder / "phones").write_text("".join(f"{name}\tx y\n" for name in NAMES))
    records = list(read_kaldi(folder, ("phones",)))
    assert [record.fields for record in records] == [{"phones": "x y"}] * 4
    assert all(isinstance(record.source, Audio) for record in records)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.permutations(range(4)), st.permutations(range(4)))
def test_the_order_of_lines_does_not_matter(tmp_path_factory, waves, texts):
    tmp_path = tmp_path_factory.mktemp("kaldi")
    folder = write_kaldi(tmp_path)
    for name, order in (("wav.scp", waves), ("text", texts)):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_text("".join(f"{lines[i]}\n" for i in order))
    found = {pair.name: "".join(pair.target) for pair in pairs_of(folder)}
    assert found == dict(zip(NAMES, TEXTS, strict=True))
    assert list(found) == [NAMES[i] for i in waves]
