"""Parquet files as Hugging Face writes them: a column of sounds, struct<bytes, path>, and others.

pyarrow reads them, which the extra `parquet` installs. It is imported when the first file is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from transduce.data.pairs import Audio, Cell, DataError, Origin, skipping
from transduce.data.records import Record, file_name, name_of_field, no_target

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

# Row groups whose sounds stay in memory: two, because threads that read ahead cross from one to the
# next. Rows that are read in another order may decode a row group for each sound.
GROUPS_KEPT = 2


class ContentError(ValueError):
    """The error of a sound that cannot be taken out of its file: a reason."""


def read_parquet(
    paths: Sequence[Path], fields: Sequence[str], skipped: list[DataError] | None = None
) -> Iterator[Record]:
    """Yield the rows of Parquet files, with those of `fields` that are columns.

    Only names and fields are read, a row group at a time; `read_cell` reads a sound. Raise a
    DataError if there are fields to read and a file has none of them.
    """
    for path in paths:
        with skipping(skipped), _open(path) as file:
            yield from _rows(path, file, fields, skipped)


def parquet_fields(path: Path) -> list[str]:
    """Return the columns of a Parquet file that may be targets: text, or lists of text."""
    with _open(path) as file:
        return _text_columns(file.schema_arrow)


def read_cell(path: Path, cell: Cell) -> bytes:
    """Read the bytes of a sound; raise a ContentError if there are none.

    Its whole row group is read, and kept for the next calls.
    """
    state = path.stat()
    with _LOCK:
        sounds = _group(path, cell.group, cell.column, (state.st_mtime_ns, state.st_size))
    content: bytes | None = sounds[cell.place].as_py() if cell.place < len(sounds) else None
    if content is None:
        raise ContentError("its bytes are null; embed the sounds when you write the Parquet file")
    return content


_LOCK = threading.Lock()  # so that threads that want the same row group read it once


@lru_cache(GROUPS_KEPT)
def _group(path: Path, group: int, column: str, state: tuple[int, int]) -> Any:
    """Read the sounds of a row group as an Arrow array; `state` tells a file that has changed."""
    import pyarrow

    try:
        with _open(path) as file:
            read = file.read_row_group(group, columns=[f"{column}.bytes"], use_threads=False)
    except (pyarrow.ArrowException, OSError, IndexError, KeyError) as error:
        raise ContentError(f"row group {group} cannot be read: {_reason(error)}") from None
    return read.column(0).combine_chunks().field("bytes")


def _open(path: Path) -> ParquetFile:
    """Open a Parquet file; raise a DataError if it is none."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f'{path} needs pyarrow to be read; install it with pip install "transduce[parquet]"'
        ) from None
    if not path.is_file():
        raise Origin(path).error("there is no such file; check the path")
    try:
        return ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise Origin(path).error(
            f"it is not a Parquet file that can be read ({_reason(error)}); copy it again"
        ) from None


def _rows(
    path: Path, file: ParquetFile, fields: Sequence[str], skipped: list[DataError] | None
) -> Iterator[Record]:
    import pyarrow

    schema = file.schema_arrow
    column = _sound_column(path, schema)
    texts = _text_columns(schema)
    named = {field: name for field in fields if (name := name_of_field(field, texts)) is not None}
    if fields and not named:
        raise no_target(Origin(path), "column", fields[0], texts)
    has_names = schema.field(column).type.get_field_index("path") >= 0
    columns = [*dict.fromkeys(named.values()), *([f"{column}.path"] if has_names else [])]
    number = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        first, number = number, number + num_rows
        rows: list[dict[str, Any]] = [{}] * num_rows
        with skipping(skipped):
            try:
                if columns:
                    rows = file.read_row_group(group, columns, use_threads=False).to_pylist()
            except (pyarrow.ArrowException, OSError) as error:
                raise Origin(path, inside=f"row group {group}").error(
                    f"it cannot be read ({_reason(error)}); copy the file again"
                ) from None
            for place, row in enumerate(rows):
                audio = Audio(path, inside=Cell(column, first + place + 1, group, place))
                written = (row.get(column) or {}).get("path")
                stem = PurePosixPath(written).stem if isinstance(written, str) else ""
                name = file_name(stem or f"{path.stem}-{first + place + 1}")
                origin = Origin(path, inside=str(audio.inside))
                found = {field: row.get(name) for field, name in named.items()}
                yield Record(name, audio, origin, found)


def _sound_column(path: Path, schema: Schema) -> str:
    """Return the column of sounds: `audio`, or the only struct that has bytes."""
    from pyarrow import types

    found = [
        field.name
        for field in schema
        if types.is_struct(field.type)
        and (place := field.type.get_field_index("bytes")) >= 0
        and _is_binary(field.type.field(place).type)
    ]
    if "audio" in found or len(found) == 1:
        return "audio" if "audio" in found else found[0]
    problem = f"there are several columns of sounds, {', '.join(found)}"
    if not found:
        problem = f"no column of {', '.join(schema.names)} is a struct with bytes of sounds"
    raise Origin(path).error(f"{problem}; name one of them audio: struct<bytes, path>")


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _text_columns(schema: Schema) -> list[str]:
    """Return the columns of text, and of lists of text."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def is_list(kind: Any) -> bool:
        return bool(types.is_list(kind) or types.is_large_list(kind))

    return [
        field.name
        for field in schema
        if is_text(field.type) or (is_list(field.type) and is_text(field.type.value_type))
    ]


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
