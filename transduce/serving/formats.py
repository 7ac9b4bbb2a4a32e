"""Transcripts in the forms of OpenAI's API: JSON, verbose JSON and subtitles."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean
from typing import Any

from transduce.model.formats import Marked
from transduce.model.lines import Pronunciation
from transduce.model.transcripts import Transcript

TINY = 1e-10  # stands for a confidence of 0 in logarithms


def segments(transcript: Transcript) -> list[dict[str, Any]]:
    """Return the stretches between pauses; `avg_logprob` is the mean of ln confidence."""
    stretches, end = list[list[int]](), None
    timed = transcript.phones()
    for i, phone in enumerate(timed):
        if end is None or phone["start"] > end:
            stretches.append([])
        stretches[-1].append(i)
        end = phone["end"]
    labels = transcript.hypotheses[0].labels
    return [
        {
            "id": number,
            "seek": 0,
            "start": timed[stretch[0]]["start"],
            "end": timed[stretch[-1]]["end"],
            "text": transcript.separator.join(timed[i]["symbol"] for i in stretch),
            "tokens": [labels[i] for i in stretch],
            "temperature": 0.0,
            "avg_logprob": fmean(log(max(TINY, timed[i]["confidence"])) for i in stretch),
        }
        for number, stretch in enumerate(stretches)
    ]


def verbose(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript with its segments and phones."""
    return {
        "task": "transcribe",
        "language": "unknown",
        "duration": transcript.seconds,
        "text": transcript.output(transcript.hypotheses[0]),
        "segments": segments(transcript),
        "phones": transcript.phones(),
    }


def cues(transcript: Transcript) -> list[Marked]:
    """Return the segments as subtitles: start, end and text."""
    return [(one["start"], one["end"], one["text"]) for one in segments(transcript)]


def pronunciation(line: str, transcript: Pronunciation) -> dict[str, Any]:
    """Return a line's pronunciations, best first, and the words of the best one."""
    found: Sequence[dict[str, Any]] = [
        {
            "text": transcript.output(h),
            "phones": transcript.alphabet.decode(h.labels),
            "log_prob": h.log_prob,
            "score": h.score,
        }
        for h in transcript.hypotheses
    ]
    best = found[0]
    return {
        "input": line,
        "text": best["text"],
        "phones": best["phones"],
        "words": [word._asdict() for word in transcript.words],
        "hypotheses": found,
    }
