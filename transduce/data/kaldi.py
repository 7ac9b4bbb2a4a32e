"""Kaldi data directories: wav.scp, text, and perhaps segments.

Nothing in them is run: a line of wav.scp that is a shell command is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from transduce.data.pairs import Audio, DataError, Origin, read_lines, skipping
from transduce.data.records import Record, existing_file, file_name, no_target

WAVES, SEGMENTS = "wav.scp", "segments"
# Files of a data directory that are no targets.
OTHERS = re.compile(r"wav\.scp|segments|feats\.scp|cmvn\.scp|vad\.scp|spk2.*|utt2.*|reco2.*|.*\..*")


def read_kaldi(
    folder: Path, fields: Sequence[str], skipped: list[DataError] | None = None
) -> Iterator[Record]:
    """Yield the utterances of a data directory, with those of the files `fields` that are there.

    The utterances are the lines of segments, or those of wav.scp if there is no such file. Files in
    the same order, as Kaldi sorts them, take no memory; lines that come early are kept. Raise a
    DataError if there are fields to read and none of the files.
    """
    targets = {
        field: _Table(folder / field, skipped) for field in fields if (folder / field).is_file()
    }
    if fields and not targets:
        raise no_target(Origin(folder), "file", fields[0], kaldi_fields(folder))
    if not (folder / WAVES).is_file():
        raise Origin(folder).error("there is no wav.scp, which names the sounds; write one")
    has_segments = (folder / SEGMENTS).is_file()
    utterances = _segments(folder, skipped) if has_segments else _recordings(folder, skipped)
    for utterance, audio, origin in utterances:
        with skipping(skipped):
            texts = {field: table.take(utterance) for field, table in targets.items()}
            found = {field: text for field, text in texts.items() if text is not None}
            if targets and not found:
                raise origin.error(
                    f"utterance {utterance!r} has no line in {next(iter(targets))}; add it, or "
                    "run utils/fix_data_dir.sh"
                )
            yield Record(file_name(utterance), audio, origin, found)
    driver = SEGMENTS if has_segments else WAVES
    for table in targets.values():
        for utterance, origin in table.rest():
            with skipping(skipped):
                raise origin.error(
                    f"utterance {utterance!r} has no line of its own in {driver}, or one that "
                    "cannot be used; correct it, or run utils/fix_data_dir.sh"
                )


def kaldi_fields(folder: Path) -> list[str]:
    """Return the files of a data directory that may be targets."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [name for name in names if not OTHERS.fullmatch(name)]


class _Line(NamedTuple):
    origin: Origin
    value: str


class _Table:
    """The lines `id value` of a file, looked up by id; those that were passed stay in memory."""

    def __init__(self, path: Path, skipped: list[DataError] | None) -> None:
        self._lines = _entries(path, skipped)
        self._passed: dict[str, _Line] = {}
        self._skipped = skipped

    def take(self, key: str) -> str | None:
        """Return the value of an id, and forget it; None if there is none."""
        line = self._passed.pop(key, None)
        if line is not None:
            return line.value
        for origin, found, value in self._lines:
            if found == key:
                return value
            with skipping(self._skipped):
                self._keep(origin, found, value)
        return None

    def rest(self) -> Iterator[tuple[str, Origin]]:
        """Yield the ids that nobody has taken."""
        yield from ((key, line.origin) for key, line in self._passed.items())
        yield from ((key, origin) for origin, key, _ in self._lines)

    def _keep(self, origin: Origin, key: str, value: str) -> None:
        if key in self._passed:
            before = self._passed[key].origin.line
            raise origin.error(f"{key!r} is on line {before} already; leave one of them out")
        self._passed[key] = _Line(origin, value)


def _entries(path: Path, skipped: list[DataError] | None) -> Iterator[tuple[Origin, str, str]]:
    """Yield the origin, the id and the rest of each line."""
    for origin, line in read_lines(path, skipped):
        key, _, value = line.strip().partition(" ")
        if "\t" in key:
            key, _, value = line.strip().partition("\t")
        yield origin, key, value.strip()


def _recordings(
    folder: Path, skipped: list[DataError] | None
) -> Iterator[tuple[str, Audio, Origin]]:
    """Yield the id and sound of each line of wav.scp."""
    for origin, recording, written in _entries(folder / WAVES, skipped):
        with skipping(skipped):
            yield recording, Audio(_sound_file(origin, recording, written)), origin


def _segments(folder: Path, skipped: list[DataError] | None) -> Iterator[tuple[str, Audio, Origin]]:
    """Yield the id and part of a sound of each line of segments: `id recording start end`."""
    # The recordings are few beside their segments, so all may stay in memory.
    sounds: dict[str, Path | DataError] = {}
    for origin, recording, written in _entries(folder / WAVES, skipped):
        try:
            sounds[recording] = _sound_file(origin, recording, written)
        except DataError as error:
            if skipped is None:
                raise
            sounds[recording] = error
    for origin, utterance, written in _entries(folder / SEGMENTS, skipped):
        with skipping(skipped):
            columns = written.split()
            if len(columns) not in (3, 4):
                raise origin.error(
                    "there must be four columns: utterance, recording, start and end in seconds"
                )
            sound = sounds.get(columns[0])
            if sound is None:
                raise origin.error(f"recording {columns[0]!r} is not in wav.scp; add it")
            if isinstance(sound, DataError):
                raise sound
            start, end = _times(origin, columns[1:3])
            yield utterance, Audio(sound, start, end - start), origin


def _times(origin: Origin, columns: Sequence[str]) -> tuple[float, float]:
    try:
        start, end = map(float, columns)
    except ValueError:
        start = end = math.nan
    if not 0 <= start < end < math.inf:
        raise origin.error(
            f"{columns[0]} and {columns[1]} are not the start and end of a segment; give seconds"
        )
    return start, end


def _sound_file(origin: Origin, recording: str, written: str) -> Path:
    """Return the path on a line of wav.scp; refuse commands and archives."""
    if written.endswith("|"):
        raise origin.error(
            f"the sound of {recording!r} is the output of a shell command, which is not run; write "
            "the sounds to files, for example with wav-copy, and name them here"
        )
    if not written or written == "-":
        raise origin.error(f"there is no path for {recording!r}; name a sound file")
    if re.search(r"\.ark(:\d+)?(\[.*\])?$", written):
        raise origin.error(
            f"the sound of {recording!r} lies in a Kaldi archive, which is not read; write the "
            "sounds to files, for example with wav-copy, and name them here"
        )
    rule = "paths are relative to the data directory, or to the folder that you are in"
    return existing_file(origin, written, [origin.file.parent, Path.cwd()], rule)
