"""Error rates of small examples, and the bootstrap interval against the binomial formula."""

import json
import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from transduce.evaluation import (
    PAPER_TABLE,
    Confusion,
    Evaluation,
    bits_per_label,
    bootstrap_interval,
    error_rate,
    misclassified,
    nearest_error_rate,
)
from transduce.tables import error_table, results_table


def printed(renderable):
    output = StringIO()
    Console(file=output, width=100).print(renderable)
    return output.getvalue()


def edit_distance(a, b):
    """Compute the edit distance recursively, by its definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        edit_distance(a[1:], b) + 1,
        edit_distance(a, b[1:]) + 1,
        edit_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


short = st.lists(st.sampled_from(["aa", "b", "ccc"]), max_size=4)


@given(short, short)
def test_edits_are_the_edit_distance(output, target):
    result = error_rate([output], [target], num_resamples=0)
    assert result.edits == edit_distance(output, target)
    assert result.insertions - result.deletions == len(output) - len(target)
    assert result.num_wrong_sequences == (output != target)


def test_the_rate_is_summed_edits_over_summed_length():
    outputs = [["s", "ih", "t"], ["k"], ["a", "b", "c", "d"]]
    targets = [["s", "eh", "t"], ["k", "ae"], ["a", "b", "c"]]
    result = error_rate(outputs, targets)
    assert (result.substitutions, result.insertions, result.deletions) == (1, 1, 1)
    assert result.rate == 3 / 8
    assert result.sequence_rate == 1
    assert set(result.confusions) == {
        Confusion("eh", "ih", 1),
        Confusion("ae", None, 1),
        Confusion(None, "d", 1),
    }


def test_the_commonest_confusions_come_first():
    result = error_rate([["m"]] * 3 + [["a"]], [["n"]] * 3 + [["b"]], num_confusions=1)
    assert result.confusions == (Confusion("n", "m", 3),)


def test_symbols_of_several_letters_are_one_symbol():
    assert error_rate([["sh", "iy"]], [["s", "iy"]]).edits == 1


def test_a_word_is_right_if_it_equals_any_reference_and_its_edits_are_to_the_nearest():
    outputs = [["EY", "B"], ["K", "AE", "T", "S"]]
    references = [[["AE", "B", "Z"], ["EY", "B"]], [["K", "AH"], ["K", "AE", "T"]]]
    result = nearest_error_rate(outputs, references)
    assert result.num_wrong_sequences == 1
    assert result.sequence_rate == 0.5
    assert (result.edits, result.length) == (1, 5)


def test_of_references_equally_near_the_first_counts():
    result = nearest_error_rate([["a"]], [[["a", "b"], ["c"]]])
    assert (result.edits, result.length) == (1, 2)


def test_outputs_without_targets_are_refused():
    with pytest.raises(ValueError, match="1 outputs for 2 targets"):
        error_rate([["a"]], [["a"], ["b"]])
    with pytest.raises(ValueError, match="output 0 has no reference"):
        nearest_error_rate([["a"]], [[]])


def test_nothing_at_all_has_no_rate():
    result = error_rate([], [])
    assert math.isnan(result.rate)
    assert result.interval is None
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["rate"] is None


def test_the_interval_is_that_of_the_binomial_and_the_same_for_the_same_seed():
    wrong = (np.arange(2000) % 4 == 0).astype(int)
    interval = bootstrap_interval(wrong, np.ones(2000, int), 2000, seed=1)
    half = 1.96 * math.sqrt(0.25 * 0.75 / 2000)
    assert interval.low == pytest.approx(0.25 - half, abs=0.0015)
    assert interval.high == pytest.approx(0.25 + half, abs=0.0015)
    assert interval == bootstrap_interval(wrong, np.ones(2000, int), 2000, seed=1)
    assert interval != bootstrap_interval(wrong, np.ones(2000, int), 2000, seed=2)


def test_results_print_as_a_table_and_convert_to_json():
    result = error_rate([["a", "b"], ["c"]], [["a"], ["c"]])
    text = printed(error_table(result))
    for part in ("error rate", "50.00 %", "insertions", "∅ → b"):
        assert part in text
    assert "phone error rate" in printed(error_table(result, "phone"))
    read = json.loads(json.dumps(result.as_dict()))
    assert (read["rate"], read["insertions"]) == (0.5, 1)
    assert read["confusions"] == [{"target": None, "output": "b", "count": 1}]
    assert read["interval"]["confidence"] == 0.95


def test_the_papers_table_stands_beside_ours():
    ours = Evaluation("transducer", 1.234, 0.25, error_rate([["a"]], [["b"]]), epochs=9)
    text = printed(results_table([ours, PAPER_TABLE[1]], "Table 1"))
    assert "1.23" in text
    assert "76, 1.0, 23.2 %" in text
    assert json.loads(json.dumps(ours.as_dict()))["detail"]["substitutions"] == 1


def test_the_table_names_the_confidence_of_its_interval():
    result = error_rate([["a"]], [["b"]])
    wide = replace(result, interval=bootstrap_interval(np.ones(3), np.ones(3), confidence=0.8))
    assert "95 % interval" in printed(error_table(result))
    assert "80 % interval" in printed(error_table(wide))


def test_a_rate_that_does_not_exist_is_null_in_json():
    row = Evaluation("transducer", math.nan, math.nan).as_dict()
    assert (row["bits_per_label"], row["error"]) == (None, None)
    json.dumps(row, allow_nan=False)


def test_ids_are_not_compared_with_symbols():
    assert error_rate([[1, 2]], [[1, 3]]).edits == 1
    with pytest.raises(ValueError, match="some are ids; decode the ids with the alphabet"):
        error_rate([[1, 2]], [["a", "b"]])


def test_bits_are_nats_over_ln_2():
    assert bits_per_label(math.log(39) * 10, 10) == pytest.approx(math.log2(39))
    with pytest.raises(ValueError, match="no labels"):
        bits_per_label(1.0, 0)


@pytest.mark.parametrize("with_null", [False, True])
def test_misclassified_labels_are_counted_up_to_each_length(with_null):
    labels, num_labels = torch.tensor([[1, 2, 3], [2, 1, 1]]), torch.tensor([3, 1])
    likeliest = torch.tensor([[1, 3, 3, 1], [2, 2, 2, 1]])  # predicted by g_0, g_1, ...
    scores = torch.nn.functional.one_hot(likeliest, 4).float()
    if with_null:
        scores[..., 0] = 9.0
    else:
        scores = scores[..., 1:]
    assert misclassified(scores, labels, num_labels, with_null=with_null) == 1


def test_a_prediction_network_that_lacks_a_label_is_refused():
    scores, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 4]])
    assert misclassified(scores, labels, torch.tensor([2]), with_null=False) == 1
    with pytest.raises(ValueError, match="a label 4, but with_null=True leaves 3 labels"):
        misclassified(scores, labels, torch.tensor([2]), with_null=True)
    with pytest.raises(ValueError, match=r"prediction must be \[B, U\+1, ...\]"):
        misclassified(scores[:, 1:], labels, torch.tensor([2]), with_null=False)


def test_scoring_a_corpus_takes_seconds():
    generator = np.random.default_rng(0)
    words = [[f"p{k}" for k in generator.integers(0, 39, 6)] for _ in range(12_000)]
    result = nearest_error_rate(words, [[word[:5], word[1:]] for word in words])
    assert result.edits == 12_000
    assert result.rate == 0.2
