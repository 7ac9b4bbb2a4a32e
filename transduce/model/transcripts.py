"""Transcripts: hypotheses as text, JSON, or a TextGrid for Praat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import exp, inf
from pathlib import Path
from typing import Any, NamedTuple

from transduce.alphabet import Alphabet
from transduce.data.pairs import Recording
from transduce.decoding import Hypothesis
from transduce.decoding.hypothesis import join_hypotheses
from transduce.model.formats import textgrid

# The interval of a label in sound, in seconds. A transducer emits a phone soon after it has begun.
# Against the hand labels of 160 TIMIT sentences, these numbers place 60 % of the boundaries within
# 20 ms, and a LEAD of 0.03 places 54 % (benchmarks/boundaries.py TIMIT --emissions).
LEAD = 0.045  # a label starts at most so long before its peak
PAUSE = 0.25  # peaks further apart have a pause between them: fewer pauses against surer ones
LAST = 0.1  # a label before a pause ends so long after its peak


class Span(NamedTuple):
    """The interval of a label, and the time of its emission on the best alignment."""

    start: float
    peak: float
    end: float


@dataclass(frozen=True)
class Transcript:
    """The hypotheses of one input, best first, in symbols.

    Times are in seconds if the input is sound; otherwise they are transcription vectors from 0.
    """

    name: str  # of the input
    hypotheses: tuple[Hypothesis, ...]
    alphabet: Alphabet
    separator: str  # between symbols: a space, or nothing where they are characters
    seconds_per_vector: float | None = None  # of the transcription; None unless it is of sound
    seconds: float | None = None  # the duration of the sound
    offset: float = 0.0  # seconds from the start of the sound to that of vector 0
    path: Path | None = None  # the file of the input
    recording: Recording | None = None  # the sound as it was read

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

    # --- Times ---

    def spans(self, hypothesis: Hypothesis) -> list[Span]:
        """Return the interval of each label; intervals never overlap.

        In sound, the peak of a label is the middle of the vector that emits it. The label starts
        half-way since the previous peak, but at most LEAD before its own, and lasts until the next
        one starts. If the next peak is more than PAUSE away, it ends LAST after its peak, and the
        time between is a pause. Otherwise, a label lasts from its vector to that of the next label.
        Labels of one vector divide it equally.
        """
        if len(hypothesis.frames) != len(hypothesis.labels):
            raise ValueError("there are no timings; ask for them with with_timings=True")
        if not hypothesis.frames:
            return []
        shares = list(_shares(hypothesis.frames))
        if self.seconds_per_vector is None:
            starts = [float(frame + low) for frame, low, _ in shares]
            ends = [*starts[1:], hypothesis.frames[-1] + 1.0]
            peaks: list[float] = list(hypothesis.frames)
        else:
            peaks = [self._peak(*share) for share in shares]
            edges = [max(later - LEAD, (earlier + later) / 2) for earlier, later in pairwise(peaks)]
            is_pause = [later - earlier > PAUSE for earlier, later in pairwise(peaks)]
            starts = [
                max(0.0, peak - LEAD) if pause else edge
                for peak, edge, pause in zip(peaks, [0.0, *edges], [True, *is_pause], strict=True)
            ]
            duration = inf if self.seconds is None else self.seconds
            ends = [
                min(duration, peak + LAST) if pause else edge
                for peak, edge, pause in zip(peaks, [*edges, 0.0], [*is_pause, True], strict=True)
            ]
        return [Span(*span) for span in zip(starts, peaks, ends, strict=True)]

    def middle(self, frame: int) -> float:
        """Return the middle of a vector in sound, in seconds: the peak of a label alone in it."""
        return self._peak(frame, 0.0, 1.0)

    def _peak(self, frame: int, low: float, high: float) -> float:
        """Return the middle of a share of a vector, in seconds; the sound may cut the vector."""
        first, last = self._seconds_at(frame), self._seconds_at(frame + 1)
        return first + (last - first) * (low + high) / 2

    def _seconds_at(self, vector: int) -> float:
        """Return when a vector starts, within the sound."""
        assert self.seconds_per_vector is not None
        start = self.offset + vector * self.seconds_per_vector
        return start if self.seconds is None else min(start, self.seconds)

    def shifted(self, seconds: float) -> Transcript:
        """Return the transcript with all times so many seconds later, in a longer sound."""
        assert self.seconds is not None
        return replace(self, offset=self.offset + seconds, seconds=self.seconds + seconds)

    # --- Forms ---

    def as_text(self, timestamps: bool = False) -> str:
        """Write the output; of several hypotheses, the lines of `as_table`.

        With `timestamps`, write a line for each label of the best hypothesis: the symbol, its
        start, peak and end, and its confidence.
        """
        if timestamps:
            return "\n".join(self._label_lines())
        return self.output(self.hypotheses[0]) if len(self.hypotheses) == 1 else self.as_table()

    def as_table(self) -> str:
        """Write a line for each hypothesis: input, probability, score and output.

        Hypotheses are sorted by the score: log Pr(y) / |y|, or log Pr(y) if that was asked for.
        """
        return "\n".join(
            f"{self.name}\t{exp(h.log_prob):.4f}\t{h.score:.4f}\t{self.output(h)}"
            for h in self.hypotheses
        )

    def _label_lines(self) -> Iterator[str]:
        """Yield the lines of `as_text` with timestamps."""
        best = self.hypotheses[0]
        form = "g" if self.seconds_per_vector is None else ".3f"
        for symbol, span, timing in zip(
            self.alphabet.decode(best.labels), self.spans(best), best.timings, strict=True
        ):
            times = (format(time, form) for time in span)
            yield "\t".join([symbol, *times, f"{timing.confidence:.3f}"])

    def as_json(self) -> dict[str, Any]:
        """Return all hypotheses as JSON values, with the times of `spans`.

        The emission of a label is between `earliest` and `latest` with a probability of 90 %.
        """
        return {
            "input": self.name,
            "path": None if self.path is None else str(self.path),
            "seconds": self.seconds,
            "times_in": "seconds" if self.seconds_per_vector else "vectors",
            "hypotheses": [
                {
                    "output": self.output(h),
                    "symbols": self.alphabet.decode(h.labels),
                    "log_prob": h.log_prob,
                    "score": h.score,
                    "timings": list(self._json_timings(h)) if h.timings else [],
                }
                for h in self.hypotheses
            ],
        }

    def _json_timings(self, hypothesis: Hypothesis) -> Iterator[dict[str, Any]]:
        """Yield the symbol, the times and the confidence of each label."""
        in_sound = self.seconds_per_vector is not None
        for symbol, span, timing in zip(
            self.alphabet.decode(hypothesis.labels),
            self.spans(hypothesis),
            hypothesis.timings,
            strict=True,
        ):
            earliest = self._seconds_at(timing.start) if in_sound else timing.start
            latest = self._seconds_at(timing.end + 1) if in_sound else timing.end
            times = {**span._asdict(), "earliest": earliest, "latest": latest}
            rounded = {name: round(time, 6) for name, time in times.items()}
            yield {"symbol": symbol, **rounded, "confidence": timing.confidence}

    def phones(self) -> list[dict[str, Any]]:
        """Return the symbols of the best hypothesis with the times of `spans` and confidence."""
        best = self.hypotheses[0]
        return [
            {
                "symbol": symbol,
                **{name: round(time, 3) for name, time in span._asdict().items()},
                "confidence": round(timing.confidence, 4),
            }
            for symbol, span, timing in zip(
                self.symbols, self.spans(best), best.timings, strict=True
            )
        ]

    def as_textgrid(self) -> str:
        """Write the best hypothesis as an interval tier; pauses are intervals without text."""
        best = self.hypotheses[0]
        marks = self.alphabet.decode(best.labels)
        spans = zip(self.spans(best), marks, strict=True)
        intervals = [(span.start, span.end, mark) for span, mark in spans]
        return textgrid({"labels": intervals}, self.seconds or 0.0)


def _shares(frames: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    """Yield each label's vector and its share of it; labels of one vector divide it equally."""
    for frame, equal in groupby(frames):
        count = len(list(equal))
        yield from ((frame, i / count, (i + 1) / count) for i in range(count))


def join_words(
    name: str, words: Sequence[Transcript], n_best: int, *, length_normalised: bool
) -> Transcript:
    """Join the transcripts of several words; keep the best combinations of their hypotheses.

    The frame of each label is the number of its word, from 0.
    """
    parts = [
        tuple(replace(h, frames=(i,) * len(h.labels), timings=()) for h in word.hypotheses)
        for i, word in enumerate(words)
    ]
    hypotheses = parts[0]
    for part in parts[1:]:
        hypotheses = join_hypotheses(hypotheses, part, 0, n_best, length_normalised)
    return replace(words[0], name=name, hypotheses=hypotheses)


def join_windows(
    windows: Sequence[Transcript], n_best: int, *, length_normalised: bool
) -> Transcript:
    """Join the transcripts of a sound's windows, each a whole number of vectors but the last."""
    whole = windows[0]
    for window in windows[1:]:
        step = whole.seconds_per_vector
        assert step is not None and whole.seconds is not None and window.seconds is not None
        earlier, later = whole.recording, window.recording
        assert earlier is not None and later is not None
        seconds = whole.seconds + window.seconds
        whole = replace(
            whole,
            hypotheses=join_hypotheses(
                whole.hypotheses,
                window.hypotheses,
                round(whole.seconds / step),
                n_best,
                length_normalised,
            ),
            seconds=seconds,
            recording=replace(
                earlier, seconds=seconds, loudest=max(earlier.loudest, later.loudest)
            ),
        )
    return whole


def json_lines(transcripts: Sequence[Transcript]) -> str:
    """Write each transcript as a line of JSON."""
    return "\n".join(json.dumps(t.as_json(), ensure_ascii=False) for t in transcripts)
