"""N-gram language models in ARPA files: probabilities computed by hand, and errors."""

import math

import pytest
import torch

from transduce.alphabet import Alphabet
from transduce.data.pairs import DataError
from transduce.decoding import search
from transduce.decoding.arpa import read_arpa
from transduce.decoding.fusion import FusedScores
from transduce.networks import PredictionNetwork

AB = Alphabet(["A", "B", "C"])
# Logarithms are of base 10, as in every ARPA file.
TRIGRAM = """
\\data\\
ngram 1=6
ngram 2=4
ngram 3=1

\\1-grams:
-99\t<s>\t-0.5
-1.0\t</s>
-0.3\tA\t-0.2
-0.6\tB\t-0.4
-1.2\tC
-2.0\t<unk>

\\2-grams:
-0.1\t<s> A\t-0.7
-0.25\tA B\t-0.05
-0.9\tB B
-0.8\tB </s>

\\3-grams:
-0.15\t<s> A B

\\end\\
"""


def written(folder, text=TRIGRAM, name="labels.arpa"):
    path = folder / name
    path.write_text(text)
    return path


def log10_probs(model, labels):
    """Return log10 Pr(k|labels) of every label."""
    state = model.start()
    for label in labels:
        state = model.advance(state, label)
    return [log_prob / math.log(10) for log_prob in model.log_probs(state)]


@pytest.mark.parametrize(
    "labels, expected",
    [
        # After <s>: the bigram <s> A; else the weight of <s> and a unigram.
        ([], [-0.1, -0.5 - 0.6, -0.5 - 1.2]),
        # After <s> A: the trigram for B; else the weight of <s> A, then the weight of A.
        ([1], [-0.7 - 0.2 - 0.3, -0.15, -0.7 - 0.2 - 1.2]),
        # After A B: no trigram; the weight of A B, then the bigram B B or the weight of B.
        ([1, 2], [-0.05 - 0.4 - 0.3, -0.05 - 0.9, -0.05 - 0.4 - 1.2]),
        # After B B: the file has no weight for B B, so it is 1.
        ([1, 2, 2], [-0.4 - 0.3, -0.9, -0.4 - 1.2]),
        # After B C: neither B C nor C has a weight.
        ([2, 3], [-0.3, -0.6, -1.2]),
    ],
)
def test_probabilities_are_those_computed_by_hand(tmp_path, labels, expected):
    model = read_arpa(written(tmp_path), AB)
    assert model.order == 3
    assert log10_probs(model, labels) == pytest.approx(expected)


def test_asking_twice_changes_nothing(tmp_path):
    model = read_arpa(written(tmp_path), AB)
    contexts = [[], [1], [1, 2], [2, 3], []]
    first = [log10_probs(model, labels) for labels in contexts]
    assert [log10_probs(model, labels) for labels in contexts] == first
    assert first[0] == first[-1]


def test_the_model_reads_no_further_back_than_its_order(tmp_path):
    model = read_arpa(written(tmp_path), AB)
    assert log10_probs(model, [3, 3, 3, 1, 2]) == log10_probs(model, [2, 1, 2])
    unigrams = "\\data\\\nngram 1=3\n\\1-grams:\n-0.3 A\n-0.6 B\n-1.2 C\n\\end\\\n"
    model = read_arpa(written(tmp_path, unigrams), AB)
    assert model.order == 1 and model.start() == model.advance((), 2) == ()
    assert log10_probs(model, []) == log10_probs(model, [2, 1]) == pytest.approx([-0.3, -0.6, -1.2])


def test_a_symbol_that_the_file_lacks_is_as_probable_as_unk(tmp_path):
    model = read_arpa(written(tmp_path), Alphabet(["A", "B", "C", "D"]))
    assert log10_probs(model, [2, 3])[3] == pytest.approx(-2.0)
    assert log10_probs(model, [])[3] == pytest.approx(-0.5 - 2.0)


def test_without_unk_a_missing_symbol_is_an_error(tmp_path):
    path = written(tmp_path, TRIGRAM.replace("-2.0\t<unk>\n", ""))
    assert log10_probs(read_arpa(path, AB), [2, 3]) == pytest.approx([-0.3, -0.6, -1.2])
    with pytest.raises(DataError, match=r"labels\.arpa: .*neither a 1-gram 'D' nor one of <unk>"):
        read_arpa(path, Alphabet(["A", "B", "C", "D"]))


def test_words_that_the_alphabet_lacks_are_skipped(tmp_path):
    model = read_arpa(written(tmp_path), Alphabet(["B", "C"]))
    assert log10_probs(model, []) == pytest.approx([-0.5 - 0.6, -0.5 - 1.2])
    assert log10_probs(model, [1]) == pytest.approx([-0.9, -0.4 - 1.2])


def test_spaces_and_windows_line_ends_are_read_too(tmp_path):
    path = tmp_path / "spaces.arpa"
    path.write_bytes(TRIGRAM.replace("\t", "  ").replace("\n", "\r\n").encode())
    other = read_arpa(written(tmp_path), AB)
    for labels in ([], [1], [1, 2]):
        assert log10_probs(read_arpa(path, AB), labels) == log10_probs(other, labels)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("-0.25\tA B\t-0.05", "-0.25\tA", r"labels\.arpa, line 17: .* 2 words"),
        ("-0.25\tA B\t-0.05", "-0.25\tA B C D", r"labels\.arpa, line 17: .* 2 words"),
        ("-0.25\tA B\t-0.05", "x\tA B", r"labels\.arpa, line 17: .*logarithm"),
        ("-0.25\tA B\t-0.05", "-0.25\tA B\tx", r"labels\.arpa, line 17: .*back-off weight"),
        ("-0.25\tA B\t-0.05", "0.25\tA B", r"labels\.arpa, line 17: the probability is not"),
        ("-0.25\tA B\t-0.05", "nan\tA B", r"labels\.arpa, line 17: the probability is not"),
    ],
)
def test_a_bad_line_is_named_by_its_file_and_number(tmp_path, before, after, message):
    with pytest.raises(DataError, match=message):
        read_arpa(written(tmp_path, TRIGRAM.replace(before, after)), AB)


@pytest.mark.parametrize(
    "text, message",
    [("", "the file is empty"), ("A B C\nB C A\n", "there are no n-grams in it")],
)
def test_a_file_that_is_no_arpa_file_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=rf"labels\.arpa: {message}"):
        read_arpa(written(tmp_path, text), AB)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.arpa: there is no such file"):
        read_arpa(tmp_path / "nothing.arpa", AB)


def test_the_scores_of_a_search_are_weighted_natural_logarithms(tmp_path):
    scores = FusedScores(read_arpa(written(tmp_path), AB), 0.5, len(AB))
    rows = scores.extend([0, 0], [0, 1])  # the empty prefix, and A
    assert rows[:, 0].tolist() == [0, 0]
    expected = [-0.1, -1.1, -1.7], [-1.2, -0.15, -2.1]
    for row, by_hand in zip(rows, expected, strict=True):
        assert list(row[1:]) == pytest.approx([0.5 * math.log(10) * number for number in by_hand])


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
def test_every_search_adds_the_same_probabilities(tmp_path, backend):
    """With f and g all zero, the language model alone tells the outputs of one length apart."""
    network = PredictionNetwork(len(AB), 4)
    for weights in network.parameters():
        weights.data.zero_()
    model = read_arpa(written(tmp_path), AB)
    [found] = search(
        *(torch.zeros(1, 1, 4), torch.tensor([1]), network),
        **{"beam_width": 50, "n_best": 50, "max_labels_per_frame": 2, "with_timings": False},
        **{"fusion": model, "fusion_weight": 1.0, "backend": backend},
    )
    by_labels = {hypothesis.labels: hypothesis.log_prob for hypothesis in found}
    nodes = 3 * math.log(1 / 4)  # two labels and null, each of four outputs
    fused = {(1, 2): -0.1 - 0.15, (1, 1): -0.1 - 1.2, (2, 2): -1.1 - 0.9}
    for labels, by_hand in fused.items():
        assert by_labels[labels] == pytest.approx(nodes + math.log(10) * by_hand, abs=1e-5)
