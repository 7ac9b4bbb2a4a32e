"""Intervals of sound as a TextGrid for Praat, and as subtitles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Marked = tuple[float, float, str]  # start, end and text of an interval, in seconds


def textgrid(tiers: Mapping[str, Sequence[Marked]], seconds: float) -> str:
    """Write interval tiers as a TextGrid; time that no interval covers gets one without text."""
    ends = [round(end, 6) for intervals in tiers.values() for _, end, _ in intervals]
    end = max([round(seconds, 6), *ends])
    lines = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {end:.6f}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    for place, (name, intervals) in enumerate(tiers.items(), 1):
        covering = _covering(intervals, end)
        lines += [
            f"    item [{place}]:",
            '        class = "IntervalTier"',
            f'        name = "{name}"',
            "        xmin = 0",
            f"        xmax = {end:.6f}",
            f"        intervals: size = {len(covering)}",
        ]
        for number, (low, high, mark) in enumerate(covering, 1):
            quoted = mark.replace('"', '""')
            lines += [
                f"        intervals [{number}]:",
                f"            xmin = {low:.6f}",
                f"            xmax = {high:.6f}",
                f'            text = "{quoted}"',
            ]
    return "\n".join(lines)


def _covering(intervals: Sequence[Marked], end: float) -> list[Marked]:
    """Round the intervals, and fill the time between them and up to `end`."""
    found, covered = list[Marked](), 0.0
    for low, high, mark in intervals:
        start = round(low, 6)
        if start > covered:
            found.append((covered, start, ""))
        covered = round(high, 6)
        found.append((start, covered, mark))
    if end > covered:
        found.append((covered, end, ""))
    return found


def subrip(cues: Iterable[Marked]) -> str:
    """Write subtitles in SubRip's format (.srt)."""
    return "".join(
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n\n"
        for number, (start, end, text) in enumerate(cues, 1)
    )


def webvtt(cues: Iterable[Marked]) -> str:
    """Write subtitles in the format WebVTT (.vtt)."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(start, '.')} --> {_clock(end, '.')}\n{text}\n\n" for start, end, text in cues
    )


def _clock(seconds: float, point: str) -> str:
    """Write a time as hours, minutes, seconds and milliseconds."""
    thousandths = round(1000 * seconds)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
