"""The output lattice: its parts, the additive loss, and every backend against the reference."""

from itertools import pairwise
from math import comb, inf, nan

import pytest
import torch
from hypothesis import given, settings
from lattices import (
    ALL_BACKENDS,
    ANY_SHAPE,
    BACKENDS,
    RAGGED,
    SHAPES,
    Batch,
    alignments,
    assert_as_exact_as_the_reference,
    assert_exact_enough,
    assert_same_bits,
    cast,
    changed,
    diagonals,
    loss_and_gradients,
    path_score,
    random_batch,
    random_lattice,
)
from memory import extra_megabytes, needs_proc
from torch.testing import assert_close

from transduce import (
    NULL,
    backward_variables,
    best_alignment,
    forward_variables,
    lattice_transitions,
    log_likelihood,
    log_occupancy,
    remove_nulls,
    transducer_loss,
)
from transduce.kernels.backends import resolve
from transduce.lattice import reference
from transduce.lattice.cpu import emissions
from transduce.lattice.loss import TransducerLoss, label_emissions

pytestmark = pytest.mark.usefixtures("empty_is_nan")

SIZES = [(1, 0), (1, 3), (4, 1), (3, 3), (2, 5), (6, 0)]
PARTS = [forward_variables, backward_variables, log_occupancy, log_likelihood]


# --- The parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", SIZES)
def test_likelihood_sums_over_every_alignment(T, U, backend):
    lattice = random_lattice(T, U)
    paths = [path_score(times, *lattice) for times in alignments(T, U)]
    assert len(paths) == comb(T + U - 1, U)
    assert_close(log_likelihood(*lattice, backend=backend), torch.stack(paths).logsumexp(0))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", SIZES)
def test_likelihood_is_on_every_diagonal(T, U, backend):
    lattice = random_lattice(T, U)
    log_alpha = forward_variables(*lattice, backend=backend)
    log_beta = backward_variables(*lattice, backend=backend)
    evidence = log_likelihood(*lattice, backend=backend)
    for nodes in diagonals(log_alpha + log_beta):
        assert_close(nodes.logsumexp(0), evidence)  # Eq. 19


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", [*SIZES, (30, 12)])
def test_occupancy_of_every_diagonal_is_one(T, U, backend):
    occupancy = log_occupancy(*random_lattice(T, U), backend=backend).exp()
    for nodes in diagonals(occupancy):
        assert_close(nodes.sum().item(), 1.0)


def test_output_distribution_sums_to_one():
    f, g, *_ = random_batch([7], [4], 9, dtype=torch.float64, scale=5)
    log_prob = reference.output_distribution(f[0], g[0])
    assert_close(log_prob.exp().sum(-1), torch.ones(7, 5, dtype=torch.float64))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_arrows_are_the_probabilities_of_null_and_of_the_next_label(backend):
    f, g, labels, *_ = random_batch([4], [3], 5, dtype=torch.float64)
    log_null, log_label = lattice_transitions(f[0], g[0], labels[0], backend=backend)
    for t in range(4):
        for u in range(4):
            log_prob = (f[0, t] + g[0, u]).log_softmax(0)
            assert_close(log_null[t, u], log_prob[NULL])  # Eq. 15
            if u < 3:
                assert_close(log_label[t, u], log_prob[labels[0, u]])  # Eq. 14


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impossible", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("T, U", [*SIZES, (9, 20)])
def test_parts_agree_with_the_reference(T, U, impossible, backend):
    lattice = random_lattice(T, U, impossible=impossible)
    narrow = [x.float() for x in lattice]
    for part in PARTS:
        exact = part(*lattice, backend="reference")
        assert_close(part(*lattice, backend=backend), exact, rtol=1e-12, atol=1e-12)
        narrow_results = [part(*narrow, backend=x) for x in (backend, "reference")]
        exact = part(*(x.double() for x in narrow), backend="reference")
        assert_exact_enough(narrow_results[:1], narrow_results[1:], [exact])


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrows_agree_with_the_reference(backend):
    f, g, labels, *_ = random_batch([9], [20], 30, scale=20)
    f[0, 3, labels[0, 2]] = g[0, 4, NULL] = f[0, 8] = -inf
    wide = f[0].double(), g[0].double(), labels[0]
    exact = lattice_transitions(*wide, backend="reference")
    assert_close(lattice_transitions(*wide, backend=backend), exact, rtol=1e-12, atol=1e-12)
    narrow = [lattice_transitions(f[0], g[0], labels[0], backend=x) for x in (backend, "reference")]
    assert_exact_enough(*narrow, exact)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_parts_give_the_loss(backend):
    batch = random_batch(*RAGGED, dtype=torch.float64)
    for loss, f, g, labels, T, U in zip(transducer_loss(*batch), *batch, strict=True):
        arrows = lattice_transitions(f[:T], g[: U + 1], labels[:U], backend=backend)
        assert_close(-log_likelihood(*arrows, backend=backend), loss)


# --- Alignments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("impossible", [0.0, 0.2])
@pytest.mark.parametrize("T, U", [*SIZES, (5, 4)])
def test_best_alignment_is_the_best_of_all(T, U, impossible, backend):
    lattice = random_lattice(T, U, impossible=impossible, seed=1)
    scores = {times: path_score(times, *lattice).item() for times in alignments(T, U)}
    times, score = best_alignment(*lattice, backend=backend)
    assert_close(score, max(scores.values()))
    assert_close(scores[tuple(times)], score)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_best_alignment_of_many_emits_latest(backend):
    log_null, log_label = torch.full((4, 4), -1.0), torch.full((4, 3), -1.0)
    assert best_alignment(log_null, log_label, backend=backend) == ([3, 3, 3], -7.0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("times", [[0, 0, 3], [2, 2, 2], [1, 3, 5], [5, 5, 5]])
def test_planted_alignment_is_recovered(times, backend):
    T, U, labels = 6, 3, torch.tensor([1, 2, 3])
    f, g = torch.zeros(T, 4), torch.zeros(U + 1, 4)
    f[:, NULL] = 25
    f[times, labels] = 20  # a label needs its frame and its turn to beat null
    g[range(U), labels] = 10
    arrows = lattice_transitions(f, g, labels, backend=backend)
    assert best_alignment(*arrows, backend=backend)[0] == times
    assert log_likelihood(*arrows, backend=backend) > -0.1
    alignment = [k for t in range(T) for k in (1, 2, 3, NULL) if k == NULL or times[k - 1] == t]
    assert remove_nulls(alignment) == labels.tolist()


@pytest.mark.parametrize(
    "alignment, labels",
    [([], []), ([0, 0], []), ([3, 0, 3, 3, 0], [3, 3, 3]), ([0, 1, 2], [1, 2])],
)
def test_removing_nulls_leaves_the_labels(alignment, labels):
    assert remove_nulls(alignment) == labels


# --- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", SIZES)
def test_gradients_are_those_of_the_sum_over_alignments(T, U, backend):
    batch = random_batch([T], [U], 4, dtype=torch.float64)
    _, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    f, g = (x[0].requires_grad_() for x in batch[:2])
    lattice = reference.lattice_transitions(f, g, batch.labels[0])
    evidence = torch.stack([path_score(a, *lattice) for a in alignments(T, U)]).logsumexp(0)
    expected = torch.autograd.grad(-evidence, (f, g))
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours[0], theirs)  # Eqs. 20-22


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_pass_gradcheck(backend):
    f, g, *rest = random_batch([3, 2, 1], [2, 3, 0], 3, dtype=torch.float64)
    numbers = f.requires_grad_(), g.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: transducer_loss(*x, *rest, backend=backend), numbers)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_are_scaled_by_what_is_upstream(backend):
    batch = random_batch([4, 3, 5], [2, 3, 1], 4)
    upstream = torch.tensor([-2.0, 0.0, 0.5])
    _, *plain = loss_and_gradients(transducer_loss, batch, backend)
    _, *scaled = loss_and_gradients(transducer_loss, batch, backend, upstream=upstream)
    assert_same_bits(scaled, [x * upstream[:, None, None] for x in plain])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_are_the_same_the_second_time(backend):
    f, g, *rest = random_batch(*RAGGED)
    numbers = f.requires_grad_(), g.requires_grad_()
    loss = transducer_loss(*numbers, *rest, backend=backend).sum()
    first = torch.autograd.grad(loss, numbers, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, numbers), first)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_with_respect_to_one_network_alone_is_the_same(which, backend):
    batch = random_batch(*RAGGED)
    expected = loss_and_gradients(transducer_loss, batch, backend)[1 + which]
    batch[which].requires_grad_()
    transducer_loss(*batch, backend=backend).sum().backward()
    assert torch.equal(batch[which].grad, expected)
    assert batch[1 - which].grad is None


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_loss_is_the_same_without_gradients(backend):
    batch = random_batch(*RAGGED)
    expected, *_ = loss_and_gradients(transducer_loss, batch, backend)
    loss = transducer_loss(*batch, backend=backend)
    assert torch.equal(loss, expected) and not loss.requires_grad


# --- Parity of the backends ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients_are_as_exact_as_the_reference(shape, scale, backend):
    batch = random_batch(*shape, scale=scale)
    assert_as_exact_as_the_reference(transducer_loss, batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(shape=ANY_SHAPE)
def test_any_batch_is_as_exact_as_the_reference(backend, shape):
    assert_as_exact_as_the_reference(transducer_loss, random_batch(**shape), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1, 40, 400])
def test_double_precision_is_kept(scale, backend):
    batch = random_batch(*RAGGED, dtype=torch.float64, scale=scale)
    exact = loss_and_gradients(transducer_loss, batch)
    actual = loss_and_gradients(transducer_loss, batch, backend)
    assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_lose_nothing_but_the_rounding_of_the_gradients(dtype, backend):
    batch = random_batch(*RAGGED, dtype=dtype, scale=3)
    loss, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    wide_loss, *wide = loss_and_gradients(transducer_loss, cast(batch, torch.float32), backend)
    assert torch.equal(loss, wide_loss)
    assert_same_bits(gradients, [x.to(dtype) for x in wide])
    assert [x.dtype for x in (loss, *gradients)] == [torch.float32, dtype, dtype]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_in_the_padding_changes_nothing(dtype, backend):
    clean = random_batch(*RAGGED, dtype=dtype, padding=1)
    poisoned = Batch(*(x.clone() for x in clean))
    for b, (T, U) in enumerate(zip(clean.num_frames, clean.num_labels, strict=True)):
        poisoned.transcription[b, T:] = nan
        poisoned.prediction[b, U + 1 :] = nan
        poisoned.labels[b, U:] = [-7, 10**6, 0][b % 3]
    expected = loss_and_gradients(transducer_loss, clean, backend)
    actual = loss_and_gradients(transducer_loss, poisoned, backend)
    assert_same_bits(actual, expected)
    for b, (T, U) in enumerate(zip(clean.num_frames, clean.num_labels, strict=True)):
        assert not actual[1][b, T:].any() and not actual[2][b, U + 1 :].any()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("of_labels", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("of_lengths", [torch.int64, torch.int32])
def test_labels_and_lengths_may_be_any_integers(of_labels, of_lengths, backend):
    batch = random_batch(*RAGGED)
    cast_batch = batch._replace(
        labels=batch.labels.to(of_labels),
        num_frames=batch.num_frames.to(of_lengths),
        num_labels=batch.num_labels.to(of_lengths),
    )
    actual = loss_and_gradients(transducer_loss, cast_batch, backend)
    assert_same_bits(actual, loss_and_gradients(transducer_loss, batch, backend))


@needs_proc
@pytest.mark.parametrize("T, U", [(5, 6000), (6000, 5)])
def test_memory_grows_with_the_area_of_a_narrow_lattice(T, U):
    batch = random_batch([T], [U], 10)
    loss_and_gradients(transducer_loss, batch, "cpu")
    whole = 8e-6 * 6000 * 6000  # megabytes of one array of the quadratic kind
    used = extra_megabytes(lambda: loss_and_gradients(transducer_loss, batch, "cpu"))
    assert used < whole / 10


@pytest.mark.parametrize("T, U", [(1, 1), (1, 3), (7, 1), (9, 4), (3, 8), (30, 12)])
@pytest.mark.parametrize("impossible", [0.0, 0.2])
@pytest.mark.parametrize("nodes", [1, 20, 1 << 18])
def test_emissions_in_strips_are_those_of_the_whole_lattice(nodes, impossible, T, U, monkeypatch):
    monkeypatch.setattr(emissions, "STRIP", nodes)
    f, g, labels, *_ = random_batch([T], [U], 4, dtype=torch.float64, scale=2.0, seed=T + U)
    log_null, log_label = lattice_transitions(f[0], g[0], labels[0])
    log_label[torch.rand(T, U, generator=torch.Generator().manual_seed(T)) < impossible] = -inf
    rows = []

    def arrows(first, last):
        rows.append(last - first)
        return log_null[first:last], log_label[first:last]

    found = label_emissions(arrows, T, U, 0.05)
    assert max(rows) <= max(nodes // (U + 1), T**0.5) and sum(rows) <= 2 * T
    expected = label_emissions(arrows, T, U, 0.05, backend="reference")
    if expected is None:
        assert found is None
        return
    assert found[:3] == expected[:3]
    assert found.confidence == pytest.approx(expected.confidence, rel=1e-12)


@needs_proc
def test_memory_of_emissions_does_not_grow_with_the_area_of_the_lattice():
    T, U = 6000, 1500  # three minutes of sound
    log_null, log_label = torch.full((1, U + 1), -0.2).double(), torch.full((1, U), -1.8).double()

    def arrows(first, last):
        return log_null.expand(last - first, U + 1), log_label.expand(last - first, U)

    label_emissions(arrows, 60, U, 0.05)
    whole = 8e-6 * T * U  # megabytes of one array
    assert extra_megabytes(lambda: label_emissions(arrows, T, U, 0.05)) < whole / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_change_nothing(backend):
    batch = random_batch(*RAGGED)
    every_other = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in batch]
    transposed = [x.mT.contiguous().mT for x in batch[:3]] + every_other[3:]
    expected = loss_and_gradients(transducer_loss, batch, backend)
    for strided in (every_other, transposed):
        assert not strided[0].is_contiguous() and not strided[2].is_contiguous()
        assert_same_bits(loss_and_gradients(transducer_loss, Batch(*strided), backend), expected)


def test_the_cpu_is_chosen_for_tensors_on_the_cpu():
    assert resolve("auto", torch.device("cpu")) == "cpu"


# --- Determinism --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_is_the_same_bits_from_run_to_run_and_with_any_threads(backend, set_num_threads):
    batch = random_batch([50, 31, 8, 40, 17], [20, 3, 12, 0, 25], 33)
    runs = []
    for num_threads in (1, 1, 2, 2, 5):
        set_num_threads(num_threads)
        runs.append(loss_and_gradients(transducer_loss, batch, backend))
    for first, second in pairwise(runs):
        assert_same_bits(second, first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_utterance_has_the_same_bits_alone_and_in_a_batch(backend):
    batch = random_batch([50, 31, 8, 40, 17], [20, 3, 12, 0, 25], 33)
    together = loss_and_gradients(transducer_loss, batch, backend)
    for b, (T, U) in enumerate(zip(batch.num_frames, batch.num_labels, strict=True)):
        f, g, labels, *lengths = (x[b : b + 1] for x in batch)
        alone = loss_and_gradients(
            transducer_loss, Batch(f[:, :T], g[:, : U + 1], labels[:, :U], *lengths), backend
        )
        within = [x[b : b + 1] for x in together]
        assert_same_bits(alone, [within[0], within[1][:, :T], within[2][:, : U + 1]])


# --- Numbers that underflow, and -inf -----------------------------------------------------------


def disagreeing(nats, frames=slice(None)):
    """Draw a batch whose f favours output 1 at those frames while g favours output 2."""
    batch = random_batch([20, 9], [8, 12], 30)
    batch.transcription[:, frames, 1] += nats
    batch.prediction[:, :, 2] += nats
    return batch


HARD = {
    "normal, 40": random_batch([20, 9], [8, 12], 30, scale=40),
    "normal, 400": random_batch([20, 9], [8, 12], 30, scale=400),
    "90 nats": disagreeing(90),
    "120 nats": disagreeing(120),
    "1000 nats": disagreeing(1000),
    "90 nats, at times": disagreeing(90, slice(0, None, 2)),
    "120 nats, at times": disagreeing(120, slice(0, None, 3)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", HARD.values(), ids=HARD)
def test_nothing_is_lost_to_underflow(batch, backend):
    loss, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    exact = loss_and_gradients(transducer_loss, cast(batch, torch.float64))
    assert_close(loss.double(), exact[0], rtol=1e-5, atol=0)
    for ours, theirs in zip(gradients, exact[1:], strict=True):
        assert_close(ours.double(), theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", ["transcription", "prediction"])
def test_an_impossible_label_might_as_well_not_be_there(network, dtype, backend):
    batch = random_batch([4, 6], [3, 2], 5, dtype=dtype)
    without = batch._replace(
        transcription=batch.transcription[..., :-1], prediction=batch.prediction[..., :-1]
    )
    batch.labels.clamp_(max=4)  # in `without` too
    getattr(batch, network)[..., 5] = -inf
    loss, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    expected = loss_and_gradients(transducer_loss, without, backend)
    assert_close([loss, *(x[..., :-1] for x in gradients)], expected)
    assert all(not x[..., -1].any() for x in gradients)


# What is impossible in a lattice of four frames and the labels 1, 2, 3, which can be emitted still.
IMPOSSIBLE = {
    "a label at one frame": {"f": [(1, 2)]},
    "a label at all frames but one": {"f": [(0, 2), (1, 2), (3, 2)]},
    "null before a label": {"g": [(1, 0)]},
    "nulls before all labels": {"g": [(0, 0), (1, 0), (2, 0)]},
    "the wrong labels": {"f": [(2, 4)], "g": [(0, 3), (3, 1)]},
    "all at one node": {"f": [(1, 1), (1, 2), (1, 3), (1, 4)], "g": [(1, 0)]},
}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_is_impossible_has_no_likelihood_and_no_gradient(where, dtype, backend):
    f, g, _, *lengths = random_batch([4], [3], 4, dtype=dtype)
    batch = Batch(f, g, torch.tensor([[1, 2, 3]]), *lengths)
    for numbers, places in zip((f, g), (where.get("f", []), where.get("g", [])), strict=True):
        for i, k in places:
            numbers[0, i, k] = -inf
    loss, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    exact = loss_and_gradients(transducer_loss, cast(batch, torch.float64))
    assert exact[0].isfinite().all()
    assert_close([loss, *gradients], [x.to(dtype) for x in exact], rtol=1e-6, atol=1e-6)
    for numbers, gradient in zip((f, g), gradients, strict=True):
        assert not gradient[numbers == -inf].any()


FORBIDDEN = {
    "a label, by f": ("transcription", (slice(None), 2)),
    "a label, by g": ("prediction", (1, 2)),
    "the last null": ("prediction", (3, NULL)),
    "a frame's null": ("transcription", (2, NULL)),
    "a whole frame": ("transcription", 1),
    "all that follows a label": ("prediction", 2),
    "everything": ("transcription", slice(None)),
}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network, where", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_target_that_cannot_be_emitted_has_infinite_loss_and_no_gradient(
    network, where, dtype, backend
):
    batch = random_batch([4, 4], [3, 3], 4, dtype=dtype)
    batch.labels[:] = torch.tensor([1, 2, 3])
    possible = loss_and_gradients(transducer_loss, batch, backend)
    getattr(batch, network)[1][where] = -inf
    loss, *gradients = loss_and_gradients(transducer_loss, batch, backend)
    assert loss[1] == inf
    assert all(torch.equal(x[1], torch.zeros_like(x[1])) for x in gradients)
    assert_same_bits([x[0] for x in (loss, *gradients)], [x[0] for x in possible])


# --- Errors -------------------------------------------------------------------------------------

GOOD = random_batch([4, 3], [2, 3], 5)
F, G, LABELS, NUM_FRAMES, NUM_LABELS = GOOD
WRONG = {
    "no frames": ({"num_frames": torch.tensor([4, 0])}, r"num_frames\[1\] .* 1 and 4, not 0"),
    "too many frames": ({"num_frames": torch.tensor([5, 4])}, r"num_frames\[0\] .* not 5"),
    "too many labels": ({"num_labels": torch.tensor([2, 4])}, r"num_labels\[1\] .* not 4"),
    "fewer than no labels": ({"num_labels": torch.tensor([-1, 3])}, r"num_labels\[0\] .* not -1"),
    "a label too large": ({"labels": changed(LABELS, 1, 2, 6)}, "labels of item 1 .* label 6"),
    "a huge label": ({"labels": changed(LABELS, 0, 1, 10**6)}, "labels of item 0 .* 1000000"),
    "a negative label": ({"labels": changed(LABELS, 1, 0, -3)}, "labels of item 1 .* label -3"),
    "null as a label": ({"labels": changed(LABELS, 1, 1, NULL)}, "labels of item 1 .* null"),
    "NaN in f": ({"transcription": changed(F, 1, 2, 3, nan)}, "transcription of item 1 has NaN"),
    "NaN in g": ({"prediction": changed(G, 0, 2, 3, nan)}, "prediction of item 0 has NaN"),
    "+inf in f": ({"transcription": changed(F, 0, 3, 0, inf)}, r"transcription .* 0 has \+inf"),
    "+inf in g": ({"prediction": changed(G, 1, 3, 5, inf)}, r"prediction of item 1 has \+inf"),
    "f without a batch": ({"transcription": F[0]}, "transcription must be"),
    "g without a batch": ({"prediction": G[0]}, "prediction must be"),
    "labels without a batch": ({"labels": LABELS[0]}, "labels must be"),
    "one length for all": ({"num_frames": torch.tensor(3)}, "num_frames must be"),
    "lengths of another batch": ({"num_labels": torch.tensor([2, 3, 1])}, "num_labels must be"),
    "g of another batch": ({"prediction": G[:1]}, "prediction must be"),
    "g of another alphabet": ({"prediction": G[..., :-1]}, "prediction must be"),
    "g of other labels": ({"prediction": G[:, :-1]}, "labels must be"),
    "no batch": (dict(zip(Batch._fields, (x[:0] for x in GOOD), strict=True)), "transcription"),
    "null alone": ({"transcription": F[..., :1], "prediction": G[..., :1]}, "transcription"),
    "f in double": ({"transcription": F.double()}, "must have one type"),
    "integers for f and g": ({"transcription": F.int(), "prediction": G.int()}, "floating-point"),
    "labels in float": ({"labels": LABELS.float()}, "labels must be integers"),
    "lengths in float": ({"num_frames": NUM_FRAMES.float()}, "num_frames must be integers"),
    "an unknown backend": ({"backend": "abacus"}, "backend must be .* not 'abacus'"),
}


@pytest.mark.parametrize("backend", ["auto", *ALL_BACKENDS])
@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(arguments, message, backend):
    with pytest.raises(ValueError, match=message):
        transducer_loss(**{**GOOD._asdict(), "backend": backend, **arguments})


def test_cuda_is_refused_for_tensors_on_the_cpu():
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        transducer_loss(*GOOD, backend="cuda")


NULLS, EMITTED = random_lattice(3, 2)
WRONG_LATTICES = {
    "log_null of one dimension": (NULLS[0], EMITTED, "log_null must be"),
    "no frames": (NULLS[:0], EMITTED[:0], "log_null must be"),
    "as many columns": (NULLS, NULLS, "log_label must be"),
    "other frames": (NULLS, EMITTED[1:], "log_label must be"),
    "NaN in log_null": (changed(NULLS, 1, 2, nan), EMITTED, "log_null has NaN"),
    "+inf in log_label": (NULLS, changed(EMITTED, 2, 1, inf), r"log_label has \+inf"),
}


@pytest.mark.parametrize("part", [*PARTS, best_alignment])
@pytest.mark.parametrize(
    "log_null, log_label, message", WRONG_LATTICES.values(), ids=WRONG_LATTICES
)
def test_wrong_lattices_are_named(part, log_null, log_label, message):
    with pytest.raises(ValueError, match=message):
        part(log_null, log_label)


@pytest.mark.parametrize(
    "f, g, labels, message",
    [
        (changed(F[0], 1, 2, nan), G[0], LABELS[0], "transcription has NaN"),
        (F[0], changed(G[0], 1, 2, inf), LABELS[0], r"prediction has \+inf"),
        (F[0], G[0], changed(LABELS[0], 2, 6), "labels has label 6 at position 2"),
        (F[0], G[0], changed(LABELS[0], 0, NULL), "labels has the null symbol"),
        (F[0], G[0], LABELS[0, 1:], "labels must be"),
    ],
)
def test_wrong_arguments_of_the_arrows_are_named(f, g, labels, message):
    with pytest.raises(ValueError, match=message):
        lattice_transitions(f, g, labels)


# --- Reductions and modules ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_losses_are_reduced_as_asked(backend):
    batch = random_batch(*RAGGED)
    losses = transducer_loss(*batch, backend=backend)
    assert losses.shape == (5,)
    assert_close(transducer_loss(*batch, reduction="sum", backend=backend), losses.sum())
    assert_close(transducer_loss(*batch, reduction="mean", backend=backend), losses.mean())
    _, *plain = loss_and_gradients(transducer_loss, batch, backend)
    _, *mean = loss_and_gradients(transducer_loss, batch, backend, reduction="mean")
    assert_close(mean, [x / 5 for x in plain])


def test_an_unknown_reduction_is_named():
    with pytest.raises(ValueError, match="reduction must be none, mean or sum, not 'median'"):
        transducer_loss(*GOOD, reduction="median")
    with pytest.raises(ValueError, match="reduction must be none, mean or sum, not 'median'"):
        TransducerLoss(reduction="median")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_module_is_the_function(reduction, backend):
    module = TransducerLoss(reduction=reduction, backend=backend)
    expected = transducer_loss(*GOOD, reduction=reduction, backend=backend)
    assert torch.equal(module(*GOOD), expected)
    assert TransducerLoss()(*GOOD).shape == (2,)
