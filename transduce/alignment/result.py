"""The words and phones of a known text with their times, and their written forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from transduce.alignment.boundaries import Boundaries
from transduce.data.pairs import Symbols
from transduce.model.formats import Marked, subrip, textgrid, webvtt

# A word is flagged if its misfit is above MISFIT: more replaced words found against more false
# alarms. Of 249 right texts of LibriSpeech, 5 % have a flagged word (benchmarks/mismatch.py --set
# dev). ACOUSTIC is how much the second opinion counts; words with less than DOUBT need none.
MISFIT, PRIOR_PHONES, ACOUSTIC, DOUBT = 3.2, 2, 10.0, 1.0
TINY = 1e-10  # stands for a confidence of 0 in logarithms


@dataclass(frozen=True)
class AlignedPhone:
    """A phone and its interval."""

    symbol: str
    interval: Boundaries

    def shifted(self, seconds: float) -> AlignedPhone:
        """Return the phone so many seconds later."""
        start, end, confidence = self.interval
        moved = Boundaries(start.shifted(seconds), end.shifted(seconds), confidence)
        return replace(self, interval=moved)


@dataclass(frozen=True)
class AlignedWord:
    """A word of the text, as it was said; a word that was not found in the sound has no phones."""

    text: str
    phones: tuple[AlignedPhone, ...]
    log_ratio: float  # ln of the word's likelihood against that of `heard`, at most 0
    heard: Symbols  # what fits best in its place; the word's own phones if these do
    acoustic_deficit: float = 0.0  # the sum of its `phone_deficits`, if it is doubtful

    @property
    def fits(self) -> bool:
        """Whether the sound fits the word."""
        return bool(self.phones) and self.misfit <= MISFIT

    @property
    def misfit(self) -> float:
        """How much better another sequence fits, for each phone; 0 if none does."""
        worse = ACOUSTIC * self.acoustic_deficit - self.log_ratio
        return worse / (len(self.phones) + PRIOR_PHONES)

    @property
    def doubtful(self) -> bool:
        """Whether a second opinion may change whether the word fits."""
        return -self.log_ratio > DOUBT * (len(self.phones) + PRIOR_PHONES)

    @property
    def confidence(self) -> float:
        """The geometric mean of the phones' confidences; 0 without phones."""
        if not self.phones:
            return 0.0
        return exp(fmean(log(max(TINY, phone.interval.confidence)) for phone in self.phones))


@dataclass(frozen=True)
class Alignment:
    """The words and phones of a text in a sound; times are in seconds."""

    name: str  # of the sound
    seconds: float
    words: tuple[AlignedWord, ...]  # of a text; of phones alone, each is a word
    of_text: bool = True  # whether the words are those of a text, not phones
    path: Path | None = None

    @property
    def phones(self) -> tuple[AlignedPhone, ...]:
        """The phones of all words that were found."""
        return tuple(phone for word in self.words for phone in word.phones)

    @property
    def misfits(self) -> tuple[AlignedWord, ...]:
        """The words that the sound does not fit."""
        return tuple(word for word in self.words if not word.fits)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        found = f"{len(self.words)} words, {len(self.misfits)} of which do not fit"
        return f"Alignment({self.name!r}: {found})"

    # --- Forms ---

    def as_text(self) -> str:
        """Write a line for each word: start, end, confidence, log-likelihood ratio, and the word.

        A word that does not fit is followed by ? and what was heard in its place.
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for word in self.words:
            times, doubt = ("-", "-"), ""
            if word.phones:
                start, end = word.phones[0].interval.start, word.phones[-1].interval.end
                times = f"{start.time:.3f}", f"{end.time:.3f}"
            if not word.fits:
                doubt = f"? {' '.join(word.heard) or '(nothing)'}"
            numbers = (*times, f"{word.confidence:.3f}", f"{word.log_ratio:.1f}", word.text)
            yield "\t".join([*numbers, doubt] if doubt else numbers)

    def as_json(self) -> dict[str, Any]:
        """Return the words and phones as JSON values.

        `start_bounds` and `end_bounds` are the 5 % and 95 % quantiles of a start and an end. A word
        that was not found has null for its times.
        """
        found: dict[str, Any] = {
            "input": self.name,
            "path": None if self.path is None else str(self.path),
            "seconds": round(self.seconds, 6),
            "fits": not self.misfits,
        }
        if self.of_text:
            found["words"] = [_json_word(word) for word in self.words]
        else:
            found["phones"] = [
                {**_json_phone(phone), **_json_fit(word)}
                for word in self.words
                for phone in word.phones
            ]
        return found

    def as_textgrid(self) -> str:
        """Write the words and phones as interval tiers; pauses are intervals without text."""
        phones = [_marked(phone.symbol, phone.interval) for phone in self.phones]
        tiers = {"words": self._marked_words()} if self.of_text else {}
        return textgrid({**tiers, "phones": phones}, self.seconds)

    def as_ctm(self) -> str:
        """Write a line for each word, or phone, in NIST's format CTM.

        The columns are file, channel, start, duration, word and confidence.
        """
        name = "_".join(self.name.split()) or "-"
        return "\n".join(
            f"{name} 1 {start:.3f} {end - start:.3f} {mark} {word.confidence:.3f}"
            for (start, end, mark), word in zip(
                self._marked_words(), (word for word in self.words if word.phones), strict=True
            )
        )

    def as_srt(self) -> str:
        """Write a subtitle for each word in SubRip's format."""
        return subrip(self._marked_words()).rstrip("\n")

    def as_vtt(self) -> str:
        """Write a subtitle for each word in the format WebVTT."""
        return webvtt(self._marked_words()).rstrip("\n")

    def _marked_words(self) -> list[Marked]:
        return [
            (word.phones[0].interval.start.time, word.phones[-1].interval.end.time, word.text)
            for word in self.words
            if word.phones
        ]


def _marked(text: str, interval: Boundaries) -> Marked:
    return interval.start.time, interval.end.time, text


def _json_word(word: AlignedWord) -> dict[str, Any]:
    times: dict[str, Any] = dict.fromkeys(("start", "end", "start_bounds", "end_bounds"))
    if word.phones:
        first, last = word.phones[0].interval, word.phones[-1].interval
        times = _json_times(Boundaries(first.start, last.end, 0.0))
    phones = [_json_phone(phone) for phone in word.phones]
    confidence = round(word.confidence, 4)
    return {
        "word": word.text,
        **times,
        "confidence": confidence,
        **_json_fit(word),
        "phones": phones,
    }


def _json_phone(phone: AlignedPhone) -> dict[str, Any]:
    confidence = round(phone.interval.confidence, 4)
    return {"symbol": phone.symbol, **_json_times(phone.interval), "confidence": confidence}


def _json_times(interval: Boundaries) -> dict[str, Any]:
    start, end = interval.start, interval.end
    return {
        "start": round(start.time, 3),
        "end": round(end.time, 3),
        "start_bounds": [round(start.earliest, 3), round(start.latest, 3)],
        "end_bounds": [round(end.earliest, 3), round(end.latest, 3)],
    }


def _json_fit(word: AlignedWord) -> dict[str, Any]:
    ratio = None if not word.phones else round(word.log_ratio, 3)
    return {"log_ratio": ratio, "fits": word.fits, "heard": list(word.heard)}
