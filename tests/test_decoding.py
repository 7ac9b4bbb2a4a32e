"""The searches: held against the lattice over all sequences, and against Algorithm 1 verbatim."""

import math
import warnings
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from memory import extra_megabytes, needs_proc
from slow import slow_except
from torch.testing import assert_close

from transduce import (
    NULL,
    NGram,
    PredictionNetwork,
    Transducer,
    beam_search,
    best_alignment,
    greedy_search,
    label_timings,
    lattice_transitions,
    transducer_loss,
)
from transduce.decoding import beam_search_steps, eager, problem, reference
from transduce.decoding.cpu import beam as cpu
from transduce.decoding.cpu import greedy
from transduce.decoding.cpu import trie as cpu_trie
from transduce.decoding.fusion import FusedScores
from transduce.decoding.options import SearchOptions
from transduce.decoding.problem import Problem
from transduce.decoding.search import transcribe
from transduce.decoding.steps import Flow, _flows
from transduce.decoding.trie import Trie

BACKENDS = ["cpu", "eager"]
ALL_BACKENDS = ["reference", *BACKENDS]
MET = "ignore:max_labels_per_frame"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def transducer(K=3, seed=0, *, sharpness=10.0, null=1.0, hidden=7, num_layers=1, double=True):
    """A random transducer whose outputs differ enough to matter."""
    torch.manual_seed(seed)
    model = Transducer(4, K, hidden, num_layers)
    model.prediction_network = PredictionNetwork(K, hidden, num_layers)
    with torch.no_grad():
        for network in (model.prediction_network, model.transcription_network):
            for weights in network.parameters():
                weights *= 3
            for weights in network.output.parameters():
                weights *= sharpness / 3
        model.transcription_network.output.bias[NULL] += null
    return model.double() if double else model


def frames_of(T, seed=0, dtype=torch.float64):
    return torch.randn(1, T, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_log_prob(model, frames, labels):
    f, num_frames = model.transcription_network(frames)
    y = torch.tensor([labels], dtype=torch.int64)
    g = model.prediction_network(y)
    return -float(transducer_loss(f, g, y, num_frames, torch.tensor([len(labels)])))


def search(model, frames, **options):
    (found,) = beam_search(model, frames, torch.tensor([frames.shape[1]]), **options)
    return found


# --- Exactness ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("K, T, longest", [(2, 3, 3), (1, 4, 6), (3, 2, 3)])
@pytest.mark.parametrize("double", [True, False])
def test_with_unlimited_width_every_probability_is_the_lattices(K, T, longest, double, backend):
    model = transducer(K, double=double)
    frames = frames_of(T, dtype=next(model.parameters()).dtype)
    found = search(
        model, frames, beam_width=10**5, n_best=10**5, max_labels_per_frame=longest,
        with_timings=False, backend=backend,
    )  # fmt: skip
    log_prob = {h.labels: h.log_prob for h in found}
    assert len(log_prob) == len(found) == sum(K**n for n in range(T * longest + 1))
    for n in range(longest + 1):
        for labels in product(range(1, K + 1), repeat=n):
            exact = exact_log_prob(model, frames, labels)
            assert log_prob[labels] == pytest.approx(exact, abs=1e-9 if double else 1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 2, 5, 30])
def test_with_a_finite_width_no_probability_exceeds_the_exact_one(width, seed):
    model, frames = transducer(4, seed), frames_of(8, seed)
    for h in search(model, frames, beam_width=width, n_best=width):
        assert h.log_prob <= exact_log_prob(model, frames, h.labels) + 1e-9


def test_a_wider_beam_gives_no_sequence_less():
    model, frames = transducer(3, 4), frames_of(6)
    narrow, wide = (search(model, frames, beam_width=w, n_best=w) for w in (4, 400))
    log_prob = {h.labels: h.log_prob for h in wide}
    assert all(log_prob[h.labels] >= h.log_prob - 1e-12 for h in narrow)


# --- In batches as one by one -------------------------------------------------------------------


def assert_same(found, expected, tolerance):
    assert [h.labels for h in found] == [h.labels for h in expected]
    for h, e in zip(found, expected, strict=True):
        assert h.log_prob == pytest.approx(e.log_prob, abs=tolerance)
        assert h.score == pytest.approx(e.score, abs=tolerance)
        assert h.frames == e.frames


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", slow_except({0}, range(4)))
@pytest.mark.parametrize("width", [1, 2, 9, 60])
@pytest.mark.parametrize("null, sharpness", [(1.0, 10.0), (-1.0, 4.0), (4.0, 30.0)])
def test_batches_find_what_the_sequential_loop_finds(null, sharpness, width, seed, backend):
    model = transducer(5, seed, null=null, sharpness=sharpness)
    options = dict(beam_width=width, n_best=width, max_labels_per_frame=4)
    expected = search(model, frames_of(10, seed), backend="reference", **options)
    found = search(model, frames_of(10, seed), backend=backend, **options)
    assert_same(found, expected, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_beam_in_float32_finds_what_the_sequential_loop_finds(backend):
    model = transducer(9, 3, null=4.0, sharpness=8.0, hidden=20, double=False)
    frames = frames_of(20, dtype=torch.float32)
    options = dict(beam_width=300, n_best=300, with_timings=False)
    expected = search(model, frames, backend="reference", **options)
    assert_same(search(model, frames, backend=backend, **options), expected, 1e-5)


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_layers", [2, 3])
def test_prediction_networks_of_several_layers_are_searched_alike(num_layers, backend):
    model = transducer(4, num_layers=num_layers)
    options = dict(beam_width=25, n_best=25)
    expected = search(model, frames_of(7), backend="reference", **options)
    assert_same(search(model, frames_of(7), backend=backend, **options), expected, 1e-9)


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_embeddings_are_searched_as_the_product_that_they_stand_for(backend):
    model, embedded = transducer(5), Transducer(4, 5, 7, embedding_size=6).double()
    weights = model.state_dict()
    for network, size in (("transcription_network", 4), ("prediction_network", 5)):
        # The input weights as the product of themselves and of the unit matrix, with more zeros.
        name = f"{network}.lstm.layers.0."
        inputs = torch.nn.functional.pad(weights[name + "input_weights"], (0, 6 - size))
        mixed = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
        weights[name + "input_weights"] = inputs @ mixed.mT
        weights[name + "embedding"] = torch.eye(size, 6, dtype=torch.float64) @ mixed.mT
    embedded.load_state_dict(weights)
    options = dict(beam_width=25, n_best=25, backend=backend)
    assert_same(
        search(embedded, frames_of(7), **options), search(model, frames_of(7), **options), 1e-9
    )
    length = torch.tensor([7])
    [ours], [theirs] = (greedy_search(m, frames_of(7), length) for m in (embedded, model))
    assert (ours.labels, ours.frames) == (theirs.labels, theirs.frames)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4, 7, 30])
def test_equally_probable_hypotheses_stand_in_the_order_of_their_labels(width, backend):
    model = transducer(3, null=0.0)
    with torch.no_grad():
        for network in (model.prediction_network, model.transcription_network):
            for weights in network.output.parameters():
                weights.zero_()
    options = dict(beam_width=width, n_best=width, max_labels_per_frame=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = search(model, frames_of(3), backend="reference", **options)
        found = search(model, frames_of(3), backend=backend, **options)
    assert_same(found, expected, 1e-9)
    keys = [(-round(h.score, 9), h.labels) for h in found]
    assert keys == sorted(keys)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_disagree_by_a_thousand_nats_are_exact(backend):
    model, frames = transducer(3), frames_of(4)
    f, g = [0.0, -2000, -900, -1000], [-2000.0, 0, -900, -800]  # no product of exponentials is left
    model.transcription_network.output.bias += torch.tensor(f)
    model.prediction_network.output.bias += torch.tensor(g)
    options = dict(beam_width=12, n_best=12, max_labels_per_frame=3, with_timings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = search(model, frames, backend="reference", **options)
        found = search(model, frames, backend=backend, **options)
    for h, e in zip(found, expected, strict=True):
        assert h.labels == e.labels
        assert h.log_prob == pytest.approx(e.log_prob, rel=1e-9)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_an_impossible_label_is_in_no_hypothesis(backend):
    model = transducer(3)
    with torch.no_grad():
        model.prediction_network.output.bias[2] = -torch.inf
    found = search(model, frames_of(5), beam_width=20, n_best=20, backend=backend)
    assert found and all(2 not in h.labels for h in found)
    assert all(math.isfinite(h.log_prob) for h in found)


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_where_null_is_impossible_there_is_no_hypothesis(backend):
    model = transducer(3)
    with torch.no_grad():
        model.prediction_network.output.bias[NULL] = -torch.inf
    options = dict(beam_width=5, max_labels_per_frame=3)
    assert search(model, frames_of(3), backend=backend, **options) == []


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_each_prefix_is_stepped_to_once(backend, monkeypatch):
    model, rows = transducer(4), []
    network = model.prediction_network
    f = model.transcription_network(frames_of(12))[0][0].detach()
    problem = Problem([f], network, None, f.shape[1], SearchOptions(beam_width=30))
    (least,) = reference.beam_searches(problem)

    def counted(where, name, count):
        function = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a: (rows.append(count(*a)), function(*a))[1])

    if backend == "cpu":
        counted(cpu, "step_new", lambda first, last, *rest: last - first)
        monkeypatch.setattr(cpu, "run", cpu.run.py_func)  # compiled, it has its own step_new
    else:
        counted(network, "step", lambda label, state: len(label))
    module = {"reference": reference, "cpu": cpu, "eager": eager}[backend]
    (found,) = module.beam_searches(problem)
    assert sum(rows) == found.num_prefixes <= found.num_expanded
    assert found.num_prefixes >= least.num_prefixes  # batches look a little further


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("most_open", slow_except({1}, [1 << 16, 8]))
def test_removing_prefixes_that_are_out_of_reach_changes_nothing(
    most_open, fused, backend, monkeypatch
):
    model, frames = transducer(6, null=-1.0), frames_of(20)
    options = dict(beam_width=15, n_best=15, max_labels_per_frame=5)
    if fused:
        options |= dict(fusion=NGram(3, 6, [[1, 2, 3, 1, 2, 4], [5, 6], [3, 1]]), fusion_weight=0.5)
    expected = search(model, frames, backend=backend, **options)
    removals = []
    if backend == "cpu":
        monkeypatch.setattr(cpu, "make_room", _counted(cpu.make_room, removals))
    else:
        monkeypatch.setattr(Trie, "keep", _counted(Trie.keep, removals))
    monkeypatch.setattr(cpu_trie, "FIRST_ROOM", 16)
    monkeypatch.setattr(problem, "SPARE_PREFIXES", (1, 0))
    monkeypatch.setattr(problem, "MOST_OPEN", (most_open, 0))
    monkeypatch.setattr(eager, "MIN_BATCH", 16)
    found = search(model, frames, backend=backend, **options)
    assert len(removals) > 3
    assert found == expected  # every number
    assert_same(found, search(model, frames, backend="reference", **options), 1e-9)


def _counted(function, calls):
    return lambda *arguments: (calls.append(arguments), function(*arguments))[1]


@needs_proc
@pytest.mark.filterwarnings(MET)
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_with_the_hypotheses_looked_at(backend, monkeypatch):
    model = transducer(30, hidden=100, null=-5.0, sharpness=1.0, double=False)  # avoids null
    frames, num_frames = frames_of(8, dtype=torch.float32), torch.tensor([8])
    monkeypatch.setattr(problem, "SPARE_PREFIXES", (1000, 0))
    options = dict(beam_width=20, max_labels_per_frame=3, with_timings=False, backend=backend)
    beam_search(model, frames[:, :2], num_frames - 6, **options)
    row = 1e-6 * (2 * 4 * 100 + 31 * (4 + 8) + 31 * 8)  # megabytes of a prefix at least
    f = transcribe(model, frames, num_frames)
    module = {"cpu": cpu, "eager": eager}[backend]
    asked = SearchOptions(**{k: v for k, v in options.items() if k != "backend"})
    posed = Problem(f, model.prediction_network, None, 31, asked)
    (found,) = module.beam_searches(posed)
    assert found.num_prefixes > 20_000
    used = extra_megabytes(lambda: beam_search(model, frames, num_frames, **options))
    assert used < row * found.num_prefixes / 2


# --- Many, and few ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("double", [True, False])
def test_an_utterance_among_others_is_decoded_as_it_is_alone(double, backend):
    model = transducer(6, hidden=33, null=3.0, double=double)
    frames = torch.randn(5, 14, 4).to(next(model.parameters()).dtype)
    num_frames = torch.tensor([14, 3, 9, 0, 1])
    options = dict(beam_width=40, n_best=40, backend=backend)
    together = beam_search(model, frames, num_frames, **options)
    for b, n in enumerate(num_frames.tolist()):
        (alone,) = beam_search(model, frames[b : b + 1, :n], num_frames[b : b + 1], **options)
        assert together[b] == alone  # every number


def test_a_result_does_not_depend_on_the_threads(set_num_threads):
    model = transducer(20, hidden=40, null=4.0, double=False)
    f = model.transcription_network(frames_of(6, dtype=torch.float32))[0][0].detach()
    weights = cpu.packed_weights(model.prediction_network)
    limits = cpu.Limits(3000, 20, spare_prefixes=10**6, most_open=10**6)
    set_num_threads(2)
    searches = [cpu.BeamSearch(weights, f.shape[1], None, limits, n) for n in (1, 2)]
    for search in searches:
        search.advance(f)
    one, other = (search.found() for search in searches)
    assert one.num_prefixes == other.num_prefixes > 3000
    assert (one.log_prob == other.log_prob).all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_frames_leave_the_empty_sequence(backend):
    model = transducer()
    for frames in (torch.empty(2, 0, 4).double(), torch.randn(2, 3, 4).double()):
        found = beam_search(
            model, frames, torch.tensor([0, 0]), beam_width=3, n_best=3, backend=backend
        )
        assert [[h.labels for h in one] for one in found] == [[()], [()]]
        assert found[0][0].log_prob == 0
    assert beam_search(model, torch.empty(0, 3, 4), torch.empty(0).long(), beam_width=3) == []


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_one_frame_is_exact_for_all_that_it_finds(backend):
    model, frames = transducer(3, 2), frames_of(1)
    found = search(model, frames, beam_width=30, n_best=30, backend=backend)
    assert len(found) == 30
    for h in found:
        assert h.log_prob == pytest.approx(exact_log_prob(model, frames, h.labels), abs=1e-9)
        assert h.frames == (0,) * len(h.labels)


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("width", [1, 3, 50])
def test_hypotheses_are_sorted_and_no_two_are_equal(width, backend):
    model, frames = transducer(2, 5), frames_of(7)
    for length_normalised in (True, False):
        found = search(
            model, frames, beam_width=width, n_best=width, backend=backend,
            length_normalised=length_normalised,
        )  # fmt: skip
        assert len({h.labels for h in found}) == len(found) <= width
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for h in found:
            length = max(1, len(h.labels)) if length_normalised else 1
            assert h.score == pytest.approx(h.log_prob / length)
        shorter = search(
            model, frames, beam_width=width, n_best=1, backend=backend,
            length_normalised=length_normalised,
        )  # fmt: skip
        assert shorter == found[:1]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_bound_that_is_met_is_said_and_held(backend):
    model = transducer(2, null=-40.0)  # null hardly ever: labels without end
    with pytest.warns(UserWarning, match="= 5 was met in 1 of the 1 frames of item 0;"):
        found = search(
            model, frames_of(1), beam_width=99, n_best=99, max_labels_per_frame=5, backend=backend
        )
    assert len(found) == sum(2**n for n in range(6))
    assert max(len(h.labels) for h in found) == 5


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_bound_that_is_not_met_is_not_mentioned(backend):
    model = transducer(3, null=6.0, sharpness=3.0)
    assert search(model, frames_of(5), beam_width=3, backend=backend)  # warnings are errors


def test_dropout_sleeps_while_decoding_and_wakes_after():
    model, fusion = transducer(num_layers=2), PredictionNetwork(3, 7, 2, with_null=False).double()
    networks = (model.transcription_network, model.prediction_network, fusion)
    options = dict(beam_width=3, n_best=3, fusion_weight=1.0, fusion=fusion)
    expected = search(model, frames_of(5), **options)
    for network in networks:
        network.lstm.dropout = 0.9
        network.train()
        for backend in ALL_BACKENDS:
            found = search(model, frames_of(5), backend=backend, **options)
            assert_same(found, expected, 1e-9)
        assert all(module.training for module in network.modules())
        network.eval()


# --- Frame by frame -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 4, 30])
def test_the_last_step_of_a_search_is_its_result(width, seed):
    model, frames = transducer(4, seed), frames_of(9, seed)
    options = dict(beam_width=width, n_best=width, length_normalised=False, with_timings=False)
    found = search(model, frames, **options)
    steps = list(beam_search_steps(model, frames[0], width))
    assert len(steps) == 10 and [y.labels for y in steps[0]] == [()]
    assert [y.labels for y in steps[-1]] == [h.labels for h in found]
    for y, h in zip(steps[-1], found, strict=True):
        assert y.log_prob == pytest.approx(h.log_prob, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 4, 30])
def test_all_the_probability_in_a_step_has_flowed_from_prefixes(width, seed):
    steps = beam_search_steps(transducer(4, seed, null=-1.0), frames_of(9, seed)[0], width)
    num_ways = set()
    for before, after in pairwise(steps):
        for y in after:
            for flow in y.flows:
                assert before[flow.source].labels + flow.emitted == y.labels
            flows = torch.tensor([flow.log_prob for flow in y.flows], dtype=torch.float64)
            assert y.log_prob == pytest.approx(float(flows.logsumexp(0)), abs=1e-9)
            num_ways.add(len(y.flows))
    assert width == 1 or max(num_ways) > 1


# --- Greedily -----------------------------------------------------------------------------------


def test_the_greedy_search_takes_the_most_probable_output_at_every_node():
    model = transducer(4, null=2.0)
    frames = torch.randn(3, 9, 4).double()
    num_frames = torch.tensor([9, 4, 0])
    for b, h in enumerate(greedy_search(model, frames, num_frames)):
        g, state = model.prediction_network.step(
            torch.tensor([NULL]), model.prediction_network.start(1)
        )
        labels, times, log_prob = [], [], 0.0
        n = int(num_frames[b])
        f = model.transcription_network(frames[b : b + 1, :n])[0][0] if n else []
        for t in range(n):
            while True:
                best, k = (f[t] + g[0]).log_softmax(0).max(0)
                log_prob += float(best)
                if k == NULL:
                    break
                labels.append(int(k))
                times.append(t)
                g, state = model.prediction_network.step(k[None], state)
        assert (h.labels, h.frames) == (tuple(labels), tuple(times))
        assert h.log_prob == pytest.approx(log_prob)
        assert h.score == pytest.approx(log_prob / max(1, len(labels)))


def test_the_greedy_search_decodes_an_utterance_as_it_does_alone():
    model = transducer(4, null=2.0)
    frames, num_frames = torch.randn(4, 9, 4).double(), torch.tensor([9, 4, 0, 1])
    for b, h in enumerate(greedy_search(model, frames, num_frames)):
        (alone,) = greedy_search(model, frames[b : b + 1], num_frames[b : b + 1])
        assert (h.labels, h.frames) == (alone.labels, alone.frames)
        assert h.log_prob == pytest.approx(alone.log_prob)
    assert greedy_search(model, torch.empty(0, 3, 4), torch.empty(0).long()) == []


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "layers, null", slow_except({0, 3}, [(1, 2.0), (2, 2.0), (3, 2.0), (2, -2.0)])
)
def test_the_compiled_greedy_search_finds_what_tensor_operations_do(double, layers, null):
    """More utterances than are searched in step, with more labels than states are kept for."""
    torch.manual_seed(0)
    kind = torch.float64 if double else torch.float32
    network = PredictionNetwork(5, 9, layers).to(kind)
    for weights in network.parameters():
        weights.mul_(8)
    transcriptions = [6 * torch.randn(T, 6).to(kind) for T in torch.randint(0, 7, (130,)).tolist()]
    for f in transcriptions:
        f[:, NULL] += null
    problem = Problem(transcriptions, network, None, 6, SearchOptions(max_labels_per_frame=6))
    found = greedy.greedy_searches(problem)
    assert sum(one.num_bounded for one in found) > 200
    assert max(len(one.labels) for one in found) > 2 * layers
    assert layers == 1 or any(one.frames.count(0) > 4 for one in found)
    for module in (eager, reference):
        for ours, one in zip(found, module.greedy_searches(problem), strict=True):
            assert (ours.labels, ours.frames) == (one.labels, one.frames)
            assert ours.log_prob == pytest.approx(one.log_prob, rel=1e-9 if double else 1e-4)
            assert ours.num_bounded == one.num_bounded


def test_the_greedy_search_goes_on_when_its_states_are_full(monkeypatch):
    """Run by Python, where a place outside of a table is an error."""
    for name in ("_search_block", "_search_share"):
        monkeypatch.setattr(greedy, name, getattr(greedy, name).py_func)

    def search_shares(_, arguments):
        for share in range(len(arguments[1]) - 1):
            greedy._search_share(share, *arguments)

    monkeypatch.setattr(greedy, "_search_shares", search_shares)
    network = PredictionNetwork(5, 5)  # after a label it expects the next, and null after some
    for weights in network.parameters():
        weights.zero_()
    layer = network.lstm.layers[0]
    gates = layer.biases.view(4, 5)  # input, forget, state, output
    gates[0], gates[1], gates[3] = 10.0, -10.0, 10.0
    layer.input_weights.view(4, 5, 5)[2] = 10 * torch.eye(5)
    network.output.weight[1:] = 40 * torch.eye(5).roll(1, 0)
    network.output.weight[NULL] = torch.tensor([0.0, 10.0, 35.0, 20.0, 30.0])
    torch.manual_seed(0)
    num_kept = 0
    for bound in (4, 6):
        transcriptions = [4 * torch.randn(T, 6) for T in (4, 3, 4)]
        for some in (transcriptions, transcriptions[:1]):
            problem = Problem(some, network, None, 6, SearchOptions(max_labels_per_frame=bound))
            found = greedy.greedy_searches(problem)
            for ours, one in zip(found, reference.greedy_searches(problem), strict=True):
                assert (ours.labels, ours.frames) == (one.labels, one.frames)
                assert ours.log_prob == pytest.approx(one.log_prob, rel=1e-4)
                num_kept += len(ours.labels) if ours.num_bounded else 0
    assert num_kept > 20


def test_the_greedy_search_stops_at_its_bound():
    model = transducer(2, null=-40.0)
    with pytest.warns(UserWarning, match="= 4 was met in 3 of the 3 frames of item 0; hyp") as said:
        (h,) = greedy_search(model, frames_of(3), torch.tensor([3]), max_labels_per_frame=4)
    assert all(h.frames.count(t) <= 4 for t in range(3))
    assert said[0].filename == __file__


def ways_to_leave(model, frames, most):
    """Yield ln Pr and the labels of each way to leave one frame on the greedy path."""
    [[f]] = model.transcription_network(frames)[0]
    log_prob, labels = 0.0, ()
    for _ in range(most + 1):
        y = torch.tensor([labels], dtype=torch.int64)
        scores = torch.log_softmax(f + model.prediction_network(y)[0, -1], 0)
        yield log_prob + float(scores[NULL]), labels
        k = int(scores.argmax())
        if k == NULL:
            return
        log_prob, labels = log_prob + float(scores[k]), (*labels, k)


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_where_its_bound_is_met_the_greedy_search_leaves_in_the_most_probable_way(backend):
    numbers = set()
    for seed in range(20):
        model, frames = transducer(3, seed, sharpness=60.0, null=-4.0, num_layers=2), frames_of(1)
        ways = list(ways_to_leave(model, frames, 4))
        if len(ways) == 5:  # otherwise the path ends by itself
            log_prob, labels = max(ways, key=lambda way: way[0])
            (h,) = greedy_search(model, frames, torch.tensor([1]), 4, backend=backend)
            assert h.labels == labels and h.frames == (0,) * len(labels)
            assert h.log_prob == pytest.approx(log_prob)
            numbers.add(len(labels))
    assert 0 in numbers and len(numbers) > 1


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_label_a_little_more_probable_than_null_is_not_repeated_to_the_bound(backend):
    network = PredictionNetwork(1, 3)
    for weights in network.parameters():
        weights.zero_()
    f = torch.tensor([[2.0, 0.0], [0.0, 0.5], [2.0, 0.0]])  # of null and the label
    searches = {"cpu": greedy, "eager": eager, "reference": reference}
    [found] = searches[backend].greedy_searches(Problem([f], network, None, 2, SearchOptions()))
    assert found.labels == () and found.num_bounded == 1
    log_null = torch.log_softmax(f.double(), 1)[:, NULL].sum()
    assert found.log_prob == pytest.approx(float(log_null), abs=1e-6)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_where_one_path_is_certain_all_searches_agree(backend):
    model = transducer(4, 6, sharpness=400.0, null=60.0)
    frames = frames_of(6)
    (greedy,) = greedy_search(model, frames, torch.tensor([6]))
    for width in (1, 8):
        best = search(model, frames, beam_width=width, length_normalised=False, backend=backend)[0]
        assert best.labels == greedy.labels
        assert best.log_prob >= greedy.log_prob - 1e-9


# --- When ---------------------------------------------------------------------------------------


def lattice(model, frames, labels):
    f = model.transcription_network(frames)[0][0].detach()
    y = torch.tensor(labels, dtype=torch.int64)
    g = model.prediction_network(y[None])[0].detach()
    return lattice_transitions(f, g, y)


def test_timings_are_those_of_every_alignment_one_by_one():
    model, frames, labels = transducer(3, 2), frames_of(5), (2, 1, 3)
    log_null, log_label = lattice(model, frames, labels)
    T, U = log_label.shape
    emitted, total = torch.zeros(T, U).double(), 0.0
    for times in product(range(T), repeat=U):
        if list(times) != sorted(times):
            continue
        log_prob = sum(log_label[t, u] for u, t in enumerate(times))
        for t in range(T):
            log_prob = log_prob + log_null[t, sum(when <= t for when in times)]
        total += float(log_prob.exp())
        for u, t in enumerate(times):
            emitted[t, u] += log_prob.exp()
    emitted /= total
    timings = label_timings(log_null, log_label)
    assert [x.frame for x in timings] == best_alignment(log_null, log_label)[0]
    for u, timing in enumerate(timings):
        by = emitted[:, u].cumsum(0).tolist()
        assert timing.start == next(t for t in range(T) if by[t] >= 0.05)
        assert timing.end == next(t for t in range(T) if by[t] >= 0.95)
        if_any = log_label[:, u].exp() / (1 - log_null[:, u].exp())
        assert timing.confidence == pytest.approx(float((emitted[:, u] * if_any).sum()))


def test_hypotheses_carry_the_timings_of_their_labels():
    model, frames = transducer(3, 2), frames_of(6)
    for h in search(model, frames, beam_width=8, n_best=8):
        for found, expected in zip(
            h.timings, label_timings(*lattice(model, frames, h.labels)), strict=True
        ):
            assert found[:3] == expected[:3]
            assert found.confidence == pytest.approx(expected.confidence, rel=1e-12)
        assert h.frames == tuple(timing.frame for timing in h.timings)
        assert all(0 <= x.start <= x.end < 6 and 0 <= x.confidence <= 1 for x in h.timings)
    bare = search(model, frames, beam_width=8, n_best=8, with_timings=False)
    assert all(h.frames == h.timings == () for h in bare)


def test_a_certain_emission_has_one_frame_and_full_confidence():
    log_null = torch.tensor([[0.0, -50.0], [-50.0, 0.0], [0.0, 0.0]])
    log_label = torch.tensor([[-50.0], [0.0], [-50.0]])
    (timing,) = label_timings(log_null, log_label)
    assert timing[:3] == (1, 1, 1)
    assert timing.confidence == pytest.approx(1.0)


def test_labels_that_cannot_be_emitted_have_no_timings():
    with pytest.raises(ValueError, match="cannot be emitted"):
        label_timings(torch.zeros(2, 2), torch.full((2, 1), -torch.inf))


# --- Fusion -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(MET)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_fusion_adds_the_weighted_log_probability_of_the_labels(backend):
    model, frames = transducer(2), frames_of(3)
    other = PredictionNetwork(2, 5, with_null=False).double()
    options = dict(
        beam_width=10**5, n_best=10**5, max_labels_per_frame=3, with_timings=False, backend=backend
    )
    plain = {h.labels: h.log_prob for h in search(model, frames, **options)}
    fused = search(model, frames, fusion=other, fusion_weight=0.7, **options)
    assert len(fused) == len(plain)
    for h in fused:
        labels = torch.tensor([h.labels], dtype=torch.int64)
        log_pr = other(labels)[0, :-1].log_softmax(-1)
        added = log_pr.gather(1, labels[0, :, None] - 1).sum()
        assert h.log_prob == pytest.approx(plain[h.labels] + 0.7 * float(added), abs=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["network", "n-gram"])
def test_fused_batches_find_what_the_sequential_loop_finds(kind, backend):
    model = transducer(4, null=2.0)
    other = PredictionNetwork(4, 6, with_null=False).double()
    if kind == "n-gram":
        other = NGram(3, 4, [[1, 2, 3, 1, 2, 4], [2, 2], [3, 1, 2]])
    options = dict(beam_width=20, n_best=20, fusion=other, fusion_weight=1.5)
    expected = search(model, frames_of(8), backend="reference", **options)
    assert_same(search(model, frames_of(8), backend=backend, **options), expected, 1e-9)
    assert expected != search(model, frames_of(8), beam_width=20, n_best=20, backend="reference")


def test_a_weight_of_nothing_is_no_fusion():
    model, options = transducer(), dict(beam_width=5, n_best=5)
    fused = search(model, frames_of(6), fusion=NGram(2, 3, [[1]]), fusion_weight=0.0, **options)
    assert fused == search(model, frames_of(6), **options)


def test_an_n_gram_is_a_distribution_that_prefers_what_it_saw():
    model = NGram(3, 5, [[1, 2, 3], [1, 2, 3, 4], [2, 3]])
    state = model.start()
    for label in (1, 2, 5, 1, 2):
        log_probs = torch.tensor(model.log_probs(state))
        assert_close(log_probs.logsumexp(0), torch.tensor(0.0), atol=1e-6, rtol=0)
        state = model.advance(state, label)
    assert state == (1, 2)
    # Witten and Bell by hand: 2 of 3 for the trigram, 3 of 4 for the bigram, and so on.
    one = (3 + 4 * 1 / 5) / (9 + 4)
    two = (3 + 1 * one) / (3 + 1)
    assert math.exp(model.log_probs(state)[2]) == pytest.approx((2 + 1 * two) / (2 + 1))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_language_model_is_given_plain_integers(backend):
    class Strict(NGram):
        def advance(self, state, label):
            assert type(label) is int
            return super().advance(state, label)

    options = dict(fusion=Strict(2, 3, [[1, 2]]), fusion_weight=0.5, backend=backend)
    assert search(transducer(), frames_of(4), beam_width=5, **options)


class _Improbable:
    def __init__(self, log_probs):
        self.rows = log_probs

    def start(self):
        return None

    def advance(self, state, label):
        return None

    def log_probs(self, state):
        return self.rows


# --- What is wrong is said ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(beam_width=10.0), "beam_width must be a whole number, not 10.0"),
        (dict(beam_width=2, max_labels_per_frame=2.5), "max_labels_per_frame must be a whole"),
        (dict(beam_width=0), "beam_width must be at least 1, not 0"),
        (
            dict(beam_width=10**9),
            "beam_width must be at most 100000, not 1000000000; give a narrower",
        ),
        (dict(beam_width=2, n_best=3), "n_best must be between 1 and the beam_width, 2, not 3"),
        (dict(beam_width=2, n_best=0), "n_best"),
        (dict(beam_width=2, max_labels_per_frame=0), "max_labels_per_frame"),
        (dict(beam_width=2, fusion_weight=0.5), "there is no fusion"),
        (dict(beam_width=2, fusion=NGram(1, 3, [])), "a fusion but no fusion_weight; give it"),
        (dict(beam_width=2, fusion_weight=-1.0, fusion=NGram(1, 3, [])), "negative"),
        (dict(beam_width=2, fusion_weight=math.nan, fusion=NGram(1, 3, [])), "not nan"),
        (dict(beam_width=2, fusion_weight=1, fusion=PredictionNetwork(3)), "with_null=False"),
        (dict(beam_width=2, fusion_weight=1, fusion=NGram(1, 4, [[4]])), "the 3 labels"),
        (dict(beam_width=2, fusion_weight=1, fusion=_Improbable([0.0, 0.1, 0.0])), "more than 0"),
        (dict(beam_width=2, backend="gpu"), "backend must be auto, reference, eager, cpu or cuda"),
        (dict(beam_width=2, num_frames=torch.tensor([9])), r"num_frames\[0\] must be between 0"),
        (dict(beam_width=2, num_frames=torch.tensor([2, 2])), r"num_frames must be integers \[B\]"),
        (dict(beam_width=2, num_frames=torch.tensor([2.0])), "num_frames must be integers"),
        (dict(beam_width=2, frames=torch.zeros(3)), "frames must be"),
        (dict(beam_width=2, frames=torch.full((1, 3, 4), torch.nan).double()), "item 0 at 0"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(options, words):
    arguments = {"frames": frames_of(3), "num_frames": torch.tensor([3])} | options
    with pytest.raises(ValueError, match=words):
        beam_search(transducer(), **arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("backend", [*ALL_BACKENDS, "greedy"])
def test_a_prediction_network_that_gives_no_number_is_named(backend, bad):
    model = transducer()
    model.prediction_network.output.bias[2] = bad
    with pytest.raises(ValueError, match=r"the prediction network gave NaN or \+inf; check"):
        if backend == "greedy":
            greedy_search(model, frames_of(3), torch.tensor([3]))
        else:
            search(model, frames_of(3), beam_width=4, backend=backend)


@pytest.mark.parametrize(
    "order, num_labels, sequences, words",
    [
        (0, 3, [], "order must be at least 1, not 0"),
        (1, 0, [], "num_labels must be at least 1, not 0"),
        (1, 3, [[1], [4]], "sequence 1 has 4, which is no id from 1 to 3; encode"),
        (1, 3, [[NULL]], "sequence 0 has 0, which"),
        (1, 3, ["ab"], "sequence 0 has 'a', which"),
    ],
)
def test_an_n_gram_of_what_are_no_labels_is_refused(order, num_labels, sequences, words):
    with pytest.raises(ValueError, match=words):
        NGram(order, num_labels, sequences)


def test_an_n_gram_counts_the_labels_of_tensors():
    sequences = [[1, 2, 3], [1, 2]]
    plain, tensors = NGram(2, 3, sequences), NGram(2, 3, map(torch.tensor, sequences))
    assert tensors.log_probs((1,)) == plain.log_probs((1,))


def test_scores_of_the_empty_sequence_have_a_place_for_null():
    assert FusedScores(NGram(1, 3, [[1]]), 2.0, 3).extend([-1], [NULL]).shape == (1, 4)


def test_no_probability_flows_by_an_impossible_label():
    log_prob = np.array([-0.5, -np.inf])
    flows = _flows((1,), {(): 0.0, (1,): -1.0}, lambda labels, t: log_prob, 0)
    assert flows == (Flow(1, (), -1.5),)
