"""Lhotse's cuts: JSONL, also compressed by gzip, of MonoCuts with recordings in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.data.pairs import Audio, DataError, Origin, read_lines, skipping
from transduce.data.records import Record, existing_file, file_name, json_object, seconds

EXAMPLE = '{"id": ..., "type": "MonoCut", ...}'
# How to get rid of what is refused here.
SAVE = "save the sounds with cuts.save_audios(folder), and write the cuts that it returns"
# Fields of a supervision that are no targets.
OTHERS = ("id", "recording_id", "start", "duration", "channel", "custom", "alignment")


def is_lhotse(fields: dict[str, Any]) -> bool:
    """Return whether a JSON object is a line of one of Lhotse's manifests."""
    is_cut = str(fields.get("type", "")).endswith("Cut")
    return is_cut or "sources" in fields or ("recording_id" in fields and "start" in fields)


def read_lhotse(path: Path, skipped: list[DataError] | None = None) -> Iterator[Record]:
    """Yield the supervisions of all cuts as parts of their recordings, with all their fields.

    A cut without supervisions is a record without fields.
    """
    for origin, line in read_lines(path, skipped):
        supervisions = []
        with skipping(skipped):
            cut = json_object(origin, line, EXAMPLE)
            sound, whole = _recording(origin, cut)
            begin, length = (_needed(origin, cut, key) for key in ("start", "duration"))
            name = file_name(str(cut.get("id", sound.stem)))
            supervisions = _objects(origin, cut, "supervisions")
            if not supervisions:
                yield Record(name, _part(sound, whole, begin, length), origin, {})
        for number, supervision in enumerate(supervisions, start=1):
            with skipping(skipped):
                start = begin + _offset(origin, supervision)
                audio = _part(sound, whole, start, _needed(origin, supervision, "duration"))
                own = f"{name}-{number}" if len(supervisions) > 1 else name
                yield Record(own, audio, origin, _fields(supervision))


def _fields(supervision: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a supervision, which may have fields of the user's own."""
    custom = supervision.get("custom")
    fields = {name: value for name, value in supervision.items() if name not in OTHERS}
    return fields | (custom if isinstance(custom, dict) else {})


def _recording(origin: Origin, cut: dict[str, Any]) -> tuple[Path, float]:
    """Return the sound file of a cut, and its duration."""
    kind = cut.get("type")
    if kind is None:
        raise origin.error(
            "the line is of a manifest of recordings or supervisions; make cuts of both with "
            "`lhotse cut simple -r RECORDINGS -s SUPERVISIONS cuts.jsonl.gz`"
        )
    if kind != "MonoCut":
        raise origin.error(f"it is a {kind} where only a MonoCut can be read; {SAVE}")
    recording = cut.get("recording")
    if not isinstance(recording, dict):
        raise origin.error("the cut has no recording; make cuts with recordings, not features")
    if recording.get("transforms"):
        raise origin.error(f"the recording is to be transformed, which is not done here; {SAVE}")
    sources = _objects(origin, recording, "sources")
    if len(sources) != 1 or len(sources[0].get("channels") or ()) != 1:
        raise origin.error(f"the recording has several sources or channels; {SAVE}")
    kind, written = sources[0].get("type"), sources[0].get("source")
    if kind != "file":
        what = {"command": "a shell command, which is not run", "url": "a URL, which is not opened"}
        raise origin.error(
            f"the source of the recording is {what.get(str(kind), f'of type {kind!r}')}; {SAVE}"
        )
    if not isinstance(written, str):
        raise origin.error(f"the source of the recording is {written!r}; it must be a path")
    rule = "paths are relative to the file of cuts, or to the folder that you are in"
    path = existing_file(origin, written, [origin.file.parent, Path.cwd()], rule)
    return path, _needed(origin, recording, "duration")


def _part(path: Path, whole: float, start: float, duration: float) -> Audio:
    """Return the sound from `start`; the file itself if that is all of it."""
    start = max(0.0, start)
    is_whole = start == 0.0 and duration >= whole
    return Audio(path, None if is_whole else start, min(duration, whole - start))


def _needed(origin: Origin, fields: dict[str, Any], key: str) -> float:
    value = seconds(origin, fields, key)
    if value is None:
        raise origin.error(f"there is no {key} in the cut or its recording; write it in seconds")
    return value


def _offset(origin: Origin, supervision: dict[str, Any]) -> float:
    """Return the start of a supervision in its cut, which is below 0 if it begins earlier."""
    start = supervision.get("start")
    if isinstance(start, int | float) and start < 0:
        return -(seconds(origin, {"start": -start}, "start") or 0.0)
    return _needed(origin, supervision, "start")


def _objects(origin: Origin, fields: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = fields.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise origin.error(f"{key} is not a list of objects; write the cuts with Lhotse again")
    return found
