"""Common Voice: a TSV file with a header, whose sounds are in the folder clips beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transduce.data.pairs import Audio, DataError, read_lines, skipping
from transduce.data.records import Record, existing_file, file_name, name_of_field, no_target

CLIPS = "clips"
COLUMNS = ("client_id", "path", "sentence")  # of every version


def is_header(line: str) -> bool:
    """Return whether a line is the header of a TSV file of Common Voice."""
    return set(COLUMNS) <= set(line.split("\t"))


def read_common_voice(
    path: Path, fields: Sequence[str], skipped: list[DataError] | None = None
) -> Iterator[Record]:
    """Yield the lines after the header, with those of `fields` that are columns.

    Raise a DataError if there are fields to read and none of them is a column.
    """
    lines = read_lines(path, skipped, separator="\t")
    origin, header = next(lines)
    columns = header.split("\t")
    named = {field: name for field in fields if (name := name_of_field(field, columns)) is not None}
    if fields and not named:
        raise no_target(origin, "column", fields[0], common_voice_fields(path))
    clips = [path.parent / CLIPS]
    for origin, line in lines:
        with skipping(skipped):
            values = line.split("\t")
            if len(values) != len(columns):
                raise origin.error(
                    f"there are {len(values)} columns where the header has {len(columns)}; "
                    "correct the line, or leave it out"
                )
            row = dict(zip(columns, values, strict=True))
            rule = f"sounds must be in the folder {CLIPS} beside the file"
            sound = existing_file(origin, row["path"], clips, rule)
            found = {field: row[name] for field, name in named.items()}
            yield Record(file_name(sound.stem), Audio(sound), origin, found)


def common_voice_fields(path: Path) -> list[str]:
    """Return the columns that may be targets."""
    _, header = next(read_lines(path, separator="\t"))
    return [name for name in header.split("\t") if name not in ("client_id", "path")]
