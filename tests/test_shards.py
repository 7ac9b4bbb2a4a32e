"""Tar archives: samples, members that lie where they are, damage, and names that are paths."""

import io
import json
import tarfile
from functools import partial

import pytest
from commands import transduce
from datasets import encoded, samples, write_tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import extra_megabytes, needs_proc

from transduce.audio.sound import read_wave
from transduce.audio.windows import sound_seconds
from transduce.data.contents import FilePart, sound_bytes
from transduce.data.kinds import read_pairs
from transduce.data.pairs import DataError, Notation
from transduce.data.shards import read_shards

CHARACTERS = Notation("characters", None)
SOUND = encoded(0)


def pairs_of(path, target="text", skipped=None):
    return list(read_pairs(path, CHARACTERS, target, skipped))


def test_texts_come_from_members_and_from_json(tmp_path):
    fields = json.dumps({"sentence": "cd", "phones": ["x", "y"]}).encode()
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("one.wav", encoded(1, "WAV")),
            ("one.txt", b"\xef\xbb\xbfab\n"),
            ("two.json", fields),
            ("two.FLAC", SOUND),
            ("two.words", b"e f"),
            ("deep/two.flac", SOUND),
            ("deep/two.cls", b"1"),
            ("deep/two.txt", b"gh"),
        ],
    )
    pairs = pairs_of(path)
    assert ["".join(pair.target) for pair in pairs] == ["ab", "cd", "gh"]
    assert [pair.name for pair in pairs] == ["one", "two", "deep-two"]
    assert str(pairs[0].origin) == str(pairs[0].source) == f"{path}, member one.wav"
    assert sound_bytes(pairs[0].source) == encoded(1, "WAV")
    assert len(read_wave(pairs[0].source, 16_000)) == len(samples(1))
    skipped = []
    (pair,) = pairs_of(path, "phones", skipped)
    assert pair.target == ("x", "y") and len(skipped) == 2
    (pair,) = pairs_of(path, "words", [])
    assert pair.target == ("e", " ", "f")


def test_an_archive_may_end_with_the_last_byte_of_its_last_member(tmp_path):
    text = 256 * b"ab"  # a block, so that nothing pads it
    path = write_tar(tmp_path / "a.tar", [("one.wav", encoded(1, "WAV")), ("one.txt", text)])
    content = path.read_bytes()
    path.write_bytes(content[: content.index(text) + len(text)])
    [pair] = pairs_of(path)
    assert "".join(pair.target).encode() == text


def test_a_part_of_a_file_is_a_file_that_can_be_buffered_and_sought(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        part = FilePart(file, 2, 5)
        assert part.readable() and part.seekable()
        buffered = io.BufferedReader(part)
        assert buffered.read() == b"23456"
        assert buffered.seek(-2, io.SEEK_END) == 3
        assert buffered.read() == b"56"


BAD_SAMPLES = [
    ([("b.flac", SOUND)], "member b.flac: there is no text beside it; add b.txt or b.json, or"),
    ([("b.txt", b"x")], "sample b: there are 0 sounds beside txt; a sample must have one, such as"),
    ([("b.flac", SOUND), ("b.wav", SOUND)], "sample b: there are 2 sounds"),
    ([("b.flac", SOUND), ("b.txt", b" ")], "member b.flac: text is empty; transcribe it"),
    ([("b.flac", SOUND), ("b.txt", b"\xff")], "member b.txt is not UTF-8; convert it"),
    ([("b.flac", SOUND), ("b.json", b"{")], "not JSON"),
    ([("b.flac", SOUND), ("b.json", b"[]")], "not a JSON object"),
    ([("b.flac", SOUND), ("b.json", b'{"x": 1}')], "no field 'text' for the target; choose one of"),
    (
        [("b.flac", SOUND), ("b.txt", b"x" * (1 << 21))],
        "has more than 1048576 bytes; it is no text",
    ),
]


@pytest.mark.parametrize("members, problem", BAD_SAMPLES, ids=[p for _, p in BAD_SAMPLES])
def test_a_bad_sample_is_a_sentence_and_may_be_skipped(tmp_path, members, problem):
    good = [[(f"{name}.flac", SOUND), (f"{name}.txt", b"x")] for name in "ac"]
    path = write_tar(tmp_path / "a.tar", good[0] + members + good[1])
    with pytest.raises(DataError, match=r"a\.tar, ") as raised:
        pairs_of(path)
    assert problem in str(raised.value)
    skipped = []
    assert [pair.name for pair in pairs_of(path, skipped=skipped)] == ["a", "c"]
    assert [str(error) for error in skipped] == [str(raised.value)]


def test_nothing_but_regular_files_is_read(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name, kind in (("x.flac", tarfile.SYMTYPE), ("y.flac", tarfile.LNKTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "/etc/passwd"
            file.addfile(header)
        file.addfile(tarfile.TarInfo("._a.flac"))
        for name, content in (("a.flac", SOUND), ("a.txt", b"a")):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            file.addfile(header, io.BytesIO(content))
    assert [pair.name for pair in pairs_of(path)] == ["a"]


def test_names_that_are_paths_never_leave_the_output_folder(tmp_path):
    names = ["../../up", "/absolute/one", "..", "a\\b"]
    members = [
        member for name in names for member in ((f"{name}.flac", SOUND), (f"{name}.txt", b"x"))
    ]
    path = write_tar(tmp_path / "a.tar", members)
    (tmp_path / "in").mkdir()
    transduce("recognize", path, "--output", "out", folder=tmp_path / "in")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.tar", "in"]
    assert [one.name for one in (tmp_path / "in").iterdir()] == ["out"]
    assert all(one.is_file() for one in (tmp_path / "in" / "out").iterdir())


@pytest.fixture
def archive(tmp_path):
    members = [(f"{n}.{kind}", SOUND if kind == "flac" else b"x") for n in "ab" for kind in KINDS]
    return write_tar(tmp_path / "a.tar", members)


KINDS = ("txt", "flac")


def test_an_archive_that_was_cut_off_keeps_its_whole_samples(archive):
    with tarfile.open(archive) as file:
        last = file.getmember("b.flac")
    archive.write_bytes(archive.read_bytes()[: last.offset_data + 100])
    with pytest.raises(DataError, match=r"a\.tar, member b\.flac: its bytes are not all in the"):
        pairs_of(archive)
    skipped = []
    assert [pair.name for pair in pairs_of(archive, skipped=skipped)] == ["a"]
    assert len(skipped) == 1


def test_an_archive_with_noise_between_its_members_says_where(archive):
    with tarfile.open(archive) as file:
        offset = file.getmember("b.txt").offset
    content = bytearray(archive.read_bytes())
    content[offset : offset + 512] = b"\x55" * 512
    archive.write_bytes(content)
    with pytest.raises(DataError, match=f"a.tar: it is damaged at byte {offset}; copy it again"):
        pairs_of(archive)


def test_what_is_no_archive_says_so(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match=r"a\.tar: it is not a tar archive that can be read"):
        pairs_of(tmp_path / "a.tar")


def test_a_member_that_claims_terabytes_takes_no_memory(tmp_path):
    header = tarfile.TarInfo("a.flac")
    header.size = 1 << 42
    (tmp_path / "a.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(DataError, match="its bytes are not all in the archive"):
        pairs_of(tmp_path / "a.tar")


@needs_proc
def test_the_members_of_an_archive_are_not_kept_in_memory(tmp_path):
    members = [(f"{n:06}.{kind}", b"x") for n in range(10_000) for kind in KINDS]
    path = write_tar(tmp_path / "a.tar", members)
    count = []
    read = partial(read_pairs, path, CHARACTERS)
    assert (
        extra_megabytes(lambda: count.append(sum(1 for _ in read()))) < 12
    )  # kept, they would take 30
    assert count == [10_000]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_archive_raises_data_errors_alone(archive, data):
    content = bytearray(archive.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    damaged = archive.with_name("damaged.tar")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    skipped = []
    for record in read_shards([damaged], ("text",), skipped):
        sound_seconds(record.source)
    assert all(isinstance(error, DataError) for error in skipped)


@given(st.binary(max_size=60), st.integers(0, 70), st.integers(0, 70), st.data())
def test_a_part_of_a_file_reads_and_seeks_as_a_file(content, offset, size, data):
    expected = io.BytesIO(content[offset : offset + size])
    size = len(expected.getvalue())
    part = FilePart(io.BufferedReader(io.BytesIO(content)), offset, size)
    for _ in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()):
            number = data.draw(st.integers(0, 40))
            assert part.read(number) == expected.read(number)
        else:
            place, whence = data.draw(st.integers(0, 80)), data.draw(st.sampled_from([0, 1, 2]))
            assert part.seek(place, whence) == expected.seek(place, whence)
        assert part.tell() == expected.tell()
