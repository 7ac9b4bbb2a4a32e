"""ARPAbet, the phones of CMUdict: stress digits, onsets of syllables, and IPA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VOWELS = {
    **{"AA": "ɑ", "AE": "æ", "AH": "ʌ", "AO": "ɔ", "AW": "aʊ", "AY": "aɪ", "EH": "ɛ", "ER": "ɝ"},
    **{"EY": "eɪ", "IH": "ɪ", "IY": "i", "OW": "oʊ", "OY": "ɔɪ", "UH": "ʊ", "UW": "u"},
}
# Without stress; so is most of what has no digit: in CMUdict 89 % of AH, and 82 % of ER.
REDUCED = {"AH": "ə", "ER": "ɚ"}
CONSONANTS = {
    **{"B": "b", "CH": "tʃ", "D": "d", "DH": "ð", "F": "f", "G": "ɡ", "HH": "h", "JH": "dʒ"},
    **{"K": "k", "L": "l", "M": "m", "N": "n", "NG": "ŋ", "P": "p", "R": "ɹ", "S": "s"},
    **{"SH": "ʃ", "T": "t", "TH": "θ", "V": "v", "W": "w", "Y": "j", "Z": "z", "ZH": "ʒ"},
}
MARKS = {"1": "ˈ", "2": "ˌ"}  # before a syllable with primary and with secondary stress
PHONES = (
    *CONSONANTS,
    *(vowel + digit for vowel in VOWELS for digit in ("", "0", "1", "2")),
)
IPA = (*MARKS.values(), *CONSONANTS.values(), *VOWELS.values(), *REDUCED.values())
# The clusters with which an English syllable may begin; so may every consonant but NG.
CLUSTERS = """
    P R, B R, T R, D R, K R, G R, F R, TH R, SH R, P L, B L, K L, G L, F L, S L,
    T W, D W, K W, G W, TH W, S W, HH W, S P, S T, S K, S F, S M, S N,
    P Y, B Y, T Y, D Y, K Y, G Y, F Y, V Y, TH Y, S Y, Z Y, HH Y, M Y, N Y, L Y,
    S P L, S P R, S P Y, S T R, S T Y, S K L, S K R, S K W, S K Y
"""
ONSETS = frozenset(tuple(cluster.split()) for cluster in CLUSTERS.split(","))


def without_stress(phones: Iterable[str]) -> tuple[str, ...]:
    """Return the phones without their stress digits."""
    return tuple(phone.rstrip("012") for phone in phones)


def is_arpabet(symbols: Iterable[str]) -> bool:
    """Return whether all symbols are phones of ARPAbet, with or without stress digits."""
    return set(symbols) <= set(PHONES)


def has_stress(symbols: Iterable[str]) -> bool:
    """Return whether a symbol is a vowel of ARPAbet with a stress digit."""
    return any(symbol[-1:] in ("0", "1", "2") and symbol in PHONES for symbol in symbols)


def ipa(phones: Sequence[str]) -> list[str]:
    """Write the phones of one word in IPA; marks of stress are symbols of their own.

    A mark stands before the onset of its syllable: before the longest cluster of the consonants
    between two vowels that an English syllable may begin with, and before all consonants that begin
    a word. Raise ValueError for a phone that is not of ARPAbet.
    """
    written: list[str] = []
    for i, phone in enumerate(phones):
        if phone not in PHONES:
            raise ValueError(f"{phone!r} is no phone of ARPAbet, which IPA is written for")
        vowel, digit = phone.rstrip("012"), phone[-1]
        if vowel in CONSONANTS:
            written.append(CONSONANTS[vowel])
            continue
        if digit in MARKS:
            # Every phone has one symbol, so that the onset's are the last ones.
            written.insert(len(written) - _onset_length(phones[:i]), MARKS[digit])
        is_reduced = vowel in REDUCED and digit not in MARKS
        written.append(REDUCED[vowel] if is_reduced else VOWELS[vowel])
    return written


def _onset_length(before: Sequence[str]) -> int:
    """Return how many of the last phones begin the syllable of the vowel that follows them."""
    last = next((i for i in reversed(range(len(before))) if before[i] not in CONSONANTS), None)
    if last is None:
        return len(before)
    consonants = before[last + 1 :]
    for length in range(len(consonants), 0, -1):
        onset = tuple(consonants[-length:])
        if onset in ONSETS or (length == 1 and onset != ("NG",)):
            return length
    return 0
