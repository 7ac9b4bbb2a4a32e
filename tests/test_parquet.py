"""Parquet files: columns, row groups, bounded memory, and rows that cannot be read."""

import re
import sys

import numpy as np
import pytest
from datasets import RATE, encoded, parquet_rows, parquet_table, write_parquet
from memory import extra_megabytes, needs_proc

from transduce.audio.cache import FrameReader
from transduce.audio.windows import sound_seconds
from transduce.data import parquet
from transduce.data.kinds import read_pairs
from transduce.data.pairs import DataError, Notation

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
CHARACTERS = Notation("characters", None)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a table to a file."""

    def written(table, **options):
        pq.write_table(table, tmp_path / "a.parquet", **options)
        return tmp_path / "a.parquet"

    return written


def pairs_of(path, target="text", skipped=None):
    return list(read_pairs(path, CHARACTERS, target, skipped))


@pytest.mark.parametrize("column", ["text", "sentence", "transcription", "transcript"])
def test_the_text_may_have_another_usual_name(write, column):
    path = write(parquet_table(parquet_rows(), column))
    assert "".join(pairs_of(path)[0].target) == "ab a"
    assert pairs_of(path) == pairs_of(path, column)


def test_lists_of_symbols_and_large_types_are_read(write):
    kind = pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary())])
    sounds = pa.array([row[0] for row in parquet_rows()], kind)
    symbols = pa.array([["ab", "c"]] * 4, pa.list_(pa.string()))
    path = write(pa.table({"sound": sounds, "phones": symbols, "n": pa.array(range(4))}))
    pairs = pairs_of(path, "phones")
    assert pairs[3].target == ("ab", "c") and sound_seconds(pairs[3].source) == 0.65
    with pytest.raises(DataError, match=r"no column 'text' for the target; choose one of phones"):
        pairs_of(path)


def test_rows_that_cannot_be_read_name_the_row(write):
    rows = parquet_rows()
    rows[0] = ({"bytes": None, "path": "gone.flac"}, "a")
    rows[1] = ({"bytes": b"no sound", "path": None}, "b")
    rows[2] = (rows[2][0], None)
    rows[3] = (None, "d")
    path = write(parquet_table(rows), row_group_size=3)
    with pytest.raises(DataError, match=f"{path}, row 3: text is None; it must be text"):
        pairs_of(path)
    skipped = []
    pairs = pairs_of(path, skipped=skipped)
    assert [pair.name for pair in pairs] == ["gone", "a-2", "a-4"] and len(skipped) == 1
    for cache in (None, path.parent / "cache"):
        skipped = []
        assert list(FrameReader(cache=cache).read_all(pairs, skipped)) == []
        told = [str(error) for error in skipped]
        for number, message in zip((1, 2, 4), told, strict=True):
            assert message.startswith(f"{path}, row {number} ")
        for message in (told[0], told[2]):
            assert "its bytes are null; embed the sounds when you write the Parquet file" in message
        assert told[1].startswith(f"{path}, row 2 is not audio that can be read (Format not")
        assert all(message.count(str(path)) == 1 for message in told)


def test_files_that_are_not_such_data_say_so(write, tmp_path):
    path = write(pa.table({"id": [1], "text": ["a"]}))
    with pytest.raises(DataError, match="no column of id, text is a struct with bytes of sounds;"):
        pairs_of(path)
    two = parquet_table(parquet_rows()).rename_columns(["x", "left", "text"])
    two = two.append_column("right", two.column("left"))
    with pytest.raises(DataError, match="several columns of sounds, left, right; name one of"):
        pairs_of(write(two))
    (tmp_path / "b.parquet").write_text("PAR1 no")
    with pytest.raises(DataError, match=r"b\.parquet: it is not a Parquet file that can be read"):
        pairs_of(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: there is no such file; check the path"):
        pairs_of(tmp_path / "c.parquet")


def test_a_damaged_row_group_is_skipped_alone(write):
    path = write(parquet_table(parquet_rows()), row_group_size=2, compression="zstd")
    column = pq.ParquetFile(path).metadata.row_group(1).column(3)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, row group 1: it cannot be read"):
        pairs_of(path)
    skipped = []
    assert [pair.name for pair in pairs_of(path, skipped=skipped)] == ["a", "b"]
    assert len(skipped) == 1


def test_the_splits_of_a_folder_are_not_mixed(tmp_path):
    folder = write_parquet(tmp_path)
    pq.write_table(parquet_table(parquet_rows()), folder / "test-00000-of-00001.parquet")
    sentence = f"{folder} has the files of several splits, test, train; give one of them, such as "
    with pytest.raises(DataError, match=re.escape(f"{sentence}'{folder}/test-*.parquet'")):
        pairs_of(folder)
    assert len(pairs_of(folder / "train-*.parquet")) == 4


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r'install it with pip install "transduce\[parquet\]"'):
        pairs_of(tmp_path / "a.parquet")


def test_sounds_are_read_a_row_group_at_a_time(write):
    rows = parquet_rows() * 5
    # As many row groups as are kept, so that a thread that comes late finds its own.
    path = write(parquet_table(rows), row_group_size=10)
    parquet._group.cache_clear()
    pairs = pairs_of(path)
    assert parquet._group.cache_info().misses == 0  # no sound has been read
    assert len(list(FrameReader().read_all(pairs, num_threads=4))) == 20
    assert parquet._group.cache_info().misses == 2
    FrameReader()(pairs[-1])
    assert parquet._group.cache_info().misses == 2
    path.write_bytes(path.read_bytes())
    FrameReader()(pairs[-1])
    assert parquet._group.cache_info().misses == 3  # the file may be another one


@needs_proc
def test_memory_is_bounded_by_row_groups(tmp_path):
    """A quarter of a gigabyte, in row groups of 8 MB, is read with a few of them in memory."""
    noise = np.random.default_rng(0).integers(-9999, 9999, 1_000_000).astype("<i2").tobytes()
    sound = encoded(0, "WAV")[:40] + len(noise).to_bytes(4, "little") + noise
    schema = parquet_table(parquet_rows()).schema
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for _ in range(32):
            writer.write_table(parquet_table([({"bytes": sound, "path": "a.wav"}, "a")] * 4))
    assert path.stat().st_size > 250_000_000
    found = []

    def read():
        found.append(sum(sound_seconds(pair.source) for pair in read_pairs(path, None)))

    assert extra_megabytes(read) < 100
    assert found == [pytest.approx(128 * 1_000_000 / RATE)]
