"""The bytes of sounds: of whole files, of members of tar archives, of rows of Parquet files."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from transduce.data.pairs import Audio, Cell
from transduce.data.parquet import read_cell

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class FilePart(io.RawIOBase):
    """Some bytes of an open file, as a file of their own."""

    def __init__(self, file: io.BufferedReader, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size
        self._at = 0  # from `offset`

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        number = self._file.readinto(view[: max(0, self._size - self._at)])
        self._at += number
        return number


@contextmanager
def open_sound(audio: Audio) -> Iterator[Path | BinaryIO]:
    """Yield what libsndfile reads a sound from: a path, or an open file of its bytes alone.

    Only a row of a Parquet file is read into memory. Raise a ContentError if that cannot be read.
    """
    if audio.inside is None:
        yield audio.path
    elif isinstance(audio.inside, Cell):
        yield io.BytesIO(read_cell(audio.path, audio.inside))
    else:
        with audio.path.open("rb") as file:
            yield cast(BinaryIO, FilePart(file, audio.inside.offset, audio.inside.size))


def sound_bytes(audio: Audio) -> bytes:
    """Read all bytes of a sound, encoded as it is."""
    with open_sound(audio) as file:
        return file.read_bytes() if isinstance(file, Path) else file.read()
