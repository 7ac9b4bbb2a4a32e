"""The options of a search on the command line: language models, null's bias, and bad values."""

import json
import re

import pytest
from commands import train_small_runs, transduce

from transduce.data.manifest import read_tsv
from transduce.decoding import NGram
from transduce.decoding.arpa import read_arpa
from transduce.decoding.options import SearchOptions
from transduce.model.checkpoint import load_model
from transduce.model.evaluate import evaluate
from transduce.model.model import load

TARGETS = [["BB", "BB"], ["BB", "BB", "AA"]]
ARPA = """
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99\t<s>\t-0.3
-0.9\t</s>
-0.4\tAA\t-0.2
-0.5\tBB\t-0.1

\\2-grams:
-0.2\t<s> BB
-0.1\tAA AA

\\end\\
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs, of which runs/unsure has few epochs, and the files of language models."""
    folder = tmp_path_factory.mktemp("runs")
    train_small_runs(folder, "transducer", "prediction")
    unsure = ("--train.max_epochs", 12, "--run", "runs/unsure")
    assert transduce("train", "transducer.toml", *unsure, folder=folder).returncode == 0
    (folder / "labels.arpa").write_text(ARPA)
    (folder / "bad.arpa").write_text(ARPA.replace("-0.1\tAA AA", "-0.1\tAA"))
    lines = [f"ab\t{' '.join(target)}" for target in [*TARGETS, ["AA", "unknown"]]]
    (folder / "targets.tsv").write_text("\n".join(lines) + "\n")
    (folder / "unknown.tsv").write_text("ab\tunknown\n")
    return folder


def ngram(order):
    return lambda folder, alphabet: NGram(order, len(alphabet), map(alphabet.encode, TARGETS))


FUSIONS = {
    "ngram:targets.tsv": ngram(4),
    "ngram-1:targets.tsv": ngram(1),
    "ngram-2:targets.tsv": ngram(2),
    "labels.arpa": lambda folder, alphabet: read_arpa(folder / "labels.arpa", alphabet),
    "runs/prediction": lambda folder, _: load_model(folder / "runs/prediction").network,
}


def options_of(folder, model, fusion):
    """Return the options that FLAGS stand for."""
    language_model = FUSIONS[fusion](folder, model.signature.targets)
    weight = {"fusion": language_model, "fusion_weight": 0.8}
    return SearchOptions(beam_width=4, null_bias=-0.5, with_timings=False, **weight)


def flags(fusion):
    return "--beam-width", 4, "--fusion", fusion, "--fusion-weight", 0.8, "--null-bias", -0.5


@pytest.mark.parametrize("fusion", FUSIONS)
def test_evaluation_searches_as_the_same_options_do_in_python(folder, fusion):
    arguments = ("evaluate", "runs/unsure", "pairs.tsv", *flags(fusion), "--format", "json")
    done = transduce(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    model = load_model(folder / "runs/unsure")
    notations = (model.signature.source_notation, model.signature.target_notation)
    pairs = read_tsv(folder / "pairs.tsv", *notations)
    expected = evaluate(model, pairs, options_of(folder, model, fusion))
    assert json.loads(done.stdout) == json.loads(json.dumps(expected.as_dict()))
    plain = evaluate(model, pairs, SearchOptions(beam_width=4, with_timings=False))
    assert expected.detail != plain.detail, "the options must have an effect"


@pytest.mark.parametrize("fusion", FUSIONS)
def test_transcription_searches_as_the_same_options_do_in_python(folder, fusion):
    words = ["ab", "bba", "abab", "baab"]
    arguments = ("transcribe", "runs/unsure", *flags(fusion))
    done = transduce(*arguments, folder=folder, text="\n".join(words))
    assert done.returncode == 0, done.stderr
    model = load(folder / "runs/unsure")
    expected = model.transcribe(words, options_of(folder, model, fusion))
    assert done.stdout.splitlines() == [str(transcript) for transcript in expected]


def test_pronouncing_takes_the_options_of_a_search_too(folder):
    named = ("ab", "bba", "--model", "runs/unsure", *flags("labels.arpa"))
    done = transduce("phonemize", *named, folder=folder)
    assert done.returncode == 0, done.stderr
    model = load(folder / "runs/unsure")
    expected = model.transcribe(["ab", "bba"], options_of(folder, model, "labels.arpa"))
    assert done.stdout.splitlines() == [str(transcript) for transcript in expected]


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_null_bias_lengthens_and_shortens_outputs(folder):
    lengths = {}
    for bias in (-1, 0, 3):
        arguments = ("transcribe", "runs/unsure", "--null-bias", bias)
        done = transduce(*arguments, folder=folder, text="abab\nbbaa\n")
        assert done.returncode == 0, done.stderr
        lengths[bias] = len(done.stdout.split())
    assert lengths[3] < lengths[0] < lengths[-1]


def test_outputs_are_sorted_by_probability_without_length_normalisation(folder):
    arguments = ("transcribe", "runs/unsure", "--n-best", 8, "--no-length-normalised")
    done = transduce(*arguments, folder=folder, text="abab\n")
    assert done.returncode == 0, done.stderr
    probabilities = [float(line.split("\t")[1]) for line in done.stdout.splitlines()]
    assert len(probabilities) == 8
    assert probabilities == sorted(probabilities, reverse=True)


REFUSALS = {
    "fusion without weight": (
        ("--fusion", "labels.arpa"),
        "there is a --fusion but no --fusion-weight; give it, such as 0.3",
    ),
    "weight without fusion": (
        ("--fusion-weight", 0.2),
        "--fusion-weight is 0.2, but there is no --fusion",
    ),
    "negative weight": (
        ("--fusion", "labels.arpa", "--fusion-weight", -1),
        "--fusion-weight must be a number that is not negative, not -1.0",
    ),
    "missing file of targets": (
        ("--fusion", "ngram:nothing.tsv", "--fusion-weight", 0.2),
        "nothing.tsv: there is no such file; check the path",
    ),
    "missing ARPA file": (
        ("--fusion", "nothing.arpa", "--fusion-weight", 0.2),
        "nothing.arpa: there is no such file; check the path",
    ),
    "missing run": (
        ("--fusion", "nothing", "--fusion-weight", 0.2),
        "--fusion nothing: there is no such file or run; give ngram:FILE, an .arpa file, or the "
        "run of a prediction network",
    ),
    "bad line": (
        ("--fusion", "bad.arpa", "--fusion-weight", 0.2),
        "bad.arpa, line 14: ",
    ),
    "order 0": (
        ("--fusion", "ngram-0:targets.tsv", "--fusion-weight", 0.2),
        "--fusion ngram-0:targets.tsv: order must be at least 1, not 0",
    ),
    "targets without a symbol of the model": (
        ("--fusion", "ngram:unknown.tsv", "--fusion-weight", 0.2),
        "unknown.tsv has no target whose symbols the model knows; give targets of the same kind",
    ),
    "targets without ngram": (
        ("--fusion", "targets.tsv", "--fusion-weight", 0.2),
        "--fusion targets.tsv is neither an .arpa file nor a model; to count n-grams in its "
        "targets, give --fusion ngram:targets.tsv",
    ),
    "a transducer": (
        ("--fusion", "runs/transducer", "--fusion-weight", 0.2),
        "--fusion runs/transducer is a transducer, not a prediction network; give ",
    ),
    "bias nan": (("--null-bias", "nan"), "--null-bias must be a finite number, not nan"),
    "width 0": (("--beam-width", 0), "--beam-width must be at least 1, not 0"),
    "width 10^9": (("--beam-width", 10**9), "--beam-width must be at most 100000, not 1000000000"),
    "no labels": (
        ("--max-labels-per-frame", 0),
        "--max-labels-per-frame must be at least 1, not 0",
    ),
}


@pytest.mark.parametrize("arguments, message", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "runs/transducer", "pairs.tsv"),
        ("transcribe", "runs/transducer"),
        ("phonemize", "ab", "--model", "runs/transducer"),
    ],
    ids=lambda command: command[0],
)
def test_a_bad_value_is_one_sentence(folder, command, arguments, message):
    done = transduce(*command, *arguments, folder=folder, text="ab\n")
    is_of_a_file = re.match(r"--fusion [a-z]|\w+\.(tsv|arpa)", message)
    assert done.returncode == (1 if is_of_a_file else 2) and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"transduce: {message}")


def test_too_many_outputs_are_refused_by_their_own_option(folder):
    done = transduce("transcribe", "runs/transducer", "--n-best", 10**9, folder=folder, text="ab\n")
    assert done.returncode == 2
    assert done.stderr == "transduce: --n-best must be at most 100000, not 1000000000\n"
    both = ("--n-best", 2, "--timestamps")
    done = transduce("transcribe", "runs/transducer", *both, folder=folder, text="ab\n")
    assert done.returncode == 1 and "--format json has all" in done.stderr
