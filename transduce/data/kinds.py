"""Sounds with targets in any format: which one a path holds is recognised by looking at it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from glob import glob
from pathlib import Path
from typing import NamedTuple

from transduce.data.common_voice import common_voice_fields, is_header, read_common_voice
from transduce.data.kaldi import WAVES, kaldi_fields, read_kaldi
from transduce.data.lhotse import is_lhotse, read_lhotse
from transduce.data.manifest import EXAMPLE, manifest_records
from transduce.data.pairs import DataError, Frames, Notation, Origin, Pair, read_lines, skipping
from transduce.data.parquet import parquet_fields, read_parquet
from transduce.data.records import Record, json_object, target_fields_of
from transduce.data.shards import read_shards, shard_fields

COMPRESSED_TARS = re.compile(r"\.(tgz|tar\.\w+)$")
SPLIT = re.compile(r"(.+)-\d+-of-\d+\.parquet")  # as Hugging Face names the files of a split


class Kind(Enum):
    """A format of sounds with targets; the value describes it in messages."""

    MANIFEST = "a JSONL manifest"
    KALDI = "a Kaldi data directory"
    LHOTSE = "Lhotse cuts"
    COMMON_VOICE = "a TSV file of Common Voice"
    PARQUET = "Parquet"
    SHARDS = "tar archives"


def recognise(path: Path) -> Kind | None:
    """Return the format of a file, a folder, or files that a pattern such as a/*.tar matches.

    Return None for anything else, such as a folder of sounds or a text file. Raise a DataError for
    a format that is known but cannot be read.
    """
    if path.is_dir():
        if (path / WAVES).is_file() or (path / "feats.scp").is_file():
            return Kind.KALDI
        return next((kind for kind in SUFFIXES if any(path.glob(f"*{SUFFIXES[kind]}"))), None)
    files = matches(path)
    if files is not None:
        return next((kind for kind in SUFFIXES if files[0].suffix == SUFFIXES[kind]), None)
    if COMPRESSED_TARS.search(path.name):
        raise Origin(path).error(
            "it is compressed, so that its members cannot be read one by one; decompress it"
        )
    by_suffix = next((kind for kind in SUFFIXES if path.suffix == SUFFIXES[kind]), None)
    return by_suffix or _kind_of_lines(path)


SUFFIXES = {Kind.PARQUET: ".parquet", Kind.SHARDS: ".tar"}


def read_records(
    path: Path, fields: Sequence[str] = (), skipped: list[DataError] | None = None
) -> Iterator[Record]:
    """Yield the sounds of a path of any kind, with those of `fields` that are there.

    Without fields, targets are not read. Nothing that was yielded is kept in memory.
    """
    kind = recognise(path)
    if kind is Kind.KALDI:
        return read_kaldi(path, fields, skipped)
    if kind is Kind.LHOTSE:
        return read_lhotse(path, skipped)
    if kind is Kind.COMMON_VOICE:
        return read_common_voice(path, fields, skipped)
    if kind is Kind.PARQUET:
        return read_parquet(_files(path, kind), fields, skipped)
    if kind is Kind.SHARDS:
        return read_shards(_files(path, kind), fields, skipped)
    return manifest_records(path, skipped)


def read_pairs(
    path: Path,
    notation: Notation | None,
    target: str = "text",
    skipped: list[DataError] | None = None,
) -> Iterator[Pair]:
    """Yield the pairs of a path of any kind; `notation` splits the text of field `target`.

    Without a notation, leave targets empty, as for transcription.
    """
    fields = () if notation is None else target_fields_of(target)
    for record in read_records(path, fields, skipped):
        with skipping(skipped):
            yield record.pair(notation, target)


def target_fields(path: Path) -> list[str]:
    """Return the fields of a path of any kind, or of its first line, that may be targets."""
    kind = recognise(path)
    if kind is Kind.KALDI:
        return kaldi_fields(path)
    if kind is Kind.COMMON_VOICE:
        return common_voice_fields(path)
    if kind is Kind.PARQUET:
        return parquet_fields(_files(path, kind)[0])
    if kind is Kind.SHARDS:
        return shard_fields(_files(path, kind)[0])
    first = next(read_records(path), None)
    return [] if first is None else list(first.fields)


class Spoken(NamedTuple):
    """A sound, and the words or phones that are said in it."""

    pair: Pair  # without a target
    text: str | None
    phones: str | Sequence[str] | None  # if there is no text


def read_spoken(path: Path, skipped: list[DataError] | None = None) -> Iterator[Spoken]:
    """Yield the sounds of a path of any kind with the field `text`, or else `phones`, of each."""
    for record in read_records(path, ("text", "phones"), skipped):
        with skipping(skipped):
            if isinstance(record.source, Frames):
                raise record.origin.error("there is no sound; give audio_filepath")
            name = "text" if record.fields.get("text") is not None else "phones"
            said = record.fields.get(name)
            listed = isinstance(said, list) and all(isinstance(one, str) for one in said)
            if not (isinstance(said, str) or (name == "phones" and listed)):
                problem = "there is neither text nor phones"
                if name in record.fields:
                    problem = f"{name} is {said!r}, neither words nor phones"
                raise record.origin.error(f"{problem}; write the words that are said")
            pair = record.pair(None)
            yield Spoken(pair, *((said, None) if name == "text" else (None, said)))


def _kind_of_lines(path: Path) -> Kind | None:
    """Return the format of a file of lines, which the first one tells."""
    if not path.is_file():
        return Kind.MANIFEST if ".jsonl" in path.suffixes else None
    try:
        origin, line = next(read_lines(path))
    except DataError:  # it is empty, or not text
        return Kind.MANIFEST if ".jsonl" in path.suffixes else None
    if is_header(line):
        return Kind.COMMON_VOICE
    if not line.lstrip().startswith("{"):
        return Kind.MANIFEST if ".jsonl" in path.suffixes else None
    try:
        is_cut = is_lhotse(json_object(origin, line, EXAMPLE))
    except DataError:
        is_cut = False
    return Kind.LHOTSE if is_cut else Kind.MANIFEST


def matches(path: Path) -> list[Path] | None:
    """Return the files that a pattern matches, sorted; None for a path that is no pattern."""
    if path.exists() or not re.search(r"[*?[]", str(path)):
        return None
    files = sorted(Path(name) for name in glob(str(path), recursive=True))
    if not files:
        raise DataError(f"no file matches {path}; check the pattern")
    return files


def _files(path: Path, kind: Kind) -> list[Path]:
    """Return the Parquet files or tar archives of a path, sorted: several, or itself."""
    files = matches(path)
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIXES[kind]}"))
        splits = sorted({found[1] for file in files if (found := SPLIT.fullmatch(file.name))})
        if len(splits) > 1:
            raise DataError(
                f"{path} has the files of several splits, {', '.join(splits)}; give one of them, "
                f"such as '{path / splits[0]}-*.parquet'"
            )
    files = [path] if files is None else files
    for file in files:
        if file.suffix != SUFFIXES[kind]:
            raise DataError(f"{path} matches {file}, which is not {kind.value}; narrow the pattern")
    return files
