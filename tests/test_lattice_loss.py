"""lattice_loss: the sum over alignments, its occupancies, and every backend alike."""

from itertools import pairwise
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import (
    ALL_BACKENDS,
    BACKENDS,
    RAGGED,
    SHAPES,
    Arrows,
    Joint,
    alignments,
    assert_as_exact_as_the_reference,
    assert_same_bits,
    cast,
    changed,
    loss_and_gradients,
    path_score,
    random_arrows,
)
from torch.testing import assert_close

from transduce.lattice.loss import lattice_loss, rnnt_loss

pytestmark = pytest.mark.usefixtures("empty_is_nan")

SIZES = [(1, 0), (1, 3), (4, 1), (3, 3), (2, 5), (6, 0)]


# --- What it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", SIZES)
def test_loss_and_gradients_are_those_of_the_sum_over_alignments(T, U, backend):
    arrows = random_arrows([T], [U], dtype=torch.float64)
    loss, *gradients = loss_and_gradients(lattice_loss, arrows, backend)
    leaves = [x[0].clone().requires_grad_() for x in arrows[:2]]
    evidence = torch.stack([path_score(a, *leaves) for a in alignments(T, U)]).logsumexp(0)
    assert_close(loss[0], -evidence.detach())
    expected = torch.autograd.grad(-evidence, leaves, allow_unused=True)
    assert_close(gradients[0][0], expected[0])
    assert_close(gradients[1][0], torch.zeros(T, 0).double() if U == 0 else expected[1])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_pass_gradcheck(backend):
    null, label, *lengths = random_arrows([3, 2, 1], [2, 3, 0], dtype=torch.float64)
    numbers = null.requires_grad_(), label.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: lattice_loss(*x, *lengths, backend=backend), numbers)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_occupancies_are_minus_the_gradients(backend):
    arrows = random_arrows(*RAGGED[:2], padding=2)
    loss, *gradients = loss_and_gradients(lattice_loss, arrows, backend)
    found, occupancies = lattice_loss(*arrows, with_occupancies=True, backend=backend)
    assert torch.equal(found, loss)
    assert_same_bits(occupancies, [-x for x in gradients])
    leaves = [x.requires_grad_() for x in arrows[:2]]
    _, occupancies = lattice_loss(*leaves, *arrows[2:], with_occupancies=True, backend=backend)
    assert not occupancies.null.requires_grad and not occupancies.label.requires_grad


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_an_alignment_takes_one_null_a_frame_and_each_label_once(backend):
    arrows = random_arrows(*RAGGED[:2], dtype=torch.float64)
    _, (null, label) = lattice_loss(*arrows, with_occupancies=True, backend=backend)
    for b, (T, U) in enumerate(zip(*arrows[2:], strict=True)):
        assert_close(null[b, :T].sum(1), torch.ones(T).double())
        assert_close(label[b, :, :U].sum(0), torch.ones(U).double())


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_it_is_rnnt_loss_of_two_log_probabilities(backend):
    arrows = random_arrows(*RAGGED[:2], dtype=torch.float64, padding=1)
    null, label, *lengths = arrows
    logits = torch.stack((null, torch.nn.functional.pad(label, (0, 1))), -1)
    joint = Joint(logits, torch.ones(label.shape[0], label.shape[2]).long(), *lengths)
    options = {"blank": 0, "reduction": "none", "fused_log_softmax": False}
    loss, gradient = loss_and_gradients(rnnt_loss, joint, backend, **options)
    expected = [loss, gradient[..., 0], gradient[:, :, :-1, 1]]
    assert_close(loss_and_gradients(lattice_loss, arrows, backend), expected)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_losses_are_reduced_as_asked(backend):
    arrows = random_arrows(*RAGGED[:2])
    losses = lattice_loss(*arrows, backend=backend)
    assert_close(lattice_loss(*arrows, reduction="sum", backend=backend), losses.sum())
    assert_close(lattice_loss(*arrows, reduction="mean", backend=backend), losses.mean())


# --- Parity of the backends ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients_are_as_exact_as_the_reference(shape, scale, backend):
    assert_as_exact_as_the_reference(lattice_loss, random_arrows(*shape[:2], scale=scale), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=4),
    options=st.fixed_dictionaries(
        {
            "scale": st.sampled_from([0.1, 1.0, 10.0]),
            "padding": st.integers(0, 2),
            "seed": st.integers(0, 99),
            "impossible": st.sampled_from([0.0, 0.2]),
        }
    ),
)
def test_any_batch_is_as_exact_as_the_reference(backend, lengths, options):
    T, U = map(list, zip(*lengths, strict=True))
    arrows = random_arrows(T, U, dtype=torch.float64, **options)
    exact = loss_and_gradients(lattice_loss, arrows)
    assert_close(loss_and_gradients(lattice_loss, arrows, backend), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_lose_nothing_but_the_rounding_of_the_gradients(dtype, backend):
    arrows = random_arrows(*RAGGED[:2], dtype=dtype, scale=3)
    loss, *gradients = loss_and_gradients(lattice_loss, arrows, backend)
    wide_loss, *wide = loss_and_gradients(lattice_loss, cast(arrows, torch.float32), backend)
    assert_same_bits([loss, *gradients], [wide_loss, *(x.to(dtype) for x in wide)])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_in_the_padding_changes_nothing(dtype, backend):
    clean = random_arrows(*RAGGED[:2], dtype=dtype, padding=1)
    poisoned = Arrows(*(x.clone() for x in clean))
    lengths = list(zip(*clean[2:], strict=True))
    for b, (T, U) in enumerate(lengths):
        poisoned.log_null[b, T:], poisoned.log_null[b, :, U + 1 :] = nan, nan
        poisoned.log_label[b, T:], poisoned.log_label[b, :, U:] = nan, nan
    actual = loss_and_gradients(lattice_loss, poisoned, backend)
    assert_same_bits(actual, loss_and_gradients(lattice_loss, clean, backend))
    for b, (T, U) in enumerate(lengths):
        assert not actual[1][b, T:].any() and not actual[1][b, :, U + 1 :].any()
        assert not actual[2][b, T:].any() and not actual[2][b, :, U:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_and_integer_types_change_nothing(backend):
    arrows = random_arrows(*RAGGED[:2])
    strided = Arrows(
        *(x.mT.contiguous().mT for x in arrows[:2]),
        *(x.to(torch.int32).repeat_interleave(2)[::2] for x in arrows[2:]),
    )
    assert not strided.log_null.is_contiguous()
    expected = loss_and_gradients(lattice_loss, arrows, backend)
    assert_same_bits(loss_and_gradients(lattice_loss, strided, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_is_the_same_bits_with_any_threads(backend, set_num_threads):
    arrows = random_arrows([50, 31, 8, 40, 17], [20, 3, 12, 0, 25])
    runs = []
    for num_threads in (1, 2, 5):
        set_num_threads(num_threads)
        runs.append(loss_and_gradients(lattice_loss, arrows, backend))
    for first, second in pairwise(runs):
        assert_same_bits(second, first)


# --- -inf ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_arrows_have_no_gradient(dtype, backend):
    arrows = random_arrows([6, 4], [3, 2], dtype=dtype)
    arrows.log_null[0, 2, 1] = arrows.log_label[1, 0, 0] = -inf
    loss, null, label = loss_and_gradients(lattice_loss, arrows, backend)
    exact = loss_and_gradients(lattice_loss, cast(arrows, torch.float64))
    assert exact[0].isfinite().all()
    assert_close([loss, null, label], [x.to(dtype) for x in exact], rtol=1e-6, atol=1e-6)
    assert null[0, 2, 1] == 0 and label[1, 0, 0] == 0


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which, where", [(0, (3, 3)), (0, slice(None)), (1, (slice(None), 1))])
def test_a_target_that_cannot_be_emitted_has_infinite_loss_and_no_gradient(
    which, where, dtype, backend
):
    arrows = random_arrows([4, 4], [3, 3], dtype=dtype)
    possible = loss_and_gradients(lattice_loss, arrows, backend)
    arrows[which][1][where] = -inf
    loss, *gradients = loss_and_gradients(lattice_loss, arrows, backend)
    assert loss[1] == inf
    assert all(torch.equal(x[1], torch.zeros_like(x[1])) for x in gradients)
    assert_same_bits([x[0] for x in (loss, *gradients)], [x[0] for x in possible])


# --- Errors -------------------------------------------------------------------------------------

GOOD = random_arrows([4, 3], [2, 3])
NULLS, EMITTED, NUM_FRAMES, NUM_LABELS = GOOD
WRONG = {
    "no frames": ({"num_frames": torch.tensor([4, 0])}, r"num_frames\[1\] .* 1 and 4, not 0"),
    "too many labels": ({"num_labels": torch.tensor([2, 4])}, r"num_labels\[1\] .* not 4"),
    "NaN in log_null": ({"log_null": changed(NULLS, 1, 2, 3, nan)}, "log_null of item 1 has NaN"),
    "+inf in log_label": (
        {"log_label": changed(EMITTED, 0, 3, 1, inf)},
        r"log_label of item 0 has \+inf",
    ),
    "log_null without a batch": ({"log_null": NULLS[0]}, "log_null must be"),
    "as many columns": ({"log_label": NULLS}, "log_label must be"),
    "other frames": ({"log_label": EMITTED[:, 1:]}, "log_label must be"),
    "no batch": ({k: x[:0] for k, x in GOOD._asdict().items()}, "log_null must have"),
    "one length for all": ({"num_frames": torch.tensor(3)}, "num_frames must be"),
    "lengths in float": ({"num_labels": NUM_LABELS.float()}, "num_labels must be integers"),
    "log_null in double": ({"log_null": NULLS.double()}, "must have one type"),
    "integers": ({"log_null": NULLS.int(), "log_label": EMITTED.int()}, "floating-point"),
    "an unknown reduction": ({"reduction": "median"}, "reduction must be .* not 'median'"),
    "an unknown backend": ({"backend": "abacus"}, "backend must be .* not 'abacus'"),
}


@pytest.mark.parametrize("backend", ["auto", *ALL_BACKENDS])
@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(arguments, message, backend):
    with pytest.raises(ValueError, match=message):
        lattice_loss(**{**GOOD._asdict(), "backend": backend, **arguments})
