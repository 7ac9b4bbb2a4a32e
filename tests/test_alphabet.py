"""Symbols <-> ids."""

import pytest

from transduce import NULL, Alphabet


def test_ids_count_from_one_because_null_is_zero():
    letters = Alphabet("abc")
    assert NULL == 0
    assert letters.encode("cab") == [3, 1, 2]
    assert letters.decode([3, NULL, 1, 2]) == ["c", "a", "b"]
    assert len(letters) == 3


def test_symbols_may_be_longer_than_a_letter():
    phones = Alphabet(["AA", "B", "NG"])
    assert phones.decode(phones.encode(["NG", "AA"])) == ["NG", "AA"]


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"'x', at position 1"):
        Alphabet("abc").encode("axb")
    with pytest.raises(ValueError, match=r"id 4, at position 2"):
        Alphabet("abc").decode([1, 0, 4])
    with pytest.raises(ValueError, match=r"'a' twice"):
        Alphabet("aba")


def test_every_symbol_comes_back_and_nulls_do_not():
    letters = Alphabet("abc")
    assert letters.encode(letters.symbols) == [1, 2, 3]
    assert letters.decode(letters.encode("")) == []
    assert letters.decode([NULL, NULL]) == []
    for k, symbol in enumerate("abc", start=1):
        assert letters.encode(symbol) == [k] and letters.decode([NULL, k]) == [symbol]


def test_an_id_below_null_is_refused():
    with pytest.raises(ValueError, match="id -1, at position 1, is not between 0 and 3"):
        Alphabet("abc").decode([1, -1])


def test_a_symbol_may_be_known_in_its_other_case():
    alphabet = Alphabet(["a", "B", "'", "c", "C"])
    assert alphabet.respell("AbcC\N{RIGHT SINGLE QUOTATION MARK}7") == [
        "a",
        "B",
        "c",
        "C",
        "'",
        "7",
    ]
    assert alphabet.encode_or_null("AbcC7") == [1, 2, 4, 5, 0]
    with pytest.raises(ValueError, match="'A', at position 0"):
        alphabet.encode("A")  # targets are not respelt
