"""CTC decoding, held against every path one by one."""

import math
from collections import defaultdict
from itertools import groupby, product

import numpy as np
import pytest
import torch

from transduce import NGram, SearchOptions, ctc_beam_search, ctc_best_path, ctc_prefix_search


def collapse(path):
    return tuple(k for k, _ in groupby(path) if k != 0)


def every_labelling(f):
    """The probability of every labelling of f [T, K+1]."""
    log_prob = f.double().log_softmax(-1).numpy()
    total = defaultdict(float)
    for path in product(range(f.shape[1]), repeat=len(f)):
        total[collapse(path)] += np.exp(sum(log_prob[t, k] for t, k in enumerate(path)))
    return total


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("T, K, scale", [(1, 3, 1.0), (5, 2, 1.0), (6, 2, 3.0), (5, 3, 0.3)])
def test_the_prefix_search_finds_the_most_probable_labelling(T, K, scale, seed):
    torch.manual_seed(seed)
    f = torch.randn(1, T, K + 1) * scale
    exact = every_labelling(f[0])
    (found,) = ctc_prefix_search(f, torch.tensor([T]), threshold=1)
    assert found.labels == max(exact, key=exact.get)
    assert found.log_prob == pytest.approx(np.log(exact[found.labels]), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_path_is_the_best_of_all_paths(seed):
    torch.manual_seed(seed)
    f = torch.randn(1, 5, 3)
    log_prob = f[0].double().log_softmax(-1)
    paths = list(product(range(3), repeat=5))
    scores = [sum(log_prob[t, k] for t, k in enumerate(path)) for path in paths]
    best = max(range(len(paths)), key=scores.__getitem__)
    (found,) = ctc_best_path(f, torch.tensor([5]))
    assert found.labels == collapse(paths[best])
    assert found.log_prob == pytest.approx(float(scores[best]))


def test_the_prefix_search_finds_what_the_best_path_misses():
    # Graves (2006): blank is the best at both frames, but a label at either is more probable.
    f = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    assert ctc_best_path(f, torch.tensor([2]))[0].labels == ()
    found = ctc_prefix_search(f, torch.tensor([2]))[0]
    assert found.labels == (1,)
    assert found.log_prob == pytest.approx(np.log(0.64))


@pytest.mark.parametrize("seed", range(5))
def test_sections_between_certain_blanks_are_decoded_alone(seed):
    torch.manual_seed(seed)
    f = torch.randn(1, 7, 3)
    f[0, [0, 3], 0] = 20.0  # more than 0.995
    (found,) = ctc_prefix_search(f, torch.tensor([7]))
    parts = [ctc_prefix_search(f[:, a:b], torch.tensor([b - a]))[0] for a, b in ((1, 3), (4, 7))]
    assert found.labels == parts[0].labels + parts[1].labels
    blanks = f[0].double().log_softmax(-1)[[0, 3], 0].sum()
    assert found.log_prob == pytest.approx(sum(p.log_prob for p in parts) + float(blanks))
    (whole,) = ctc_prefix_search(f, torch.tensor([7]), threshold=1)
    assert found.log_prob <= whole.log_prob + 1e-9


def test_a_blank_below_the_threshold_does_not_cut():
    # Alone either side is best empty; together the label is more probable.
    f = torch.tensor([[[0.6, 0.4], [0.994, 0.006], [0.6, 0.4]]]).log()
    num_frames = torch.tensor([3])
    assert ctc_prefix_search(f, num_frames)[0].labels == (1,)
    assert ctc_prefix_search(f, num_frames, threshold=0.99)[0].labels == ()


def test_a_repeated_label_needs_a_blank_between():
    f = torch.full((1, 3, 2), -20.0)
    f[0, [0, 1, 2], [1, 0, 1]] = 0
    assert ctc_prefix_search(f, torch.tensor([3]))[0].labels == (1, 1)
    f[0, 1] = f[0, 0]
    assert ctc_prefix_search(f, torch.tensor([3]))[0].labels == (1,)


def test_a_section_without_end_is_cut_short_and_said():
    torch.manual_seed(0)
    f = 0.1 * torch.randn(2, 30, 40)  # a network that knows nothing
    f[1, :, 0] = 20.0
    words = "max_prefixes = 50 was met in 1 sections of item 0;"
    with pytest.warns(UserWarning, match=words) as said:
        found, empty = ctc_prefix_search(f, torch.tensor([30, 30]), max_prefixes=50)
    assert said[0].filename == __file__
    assert found.log_prob > ctc_best_path(f, torch.tensor([30, 30]))[0].log_prob
    assert empty.labels == ()


def test_a_search_that_is_cut_short_falls_back_on_the_best_path():
    f = torch.zeros(1, 30, 40)
    f[0, torch.arange(30), torch.arange(1, 31)] = 3.0
    with pytest.warns(UserWarning, match="max_prefixes = 5 was met"):
        (found,) = ctc_prefix_search(f, torch.tensor([30]), max_prefixes=5)
    (path,) = ctc_best_path(f, torch.tensor([30]))
    assert found.labels == path.labels == tuple(range(1, 31))
    assert found.log_prob >= path.log_prob - 1e-9


def test_a_search_that_is_cut_short_gives_its_labelling_the_exact_probability():
    torch.manual_seed(0)
    f = torch.randn(1, 6, 3)
    exact = every_labelling(f[0])
    with pytest.warns(UserWarning, match="max_prefixes = 1 was met"):
        (found,) = ctc_prefix_search(f, torch.tensor([6]), max_prefixes=1)
    assert found.log_prob == pytest.approx(np.log(exact[found.labels]), abs=1e-9)


def test_what_lies_past_the_end_is_not_read():
    f = torch.randn(2, 6, 4)
    f[1, 2:] = torch.nan
    for search in (ctc_best_path, ctc_prefix_search):
        together = search(f, torch.tensor([6, 2]))
        assert together[1] == search(f[1:, :2], torch.tensor([2]))[0]
        assert search(f, torch.tensor([0, 1]))[0] == ((), 0.0)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        ((torch.randn(3, 2), torch.tensor([3])), {}, "transcription"),
        ((torch.randn(1, 3, 2), torch.tensor([4])), {}, r"num_frames\[0\]"),
        ((torch.randn(1, 3, 2), torch.tensor([3, 3])), {}, "num_frames"),
        ((torch.full((1, 3, 2), torch.nan), torch.tensor([3])), {}, "NaN"),
        ((torch.randn(1, 3, 2), torch.tensor([3])), {"threshold": 0.0}, "threshold"),
        ((torch.randn(1, 3, 2), torch.tensor([3])), {"max_prefixes": 0}, "max_prefixes"),
        ((torch.full((1, 3, 2), -torch.inf), torch.tensor([3])), {}, "item 0 at 0 is -inf for ev"),
        ((torch.ones(1, 3, 2).long(), torch.tensor([3])), {}, "floating-point, not torch.int64"),
        ((torch.randn(1, 3, 2), torch.tensor([True])), {}, "num_frames must be integers"),
    ],
)
def test_what_is_wrong_is_said(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        ctc_prefix_search(*arguments, **options)


# --- The prefix beam search ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_that_is_wide_enough_has_every_labelling(seed):
    torch.manual_seed(seed)
    f = 2 * torch.randn(1, 5, 3)
    exact = every_labelling(f[0])
    options = SearchOptions(10_000, n_best=10_000, length_normalised=False)
    (found,) = ctc_beam_search(f, torch.tensor([5]), options)
    assert {one.labels for one in found} == set(exact)
    for one in found:
        assert math.exp(one.log_prob) == pytest.approx(exact[one.labels], rel=1e-9)
    assert [one.log_prob for one in found] == sorted((o.log_prob for o in found), reverse=True)


@pytest.mark.parametrize("width", [1, 3])
def test_a_narrow_beam_finds_no_labelling_more_probable_than_it_is(width):
    torch.manual_seed(width)
    f, num_frames = 2 * torch.randn(2, 6, 4), torch.tensor([6, 0])
    exact = every_labelling(f[0])
    found, nothing = ctc_beam_search(f, num_frames, SearchOptions(width, n_best=width))
    assert nothing == [((), 0.0)]
    assert len(found) == width
    for one in found:
        assert math.exp(one.log_prob) <= exact[one.labels] * (1 + 1e-9)


def test_fusion_adds_its_score_for_every_label_of_a_labelling():
    torch.manual_seed(0)
    f, ngram, weight = torch.randn(1, 4, 3), NGram(2, 2, [[1, 2, 2], [2]]), 0.7
    options = SearchOptions(
        1000, n_best=1000, fusion=ngram, fusion_weight=weight, length_normalised=False
    )
    (found,) = ctc_beam_search(f, torch.tensor([4]), options)
    exact = every_labelling(f[0])
    assert len(found) == len(exact)
    for one in found:
        state, expected = ngram.start(), math.log(exact[one.labels])
        for label in one.labels:
            expected += weight * ngram.log_probs(state)[label - 1]
            state = ngram.advance(state, label)
        assert one.log_prob == pytest.approx(expected)
