"""Lhotse's cuts: parts of recordings, supervisions, and the error of each kind of bad line."""

import json

import pytest
from datasets import cut, write_sounds

from transduce.data.lhotse import read_lhotse
from transduce.data.pairs import Audio, DataError, Notation

CHARACTERS = Notation("characters", None)


@pytest.fixture
def sounds(tmp_path):
    write_sounds(tmp_path / "sounds")
    return tmp_path / "sounds"


def write(folder, *cuts):
    path = folder / "cuts.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in cuts))
    return path


def supervision(text, start, duration):
    return {"id": text, "start": start, "duration": duration, "text": text}


def test_a_part_of_a_recording_and_several_supervisions(sounds):
    several = [supervision("a", 0.0, 0.1), supervision("b", -0.05, 0.2)]
    first = cut(0, sounds, start=0.2, duration=0.25, supervisions=several)
    path = write(sounds, first, cut(1, sounds, supervisions=[]))
    one, two, bare = read_lhotse(path)
    file = sounds / "a.flac"
    assert one.source == Audio(file, 0.2, 0.1) and one.name == "a-1"
    assert two.source == Audio(file, pytest.approx(0.15), 0.2) and two.name == "a-2"
    assert (one.fields, two.fields) == ({"text": "a"}, {"text": "b"})
    # Without supervisions, the cut is the whole file, which is promised to have its duration.
    assert bare.source == Audio(sounds / "b.flac", None, 0.55)
    with pytest.raises(DataError, match="line 2: there is no field 'text' for the target; add it"):
        bare.pair(CHARACTERS)


def test_a_cut_from_the_start_that_ends_before_the_recording_is_a_part(sounds):
    (record,) = read_lhotse(
        write(sounds, cut(0, sounds, start=0.0, duration=0.25, supervisions=[]))
    )
    assert record.source == Audio(sounds / "a.flac", 0.0, 0.25)


def test_custom_fields_may_be_targets(sounds):
    (record,) = read_lhotse(write(sounds, cut(0, sounds)))
    assert record.pair(CHARACTERS, "phones").target == ("x", "y")


def source(**changes):
    return {"sources": [{"type": "file", "channels": [0], "source": "a.flac"} | changes]}


def recording(fields):
    return {"recording": {"duration": 1.0} | fields}


BAD_CUTS = [
    (recording(source(type="command", source="cat a")), "is a shell command, which is not run;"),
    (recording(source(type="url", source="http://x/a")), "is a URL, which is not opened; save the"),
    (recording(source(type="memory")), "is of type 'memory'; save the sounds with cuts.save_audio"),
    (recording(source(source=3)), "the source of the recording is 3; it must be a path"),
    (recording(source(source="none.flac")), "there is no file"),
    (recording(source(channels=[0, 1])), "several sources or channels; save"),
    (recording({"sources": []}), "several sources or channels; save"),
    (recording({"sources": "x"}), "sources is not a list of objects; write"),
    (recording(source() | {"transforms": [{"name": "Speed"}]}), "is to be transformed, which is"),
    ({"type": "MixedCut"}, "it is a MixedCut where only a MonoCut can be read; save"),
    ({"type": None}, "of a manifest of recordings or supervisions; make cuts of both with"),
    ({"recording": None}, "the cut has no recording; make cuts with recordings, not features"),
    ({"duration": None}, "there is no duration in the cut"),
    ({"start": "1"}, "start is '1'; it must be a number of seconds"),
    ({"supervisions": [{"duration": 1, "text": "a"}]}, "there is no start in the cut"),
]


@pytest.mark.parametrize("changes, problem", BAD_CUTS, ids=[problem for _, problem in BAD_CUTS])
def test_a_bad_cut_is_a_sentence_and_may_be_skipped(sounds, changes, problem):
    path = write(sounds, cut(0, sounds), cut(1, sounds, **changes), cut(2, sounds))
    with pytest.raises(DataError, match=r"cuts\.jsonl, line 2: ") as raised:
        list(read_lhotse(path))
    assert problem in str(raised.value) and ";" in str(raised.value)
    skipped = []
    assert [record.name for record in read_lhotse(path, skipped)] == ["a", "c"]
    assert [str(error) for error in skipped] == [str(raised.value)]
