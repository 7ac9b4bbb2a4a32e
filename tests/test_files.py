"""Atomic writes: whole files, many writers, failures that leave nothing behind."""

import errno
import threading
from pathlib import Path

import pytest

from transduce.files import write_by_rename, write_folder_by_rename


def test_a_file_is_written_and_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "a.bin"
    for content in (b"first", b"second"):
        write_by_rename(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_the_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("a" * 255)
    write_by_rename(path, b"content")
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"before"])
def test_an_error_names_the_file_and_leaves_nothing_beside_it(
    tmp_path, monkeypatch, failing, before
):
    path = tmp_path / "a.bin"
    if before is not None:
        path.write_bytes(before)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"transduce.files.os.{failing}", fail)
    with pytest.raises(OSError, match="No space") as failure:
        write_by_rename(path, b"after")
    assert failure.value.filename == str(path)
    assert "unfinished" not in str(failure.value) and "None" not in str(failure.value)
    assert [(file, file.read_bytes()) for file in tmp_path.iterdir()] == (
        [] if before is None else [(path, before)]
    )


def test_an_interrupted_write_leaves_nothing_beside_the_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("transduce.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_by_rename(tmp_path / "a.bin", b"content")
    assert list(tmp_path.iterdir()) == []


def test_many_writers_of_one_path_do_not_meet(tmp_path):
    path, failures = tmp_path / "a.bin", []

    def write(content):
        try:
            for _ in range(20):
                write_by_rename(path, content)
        except OSError as error:
            failures.append(error)

    contents = [bytes([n]) * 100_000 for n in range(8)]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_folder_that_cannot_be_written_whole_is_not_written(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"transduce.files.os.{failing}", fail)
    with pytest.raises(OSError, match="No space") as failure:
        write_folder_by_rename(tmp_path / "out", {"a": b"1", "b": b"2"})
    assert failure.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    make = Path.mkdir

    def fail(path, *arguments, **options):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match="No space") as failure:
        write_folder_by_rename(tmp_path / "out", {"a": b"1"})
    assert failure.value.filename == str(tmp_path / "out")


def test_a_folder_is_written_with_all_its_files(tmp_path):
    folder = tmp_path / "new" / "out"
    write_folder_by_rename(folder, {"a": b"1", "b": b"2"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"1", "b": b"2"}
    assert list(folder.parent.iterdir()) == [folder]
