"""Searches of vectors in pieces, against the search of all vectors at once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import extra_megabytes, needs_proc

from transduce import SearchOptions
from transduce.decoding.search import run_search
from transduce.decoding.stream import BeamStream, GreedyStream
from transduce.networks import PredictionNetwork

pytestmark = pytest.mark.filterwarnings("ignore:max_labels_per_frame")
LABELS = 6


def network_of(seed=0, sharp=3.0):
    torch.manual_seed(seed)
    network = PredictionNetwork(LABELS, 20).eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights *= sharp
    return network


def vectors(number, seed=0, null=2.0, scale=2.0):
    f = scale * torch.randn(number, LABELS + 1, generator=torch.Generator().manual_seed(seed))
    f[:, 0] += null
    return f


@torch.no_grad()
def searched(f, network, options):
    return run_search([f], network, None, options, "auto")


def pieces(f, cuts):
    edges = [0, *sorted(min(cut, len(f)) for cut in cuts), len(f)]
    return [f[a:b] for a, b in pairwise(edges)]


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 60), max_size=60),
    width=st.sampled_from([1, 2, 4, 9, 40]),
    bias=st.sampled_from([0.0, -1.5]),
    follow=st.booleans(),
)
@pytest.mark.slow
def test_any_pieces_give_the_beam_of_the_whole(number, cuts, width, bias, follow):
    network, f = network_of(), vectors(number, seed=number)
    options = SearchOptions(width, n_best=min(3, width), null_bias=bias)
    [whole] = searched(f, network, options)
    stream = BeamStream(network, options, follow=follow)
    for piece in pieces(f, cuts):
        stream.accept(piece)
        stream.progress()
    assert stream.finish() == whole


@settings(max_examples=40, deadline=None)
@given(number=st.integers(0, 60), cuts=st.lists(st.integers(0, 60), max_size=60))
@pytest.mark.slow
def test_any_pieces_settle_at_the_same_vectors(number, cuts):
    network, f = network_of(), vectors(number, seed=number, null=1.0)
    options = SearchOptions(4, n_best=2)
    whole, stream = (BeamStream(network, options, 12, follow=follow) for follow in (False, True))
    whole.accept(f)
    for piece in pieces(f, cuts):
        stream.accept(piece)
    assert stream.finish() == whole.finish()
    assert stream._anchor == whole._anchor
    assert number <= 12 or stream._anchor > 0


def network_without_repeats():
    """Return a network that remembers the last label and makes it improbable."""
    network = PredictionNetwork(LABELS, LABELS).eval()
    layer = network.lstm.layers[0]
    with torch.no_grad():
        for weights in network.parameters():
            weights.zero_()
        gates = layer.biases.view(4, LABELS)  # input, forget, state, output
        gates[0], gates[1], gates[3] = 10.0, -10.0, 10.0
        layer.input_weights.view(4, LABELS, LABELS)[2] = 10 * torch.eye(LABELS)
        network.output.weight[1:] = -30 * torch.eye(LABELS)
    return network


def test_the_anchors_change_neither_labels_nor_times_of_a_sure_search():
    network, f = network_without_repeats(), vectors(300, null=6.0, scale=0.5)
    f[::3, 1:] += 12.0 * torch.nn.functional.one_hot(torch.arange(100) % LABELS, LABELS)
    options = SearchOptions(4)
    [[whole]] = searched(f, network, options)
    stream = BeamStream(network, options, 40)
    stream.accept(f)
    [found] = stream.finish()
    assert stream._anchor > 200 and len(found.labels) == 100
    assert found.labels == whole.labels
    # The beam has dropped hypotheses that differ long ago, and has room for others.
    assert found.log_prob == pytest.approx(whole.log_prob, abs=0.1)
    assert found.frames == whole.frames == tuple(range(0, 300, 3))
    for here, there in zip(found.timings, whole.timings, strict=True):
        assert here[:3] == there[:3]
        assert here.confidence == pytest.approx(there.confidence, abs=0.02)


@pytest.mark.parametrize("most", [12, 10_000])
def test_stable_labels_never_change_and_lead_to_the_result(most):
    network, f = network_of(), vectors(120, seed=5)
    stream = BeamStream(network, SearchOptions(5), most)
    before, timings = [], []
    for row in f:
        stream.accept(row[None])
        progress = stream.progress()
        stable = progress.track.labels[: progress.num_stable]
        assert stable[: len(before)] == before
        assert progress.track.timings[: len(timings)] == timings
        before, timings = stable, progress.track.timings[: progress.num_stable]
        assert len(progress.unstable) == len(progress.unstable_timings)
        frames = [t.frame for t in (*timings, *progress.unstable_timings)]
        assert frames == sorted(frames) and all(t < stream.num_vectors for t in frames)
    [found] = stream.finish()
    assert found.labels == (*before, *progress.unstable)
    assert len(before) > 20
    # The times are found without what comes later, so that a few may differ.
    pairs = zip(found.timings, (*timings, *progress.unstable_timings), strict=True)
    assert sum(abs(a.frame - b.frame) <= 1 for a, b in pairs) > 0.9 * len(found.labels)


def test_stable_labels_do_not_depend_on_the_pieces():
    network, f = network_of(), vectors(80, seed=7)
    tracks = []
    for size in (1, 7, 80):
        stream = BeamStream(network, SearchOptions(5), 30)
        for piece in f.split(size):
            stream.accept(piece)
        progress = stream.progress()
        tracks.append((progress.track, progress.unstable, progress.unstable_timings))
    assert tracks[0] == tracks[1] == tracks[2]


def test_a_beam_that_never_agrees_is_made_to():
    network = network_without_repeats()
    with torch.no_grad():
        network.output.weight[1:3, :2] = -30.0  # neither label 1 nor 2 follows either
    f = torch.full((60, LABELS + 1), -20.0)
    f[:, 0], f[0, 1:3] = 0.0, 20.0  # one of the two in the first vector, and then none
    stream = BeamStream(network, SearchOptions(4), 20)
    stream.accept(f[:20])
    assert stream.progress().num_stable == 0
    stream.accept(f[20:])
    assert stream.progress().num_stable == 1
    assert [h.labels for h in stream.finish()] == [(1,)]


def planted(number):
    """Return vectors that emit a label in every fifth frame."""
    f = vectors(number, null=6.0, scale=0.5)
    names = torch.arange(number // 5) % LABELS
    f[::5, 1:] += 12.0 * torch.nn.functional.one_hot(names, LABELS)
    return f


@needs_proc
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.slow
def test_the_memory_of_a_stream_does_not_grow_with_its_input(follow):
    network, f = network_without_repeats(), planted(1000)

    def run(times):
        stream = BeamStream(network, SearchOptions(4), 800, follow=follow)
        for _ in range(times):
            stream.accept(f)
        assert len(stream.finish()[0].labels) == 200 * times
        trie = stream._search.search.prefixes.parent.size
        assert len(stream._f) <= 800 and trie <= 4096 and stream._search.num_before > 0

    run(2)
    short, long = (extra_megabytes(lambda n=n: run(n)) for n in (3, 30))
    assert long < short + 5  # the output: some hundred bytes a label


def test_labels_that_may_come_at_any_time_are_bounded_too():
    network = network_of()
    with torch.no_grad():
        for weights in network.parameters():
            weights.zero_()
    f = torch.zeros(1, LABELS + 1).repeat(400, 1)
    f[:, 1] = 1.5  # the same label, at every time alike
    stream = BeamStream(network, SearchOptions(2), 20)
    stream.accept(f)
    [found] = stream.finish()
    assert len(found.labels) > 60
    assert len(found.labels) - stream._search.num_before <= 20 + 20 * 20
    assert stream._search.search.prefixes.parent.size <= 4096


@settings(max_examples=30, deadline=None)
@given(number=st.integers(0, 60), cuts=st.lists(st.integers(0, 60), max_size=60))
def test_any_pieces_give_the_greedy_alignment_of_the_whole(number, cuts):
    from transduce.decoding.cpu import greedy_searches
    from transduce.decoding.problem import Problem

    network, f = network_of(), vectors(number, seed=number, null=1.0)
    options = SearchOptions(1, with_timings=False)
    [whole] = greedy_searches(Problem([f], network, None, LABELS + 1, options))
    stream = GreedyStream(network, options)
    for piece in pieces(f, cuts):
        stream.accept(piece)
        progress = stream.progress()
    [found] = stream.finish()
    assert (found.labels, found.frames, found.log_prob) == (
        whole.labels, whole.frames, whole.log_prob,
    )  # fmt: skip
    assert found.score == found.log_prob / max(1, len(found.labels))
    assert tuple(progress.track.labels) == found.labels and progress.unstable == ()


def test_vectors_with_nan_are_refused_and_the_stream_goes_on():
    network, f = network_of(), vectors(20)
    stream, bad = BeamStream(network, SearchOptions(3)), vectors(3)
    bad[1, 2] = torch.nan
    stream.accept(f[:9])
    with pytest.raises(ValueError, match=r"gave NaN or \+inf"):
        stream.accept(bad)
    stream.accept(f[9:])
    [whole] = searched(f, network, SearchOptions(3))
    assert stream.finish() == whole
