"""The kernels that search a whole batch, run on the CPU and held against Algorithm 1 verbatim."""

from dataclasses import replace

import pytest
import torch
from emulated import THREADS, emulated_kernels, needs_compiler
from slow import slow_except

from transduce import NULL, NGram, PredictionNetwork
from transduce.decoding import reference, utterances
from transduce.decoding.hypothesis import n_best
from transduce.decoding.options import SearchOptions
from transduce.decoding.problem import Problem
from transduce.decoding.search import timings_of

pytestmark = needs_compiler
LENGTHS = (11, 4, 0, 1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(utterances, "kernels", emulated_kernels)
    monkeypatch.setattr(utterances, "THREADS", THREADS)
    monkeypatch.setattr(utterances, "shared_memory", lambda device: 64 << 10)
    monkeypatch.setattr(utterances, "num_blocks", lambda device: 3)
    with torch.no_grad():
        yield


def problem(width, *, K=3, layers=1, null=3.0, seed=0, lengths=LENGTHS, most=4, **options):
    torch.manual_seed(seed)
    network = PredictionNetwork(K, 7, layers)
    for weights in network.parameters():
        weights *= 3
    transcriptions = [2 * torch.randn(T, K + 1) for T in lengths]
    for f in transcriptions:
        f[:, NULL] += null
    return Problem(
        transcriptions,
        network,
        None,
        K + 1,
        SearchOptions(width, max_labels_per_frame=most, **options),
    )


def assert_same(found, expected, width):
    for one, other in zip(found, expected, strict=True):
        ours, theirs = n_best(one, width, False), n_best(other, width, False)
        assert [labels for labels, *_ in ours] == [labels for labels, *_ in theirs]
        assert [p for _, p, _ in ours] == pytest.approx([p for _, p, _ in theirs], abs=2e-5)
        assert one.num_bounded == other.num_bounded


@pytest.mark.parametrize("layers", slow_except({1}, [1, 3]))
@pytest.mark.parametrize("width", slow_except({0, 1, 2}, [1, 2, 9, 40]))
def test_a_batch_finds_what_the_sequential_loop_finds(width, layers):
    asked = problem(width, layers=layers, seed=width)
    assert_same(utterances.beam_searches(asked), reference.beam_searches(asked), width)


@pytest.mark.parametrize("width", slow_except({0, 1}, [1, 9, 40]))
def test_blocks_that_share_an_utterance_find_what_the_sequential_loop_finds(width, monkeypatch):
    monkeypatch.setattr(utterances, "WIDTH_TOGETHER", 0)
    monkeypatch.setattr(utterances, "BATCHES_TOGETHER", (2, 5))
    monkeypatch.setattr(utterances, "STAGED_TOGETHER", 20)
    asked = problem(width, seed=width)
    expected = reference.beam_searches(asked)
    assert_same(utterances.beam_searches(asked), expected, width)
    monkeypatch.setattr(utterances, "PREFIXES", 20 * width)  # so that prefixes are removed
    monkeypatch.setattr(utterances, "PREFIXES_TOGETHER", 0)
    assert_same(utterances.beam_searches(asked), expected, width)


def test_a_bound_on_the_labels_of_a_frame_is_held_and_counted():
    asked = problem(9, null=-1.0, most=2)
    expected = reference.beam_searches(asked)
    assert max(one.num_bounded for one in expected) > 0
    assert_same(utterances.beam_searches(asked), expected, 9)


@pytest.mark.slow
def test_small_batches_of_hypotheses_find_the_same(monkeypatch):
    monkeypatch.setattr(utterances, "BATCHES", (1, 3))
    asked = problem(9, null=1.0, most=3)
    assert_same(utterances.beam_searches(asked), reference.beam_searches(asked), 9)


def test_removing_prefixes_that_are_out_of_reach_changes_nothing(monkeypatch):
    asked = problem(5, lengths=(60,), null=2.0, most=2)
    expected = utterances.beam_searches(asked)
    assert expected[0].num_prefixes > 140
    monkeypatch.setattr(utterances, "PREFIXES", 60)
    monkeypatch.setattr(utterances, "PREFIXES_PER_HYPOTHESIS", 0)
    found = utterances.beam_searches(asked)
    assert found[0].num_prefixes >= expected[0].num_prefixes
    assert n_best(found[0], 5, False) == n_best(expected[0], 5, False)


def test_an_utterance_without_room_is_left_to_another_search(monkeypatch):
    monkeypatch.setattr(utterances, "PREFIXES", 10)
    monkeypatch.setattr(utterances, "PREFIXES_PER_HYPOTHESIS", 0)
    found = utterances.beam_searches(problem(40, lengths=(11, 0)))
    assert found[0] is None
    assert n_best(found[1], 40, False) == [((), 0.0, 0.0)]
    monkeypatch.setattr(utterances, "LABELS_PER_FRAME", 1)
    found = utterances.greedy_searches(problem(1, null=-5.0, lengths=(3, 0)))
    assert found[0] is None and found[1].labels == ()


@pytest.mark.slow
def test_groups_that_fit_the_memory_find_the_same(monkeypatch):
    asked = problem(9)
    expected = utterances.beam_searches(asked)
    monkeypatch.setattr(utterances, "MEMORY", 1)
    for one, other in zip(utterances.beam_searches(asked), expected, strict=True):
        assert n_best(one, 9, False) == n_best(other, 9, False)


@pytest.mark.parametrize("width", [1, 4, 7, 30])
@pytest.mark.slow
def test_equally_probable_hypotheses_stand_in_the_order_of_their_labels(width):
    asked = problem(width, lengths=(3,), most=2)
    for weights in asked.network.parameters():
        weights.zero_()
    asked.transcriptions[0][:] = torch.tensor([0.5, 0.0, 0.0, 0.0])
    assert_same(utterances.beam_searches(asked), reference.beam_searches(asked), width)


def test_impossible_outputs_are_in_no_hypothesis():
    asked = problem(9)
    asked.network.output.bias[2] = -torch.inf
    assert_same(utterances.beam_searches(asked), reference.beam_searches(asked), 9)
    for f in asked.transcriptions:
        f[2:, NULL] = -torch.inf
    found = utterances.beam_searches(asked)
    assert_same(found, reference.beam_searches(asked), 9)
    assert [len(one.log_prob) for one in found] == [0, 0, 1, 9]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_prediction_that_is_no_number_is_refused(number):
    asked = problem(4)
    asked.network.output.bias[1] = number
    for search in (utterances.beam_searches, utterances.greedy_searches):
        with pytest.raises(ValueError, match="the prediction network gave NaN"):
            search(asked)


@pytest.mark.parametrize("null", slow_except({1}, [3.0, 0.0, -4.0]))
def test_the_greedy_search_takes_what_the_sequential_loop_takes(null):
    asked = problem(1, K=40, layers=3, null=null, most=3)
    for weights in (*asked.network.parameters(), *asked.transcriptions):
        weights *= 3
    expected = reference.greedy_searches(asked)
    for one, other in zip(utterances.greedy_searches(asked), expected, strict=True):
        assert (one.labels, one.frames) == (other.labels, other.frames)
        assert one.log_prob == pytest.approx(other.log_prob, abs=2e-5)
        assert one.num_bounded == other.num_bounded
    assert any(one.num_bounded for one in expected)  # where labels are given back
    assert any(len(one.labels) > 3 for one in expected)


def test_the_timings_of_a_batch_are_those_of_each_hypothesis(monkeypatch):
    asked = problem(9, null=1.0, lengths=(12, 4, 0))
    hypotheses = [
        (b, labels)
        for b, beam in enumerate(reference.beam_searches(problem(9, lengths=(12, 4, 0))))
        for labels, *_ in n_best(beam, 4, False)
    ]
    hypotheses.append((0, (1, 2, 3, 1, 3) * 14))
    expected = [timings_of(asked, asked.transcriptions[b], labels) for b, labels in hypotheses]
    for memory in (utterances.MEMORY, 1 << 16):  # all at once, and in groups
        monkeypatch.setattr(utterances, "MEMORY", memory)
        found = utterances.timings(asked, hypotheses)
        for one, other in zip(found, expected, strict=True):
            assert [t[:3] for t in one] == [t[:3] for t in other]
            assert [t.confidence for t in one] == pytest.approx(
                [t.confidence for t in other], abs=1e-5
            )
    monkeypatch.setattr(utterances, "shared_memory", lambda device: 70 * 40)
    assert utterances.timings(asked, hypotheses)[-1] is None


@pytest.mark.slow
def test_float64_transcriptions_keep_their_bits():
    asked = problem(9)
    doubled = replace(asked, transcriptions=[f.double() for f in asked.transcriptions])
    found, expected = utterances.beam_searches(doubled), utterances.beam_searches(asked)
    for one, other in zip(found, expected, strict=True):
        assert n_best(one, 9, False) == n_best(other, 9, False)


def test_the_way_to_search_follows_from_the_width_and_the_memory(monkeypatch):
    assert utterances.suits(problem(10))
    assert utterances.suits_greedy(problem(1))
    assert not utterances._Sizes.of(problem(10)).together
    assert utterances._Sizes.of(problem(200)).together
    assert utterances._Sizes.of(problem(10_000, lengths=[5] * 300)).together  # shared memory
    assert not utterances.suits(problem(10, fusion=NGram(2, 3, [[1, 2]]), fusion_weight=0.5))
    monkeypatch.setattr(utterances, "MEMORY", 1 << 20)
    assert not utterances.suits(problem(10_000))
    monkeypatch.setattr(utterances, "shared_memory", lambda device: 1 << 10)
    assert not utterances.suits(problem(10))
    assert not utterances.suits_greedy(problem(1))
