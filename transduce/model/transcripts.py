"""Transcripts: hypotheses as text, JSON, or a TextGrid for Praat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp
from typing import Any

from transduce.alphabet import Alphabet
from transduce.decoding import Hypothesis


@dataclass(frozen=True)
class Transcript:
    """The hypotheses of one input, best first, in symbols."""

    name: str  # of the input
    hypotheses: tuple[Hypothesis, ...]
    alphabet: Alphabet
    separator: str  # between symbols: a space, or nothing where they are characters
    seconds_per_vector: float | None = None  # of the transcription; None unless it is of sound
    seconds: float | None = None  # the duration of the sound

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the symbols of the best hypothesis."""
        return tuple(self.alphabet.decode(self.hypotheses[0].labels))

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        others = f", and {len(self.hypotheses) - 1} more" if len(self.hypotheses) > 1 else ""
        return f"Transcript({self.name!r}: {self.output(self.hypotheses[0])}{others})"

    def output(self, hypothesis: Hypothesis) -> str:
        """Write the symbols of a hypothesis."""
        return self.separator.join(self.alphabet.decode(hypothesis.labels))

    def as_text(self, timestamps: bool = False) -> str:
        """Write the output; of several hypotheses, a line each with its probability.

        With `timestamps`, write a line for each label of the best hypothesis: the symbol, the
        start, peak and end of its emission, and its confidence.
        """
        if timestamps:
            return "\n".join(self._label_lines()) or ""
        if len(self.hypotheses) == 1:
            return self.output(self.hypotheses[0])
        return "\n".join(f"{exp(h.log_prob):.4f}\t{self.output(h)}" for h in self.hypotheses)

    def _label_lines(self) -> Iterator[str]:
        """Yield the lines of `as_text` with timestamps."""
        best = self.hypotheses[0]
        for symbol, timing in zip(self.alphabet.decode(best.labels), best.timings, strict=True):
            when = (self._time(v) for v in (timing.start, timing.frame, timing.end))
            yield "\t".join([symbol, *when, f"{timing.confidence:.3f}"])

    def _time(self, vector: int) -> str:
        """Write a time in seconds, or in vectors if the input is not sound."""
        if self.seconds_per_vector is None:
            return str(vector)
        return f"{vector * self.seconds_per_vector:.3f}"

    def as_json(self) -> dict[str, Any]:
        """Return all hypotheses as JSON values; times are in seconds, or vectors without sound."""
        scale = self.seconds_per_vector or 1
        return {
            "input": self.name,
            "seconds": self.seconds,
            "times_in": "seconds" if self.seconds_per_vector else "vectors",
            "hypotheses": [
                {
                    "output": self.output(h),
                    "symbols": self.alphabet.decode(h.labels),
                    "log_prob": h.log_prob,
                    "score": h.score,
                    "timings": [
                        {
                            "start": timing.start * scale,
                            "peak": timing.frame * scale,
                            "end": timing.end * scale,
                            "confidence": timing.confidence,
                        }
                        for timing in h.timings
                    ],
                }
                for h in self.hypotheses
            ],
        }

    def as_textgrid(self) -> str:
        """Write the best hypothesis as an interval tier: a label lasts until the next emission.

        Labels that are emitted at one vector divide its time equally.
        """
        best = self.hypotheses[0]
        scale = self.seconds_per_vector or 1.0
        starts = [time * scale for time in _starts(best.frames)]
        end = max(self.seconds or 0.0, (max(best.frames, default=0) + 1) * scale)
        marks = ["", *self.alphabet.decode(best.labels)]
        edges = [0.0, *starts, end]
        intervals = [
            (low, high, mark)
            for low, high, mark in zip(edges[:-1], edges[1:], marks, strict=True)
            if high > low
        ]
        lines = [
            'File type = "ooTextFile"',
            'Object class = "TextGrid"',
            "",
            "xmin = 0",
            f"xmax = {end:.6f}",
            "tiers? <exists>",
            "size = 1",
            "item []:",
            "    item [1]:",
            '        class = "IntervalTier"',
            '        name = "labels"',
            "        xmin = 0",
            f"        xmax = {end:.6f}",
            f"        intervals: size = {len(intervals)}",
        ]
        for number, (low, high, mark) in enumerate(intervals, 1):
            quoted = mark.replace('"', '""')
            lines += [
                f"        intervals [{number}]:",
                f"            xmin = {low:.6f}",
                f"            xmax = {high:.6f}",
                f'            text = "{quoted}"',
            ]
        return "\n".join(lines)


def _starts(frames: Sequence[int]) -> Iterator[float]:
    """Yield the start of each label in vectors; labels of one vector divide it equally."""
    for frame, equal in groupby(frames):
        count = len(list(equal))
        yield from (frame + i / count for i in range(count))


def json_lines(transcripts: Sequence[Transcript]) -> str:
    """Write each transcript as a line of JSON."""
    return "\n".join(json.dumps(t.as_json(), ensure_ascii=False) for t in transcripts)
