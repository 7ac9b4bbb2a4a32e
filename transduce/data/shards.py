"""Tar archives as WebDataset has them: `key.flac` and `key.txt` or `key.json`, one after the other.

Members are read where they lie; nothing is extracted, and no name is used as a path.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from transduce.data.pairs import SOUNDS, Audio, DataError, Member, Origin, skipping
from transduce.data.records import Record, file_name, json_object, name_of_field

MOST_TEXT = 1 << 20  # bytes of a member that holds a target
EXAMPLE = '{"text": ...}'


class _Sample(NamedTuple):
    """The members of a key, by the rest of their names after the first dot, in lower case."""

    key: str
    members: dict[str, Member]


def read_shards(
    paths: Sequence[Path], fields: Sequence[str], skipped: list[DataError] | None = None
) -> Iterator[Record]:
    """Yield the samples of tar archives, each with its JSON and those of `fields` that are members.

    The member `txt` is the field `text`.
    """
    for path in paths:
        with skipping(skipped), _open(path) as file:
            for sample in _samples(path, file):
                with skipping(skipped):
                    yield _record(path, file, sample, fields)


def shard_fields(path: Path) -> list[str]:
    """Return what the first sample of an archive has that may be a target."""
    with _open(path) as file:
        sample = next(_samples(path, file), None)
        if sample is None:
            return []
        others = [kind for kind in sample.members if f".{kind}" not in SOUNDS]
        return list(_texts(Origin(path), file, sample, others))


def _open(path: Path) -> tarfile.TarFile:
    if not path.is_file():
        raise Origin(path).error("there is no such file; check the path")
    try:
        return tarfile.open(path, "r:")
    except tarfile.TarError as error:
        raise Origin(path).error(
            f"it is not a tar archive that can be read ({error}); a compressed one must be "
            "decompressed first"
        ) from None


def _samples(path: Path, file: tarfile.TarFile) -> Iterator[_Sample]:
    """Yield members that follow each other and have the same key."""
    sample = None
    for member in _members(path, file):
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key, {})
        sample.members[kind.lower()] = member
    if sample is not None:
        yield sample


def _members(path: Path, file: tarfile.TarFile) -> Iterator[Member]:
    """Yield the regular files of an archive; leave out hidden ones, as those of macOS."""
    size, place = path.stat().st_size, "the archive"
    while True:
        try:
            member = file.next()
        except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError) as bad:
            raise Origin(path).error(
                f"it is damaged after {place} ({bad}); copy it again"
            ) from None
        if member is None:
            _check_end(path, file)
            return
        cast(Any, file).members.clear()  # which would hold all headers in memory
        place = f"member {member.name}"
        if not member.isreg() or PurePosixPath(member.name).name.startswith("."):
            continue
        if member.issparse() or member.offset_data + member.size > size:
            raise Origin(path, inside=place).error(
                "its bytes are not all in the archive; write or copy the archive again"
            )
        yield Member(member.name, member.offset_data, member.size)


def _check_end(path: Path, file: tarfile.TarFile) -> None:
    """Raise a DataError unless the archive ends with zeros, or with its last member."""
    assert file.fileobj is not None
    file.fileobj.seek(file.offset)
    if any(file.fileobj.read(tarfile.BLOCKSIZE)):
        raise Origin(path).error(f"it is damaged at byte {file.offset}; copy it again")


def _record(path: Path, file: tarfile.TarFile, sample: _Sample, fields: Sequence[str]) -> Record:
    sounds = [member for kind, member in sample.members.items() if f".{kind}" in SOUNDS]
    if len(sounds) != 1:
        raise Origin(path, inside=f"sample {sample.key}").error(
            f"there are {len(sounds)} sounds beside {', '.join(sample.members)}; a sample must "
            f"have one, such as {sample.key}.flac"
        )
    audio = Audio(path, inside=sounds[0])
    origin = Origin(path, inside=str(sounds[0]))
    texts = _texts(origin, file, sample, fields)
    if fields and not texts:
        raise origin.error(
            f"there is no text beside it; add {sample.key}.txt or {sample.key}.json, or leave it "
            "out"
        )
    return Record(file_name(sample.key), audio, origin, texts)


def _texts(
    origin: Origin, file: tarfile.TarFile, sample: _Sample, fields: Sequence[str]
) -> dict[str, Any]:
    """Read what a sample has beside its sound: all fields of its JSON, members of such names."""
    if not fields:
        return {}
    found: dict[str, Any] = {}
    if "json" in sample.members:
        found |= json_object(origin, _text(origin, file, sample.members["json"]), EXAMPLE)
    for field in fields:
        kind = "txt" if field == "text" and "txt" in sample.members else field
        if kind in sample.members and kind != "json":
            found["text" if kind == "txt" else kind] = _text(origin, file, sample.members[kind])
        elif (name := name_of_field(field, found)) is not None:
            found[field] = found[name]
    return found


def _text(origin: Origin, file: tarfile.TarFile, member: Member) -> str:
    """Read the text of a member."""
    if member.size > MOST_TEXT:
        raise origin.error(f"{member} has more than {MOST_TEXT} bytes; it is no text")
    assert file.fileobj is not None
    file.fileobj.seek(member.offset)  # the archive seeks by itself before it reads the next header
    try:
        return file.fileobj.read(member.size).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise origin.error(f"{member} is not UTF-8; convert it to UTF-8") from None
