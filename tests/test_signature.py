"""Signature.example: every kind of input, with both policies for unknown symbols."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from transduce.alphabet import Alphabet
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio, DataError, Frames, Notation, Origin, Pair, Recording
from transduce.model.signature import EmptyInput, Signature

CHARACTERS = Notation("characters", None)
PHONES = Alphabet(["AA", "B"])
TEXT = Signature(PHONES, Notation("spaces", None), Alphabet("ab"), CHARACTERS)
CEPSTRA = FeatureSettings()
SOUND = Signature(
    PHONES,
    Notation("spaces", None),
    features=CEPSTRA,
    statistics=Statistics(torch.full((26,), 2.0), torch.full((26,), 4.0)),
)
FRAMES = Signature(PHONES, CHARACTERS, statistics=Statistics(torch.ones(3), torch.full((3,), 2.0)))
PREDICTION = Signature(PHONES, Notation("spaces", None))
ORIGIN = Origin(Path("words.tsv"), 7)


@pytest.fixture
def sound(tmp_path):
    """Write a sound file of half a second."""
    path = tmp_path / "noise.wav"
    samples = np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32)
    soundfile.write(path, samples, 16_000, subtype="FLOAT")
    return path


TEXTS = {
    "a line": "abA",
    "symbols": ("a", "b", "A"),
    "a pair": Pair("abA", ("a", "b", "A"), ("B", "AA"), ORIGIN),
}


@pytest.mark.parametrize("source", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("unknown", ["null", "refuse"])
def test_text_becomes_ids_of_known_symbols(source, unknown):
    example = TEXT.example(source, unknown=unknown)
    assert example.frames.tolist() == [1, 2, 1]  # A is tried in lower case
    assert example.num_labels == 0


UNKNOWN = {"a line": "ac", "symbols": ("a", "c"), "a pair": Pair("ac", ("a", "c"), (), ORIGIN)}


@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_symbol_becomes_null_or_is_refused(source):
    assert TEXT.example(source).frames.tolist() == [1, 0]
    with pytest.raises(DataError, match="'c' is no symbol that the model knows; it knows a b"):
        TEXT.example(source, unknown="refuse")


def test_the_error_of_an_unknown_symbol_names_file_and_line():
    with pytest.raises(DataError, match=r"^words\.tsv, line 7: 'c'"):
        TEXT.example(UNKNOWN["a pair"], unknown="refuse")
    assert TEXT.unknown_symbols(UNKNOWN["a pair"]) == ["c"]
    assert TEXT.unknown_symbols(TEXTS["a pair"]) == []


def test_labels_are_made_where_they_are_asked_for():
    example = TEXT.example(TEXTS["a pair"], with_labels=True)
    assert example.labels.tolist() == [2, 1]
    with pytest.raises(DataError, match="line 7: 'q'"):
        TEXT.example(Pair("a", ("a",), ("q",), ORIGIN), with_labels=True)
    assert TEXT.example(Pair("a", ("a",), ("q",), ORIGIN)).num_labels == 0


@pytest.mark.parametrize("source", ["", "  ", ()])
def test_empty_text_has_its_own_error(source):
    with pytest.raises(EmptyInput, match="has nothing to read"):
        TEXT.example(source)
    with pytest.raises(DataError, match="line 7: the source is empty"):
        TEXT.example(Pair("", (), (), ORIGIN))


def test_an_example_is_returned_as_it_is():
    example = TEXT.example("ab")
    assert TEXT.example(example) is example
    assert SOUND.example(example) is example


def test_inputs_have_the_name_that_is_given_or_their_own(sound):
    assert TEXT.example("ab").pair.name == "ab"
    assert TEXT.example(("a", "b")).pair.name == "a b"
    assert SOUND.example(sound).pair.name == "noise"
    assert SOUND.example(torch.zeros(1600)).pair.name == "samples"
    for signature, source in ((TEXT, "ab"), (SOUND, sound), (SOUND, torch.zeros(1600))):
        assert signature.example(source, name="mine").pair.name == "mine"


@pytest.mark.parametrize("unknown", ["null", "refuse"])
def test_all_forms_of_a_sound_have_the_same_frames(sound, tmp_path, unknown):
    samples = read_wave(Audio(sound), 16_000)
    raw = Features(CEPSTRA)(samples[None])[0][0]
    np.save(tmp_path / "raw.npy", raw.numpy())
    pair = Pair("noise", Audio(sound), ("B",), Origin(sound))
    sources = [sound, str(sound), Audio(sound), pair, samples, samples.numpy(), samples.double()]
    sources += [tmp_path / "raw.npy", str(tmp_path / "raw.npy"), Frames(tmp_path / "raw.npy")]
    sources += [raw, raw.numpy(), raw.double().numpy()]
    for source in sources:
        example = SOUND.example(source, unknown=unknown)
        assert example.frames.dtype == torch.float32 and example.num_labels == 0
        torch.testing.assert_close(example.frames, (raw - 2) / 4, rtol=1e-5, atol=1e-5)
    already_read = SOUND.example(pair, with_labels=True, frames=raw + 4)
    torch.testing.assert_close(already_read.frames, (raw + 2) / 4, rtol=1e-5, atol=1e-5)
    assert already_read.labels.tolist() == [2]


def test_a_part_of_a_sound_and_another_rate_are_read(sound, tmp_path):
    part = SOUND.example(Audio(sound, 0.1, 0.2))
    whole = SOUND.example(sound)
    torch.testing.assert_close(part.frames[3:-3], whole.frames[13:25], rtol=1e-4, atol=1e-4)
    soundfile.write(tmp_path / "stereo.wav", np.zeros((4000, 2)), 8000)
    assert SOUND.example(tmp_path / "stereo.wav").num_frames == 48


@pytest.mark.parametrize(
    "signature, source, said",
    [
        (TEXT, Path("a.wav"), "the model reads text, not PosixPath; give it text"),
        (TEXT, torch.zeros(5), "the model reads text, not numbers; give it text"),
        (TEXT, np.zeros((5, 3)), "the model reads text, not numbers; give it text"),
        (TEXT, 3, "the model reads text, not int; give it text"),
        (SOUND, "missing.wav", "no file missing.wav"),
        (SOUND, ("a", "b"), r"give it a file, samples \[N\], or frames \[T, D\]"),
        (SOUND, torch.zeros(1, 5, 26), r"give it a file, samples \[N\], or frames \[T, D\]"),
        (SOUND, torch.zeros(5, 25), "25 numbers a frame where the model was trained on 26"),
        (FRAMES, torch.zeros(1600), "computed elsewhere, not sound; give frames"),
        (PREDICTION, "ab", "a prediction network takes no source"),
    ],
)
def test_inputs_of_another_kind_are_refused_with_one_sentence(signature, source, said):
    with pytest.raises(DataError, match=said) as error:
        signature.example(source)
    assert "\n" not in str(error.value)


def test_frames_of_another_size_name_their_file(tmp_path):
    np.save(tmp_path / "five.npy", np.zeros((4, 5), np.float32))
    with pytest.raises(DataError, match=r"five\.npy: there are 5 numbers a frame"):
        FRAMES.example(tmp_path / "five.npy")


def test_a_prediction_network_takes_labels_alone():
    pair = Pair("a", (), ("B", "AA"), ORIGIN)
    example = PREDICTION.example(pair, with_labels=True)
    assert example.num_frames == 0 and example.labels.tolist() == [2, 1]


def test_written_targets_become_labels_and_unknown_ones_are_named():
    assert SOUND.labels_of("B AA").tolist() == [2, 1]
    with pytest.raises(DataError, match="the target is empty"):
        SOUND.labels_of(" ")
    with pytest.raises(DataError, match="the model does not know: 'q', at position 1"):
        SOUND.labels_of("B q")


ENGLISH = Signature(PHONES, Notation("spaces", None), Alphabet("'abcdefé"), CHARACTERS)
PLAIN = Signature(PHONES, Notation("spaces", None), Alphabet("'abcdef"), CHARACTERS)


@pytest.mark.parametrize(
    "written, read",
    [
        ("café", "cafe"),
        ("CAFÉ", "cafe"),
        ("cafe\u0301", "cafe"),  # the accent as a symbol of its own
        ("(dead),", "dead"),
        ("\u201cbed\u201d", "bed"),
        ("b\u2019ed", "b'ed"),
        ("'bed", "'bed"),  # punctuation that the model knows stays
        ("\ufb00a", "ffa"),  # a ligature
    ],
)
def test_a_line_is_read_in_the_letters_that_the_model_knows(written, read):
    example = PLAIN.example(written, unknown="refuse")
    assert example.frames.tolist() == PLAIN.sources.encode(read)
    assert example.pair.name == written


def test_a_letter_with_an_accent_that_the_model_knows_is_kept():
    assert ENGLISH.symbols_of("café") == tuple("café")
    assert ENGLISH.example("CAFÉ").frames.tolist() == ENGLISH.sources.encode("café")
    assert PLAIN.folds("café") and not ENGLISH.folds("café")
    assert not PLAIN.folds("(Bed!)")  # neither case nor punctuation is folding


def test_a_letter_that_cannot_be_folded_is_named_as_it_was_written():
    with pytest.raises(DataError, match="cafß: 'ß' is no symbol"):
        PLAIN.example("cafß", unknown="refuse")


@pytest.mark.parametrize("written", ["42", "b42", "4", "b²"])
def test_numbers_are_refused_in_ten_words(written):
    with pytest.raises(DataError) as error:
        PLAIN.example(written, unknown="refuse")
    sentence = str(error.value).removeprefix(f"{written}: ")
    assert sentence == "the model does not read numbers; write them as words"
    assert len(sentence.split()) == 10


def test_digits_that_the_model_knows_are_read():
    digits = Signature(PHONES, CHARACTERS, Alphabet("a1"), CHARACTERS)
    assert digits.example("a1", unknown="refuse").frames.tolist() == [1, 2]


def test_punctuation_alone_is_an_error_but_no_blank_line():
    with pytest.raises(DataError, match=r"'\?!' has no symbol that the model knows") as error:
        PLAIN.example("?!")
    assert not isinstance(error.value, EmptyInput)


def test_a_line_is_split_at_spaces_and_hyphens_that_the_model_does_not_know():
    assert PLAIN.words("a-bad  cab \u2014 faded!") == ["a", "bad", "cab", "faded!"]
    assert PLAIN.words(" - ") == PLAIN.words("") == []
    hyphens = Signature(PHONES, CHARACTERS, Alphabet("ab-"), CHARACTERS)
    assert hyphens.words("a-b a\u2013b") == ["a-b", "a", "b"]
    sentences = Signature(PHONES, CHARACTERS, Alphabet("ab "), CHARACTERS)
    assert sentences.words("a-b a") == ["a-b a"]
    symbols = Signature(PHONES, CHARACTERS, Alphabet(["A", "B"]), Notation("spaces", None))
    assert symbols.words("A B") == ["A B"]
    assert symbols.symbols_of("A, B") == ("A,", "B")  # symbols are taken as they are


def test_several_words_in_one_input_are_refused_with_advice():
    with pytest.raises(DataError, match="the model reads single words; give them one by one"):
        PLAIN.example("bad cab", unknown="refuse")
    with pytest.raises(DataError, match="the line has a tab; give the text alone"):
        PLAIN.example("bad\tB AE D", unknown="refuse")
    with pytest.raises(DataError, match="single words"):
        PLAIN.example("bad-cab", unknown="refuse")


def test_bytes_that_were_no_utf8_are_named():
    with pytest.raises(DataError, match="it is not UTF-8; convert it"):
        PLAIN.example("caf\N{REPLACEMENT CHARACTER}", unknown="refuse")


def test_an_example_knows_the_sound_that_it_was_computed_from(sound, tmp_path):
    soundfile.write(tmp_path / "telephone.wav", np.full(4004, 0.25), 8000)
    found = SOUND.example(tmp_path / "telephone.wav").recording
    assert (found.sample_rate, found.seconds) == (8000, 0.5005)
    assert found.loudest == pytest.approx(0.25, abs=0.05)
    assert SOUND.example(torch.zeros(1600)).recording == Recording(0.1, 16_000, 0.0)
    assert SOUND.example(torch.zeros(5, 26)).recording is None
    assert TEXT.example("ab").recording is None
