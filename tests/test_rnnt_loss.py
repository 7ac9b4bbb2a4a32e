"""rnnt_loss: torchaudio's results, the sum over alignments, and every backend alike."""

import subprocess
import sys
from itertools import pairwise
from math import inf, lgamma, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from lattices import (
    ALL_BACKENDS,
    ANY_SHAPE,
    BACKENDS,
    RAGGED,
    SHAPES,
    Joint,
    alignments,
    assert_as_exact_as_the_reference,
    assert_same_bits,
    cast,
    changed,
    loss_and_gradients,
    path_score,
    random_batch,
)
from torch.testing import assert_close

from transduce import rnnt_loss, transducer_loss
from transduce.lattice import reference
from transduce.lattice.loss import RNNTLoss

pytestmark = pytest.mark.usefixtures("empty_is_nan")

OPTIONS = {"blank": 0, "reduction": "none"}  # as in transducer_loss


def random_joint(num_frames, num_labels, K, *, dtype=torch.float32, scale=1.0, seed=0, padding=0):
    """Draw as random_batch does, but the logits of each node independently; null is output 0."""
    f, g, *rest = random_batch(num_frames, num_labels, K, seed=seed, padding=padding)
    draw = torch.Generator().manual_seed(seed)
    shape = f.shape[0], f.shape[1], g.shape[1], K + 1
    logits = torch.randn(shape, generator=draw, dtype=torch.float64) * scale
    return Joint(logits.to(dtype), *rest)


def gradients(joint, backend, **options):
    return loss_and_gradients(rnnt_loss, joint, backend, **OPTIONS | options)


def with_log_softmax(logits, *rest, **options):
    return rnnt_loss(logits.log_softmax(-1), *rest, fused_log_softmax=False, **options)


# --- What it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_loss_and_gradient_are_those_torchaudio_documents(backend):
    logits = [
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
    ]
    expected = [
        [
            [0.17703132, -0.39992708, 0.17703132, 0.17703132, -0.13116692],
            [0.12247062, 0.12247062, -0.181684, 0.12247062, -0.1857276],
            [0.06269141, 0.06269141, 0.06928471, 0.12624498, -0.32091248],
        ],
        [
            [0.05456069, -0.2182428, 0.05456069, 0.05456069, 0.05456069],
            [0.12073967, 0.12073967, -0.48295838, 0.12073967, 0.12073967],
            [0.30741188, 0.16871123, 0.18645471, 0.16871123, -0.83128875],
        ],
    ]
    targets, two = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    joint = Joint(torch.tensor([logits]), targets, two, two)
    loss, gradient = gradients(joint, backend, blank=-1)
    assert_close(loss, torch.tensor([5.09566688538]))
    assert_close(gradient, torch.tensor([expected]))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", [(1, 0), (1, 3), (4, 1), (3, 3)])
def test_loss_and_gradient_are_those_of_the_sum_over_alignments(T, U, backend):
    joint = random_joint([T], [U], 4, dtype=torch.float64)
    loss, gradient = gradients(joint, backend)
    logits = joint.logits[0].requires_grad_()
    arrows = reference.transitions(logits.log_softmax(-1), joint.targets[0], null=0)
    evidence = torch.stack([path_score(a, *arrows) for a in alignments(T, U)]).logsumexp(0)
    assert_close(loss[0], -evidence.detach())
    assert_close(gradient[0], *torch.autograd.grad(-evidence, logits))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_loss_of_a_sum_of_networks_is_the_transducer_loss(backend):
    batch = random_batch(*RAGGED, dtype=torch.float64)

    def of_the_sum(f, g, *rest, backend):
        logits = f[:, :, None] + g[:, None]
        return rnnt_loss(logits, *rest, backend=backend, **OPTIONS)

    actual = loss_and_gradients(of_the_sum, batch, backend)
    assert_close(actual, loss_and_gradients(transducer_loss, batch, backend))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("blank", [0, 2, 6, -1, -3, -7])
def test_null_may_be_any_output(blank, backend):
    joint = random_joint(*RAGGED, dtype=torch.float64)
    null = blank % 7
    order = [*range(1, null + 1), 0, *range(null + 1, 7)]  # moves output 0 to `null`
    moved = joint._replace(
        logits=joint.logits[..., order], targets=joint.targets - (joint.targets <= null).long()
    )
    loss, gradient = gradients(joint, backend)
    assert_close(gradients(moved, backend, blank=blank), [loss, gradient[..., order]])


def test_null_is_the_last_output_unless_it_is_given():
    logits, targets, *lengths = random_joint([4, 3], [2, 3], 5)
    targets -= 1
    expected = rnnt_loss(logits, targets, *lengths, blank=5)
    assert torch.equal(rnnt_loss(logits, targets, *lengths), expected)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_losses_are_reduced_as_asked(backend):
    joint = random_joint(*RAGGED)
    losses = rnnt_loss(*joint, 0, reduction="none", backend=backend)
    assert losses.shape == (5,)
    assert_close(rnnt_loss(*joint, 0, reduction="sum", backend=backend), losses.sum())
    assert_close(rnnt_loss(*joint, 0, reduction="mean", backend=backend), losses.mean())
    assert_close(rnnt_loss(*joint, 0, backend=backend), losses.mean())
    _, plain = gradients(joint, backend)
    assert_close(gradients(joint, backend, reduction="sum")[1], plain)
    assert_close(gradients(joint, backend, reduction="mean")[1], plain / 5)


def test_the_module_is_the_function():
    joint = random_joint(*RAGGED)
    options = {"blank": 0, "clamp": 0.1, "reduction": "sum", "fused_log_softmax": False}
    assert torch.equal(RNNTLoss(**options)(*joint), rnnt_loss(*joint, **options))
    last = joint._replace(targets=joint.targets - 1)
    assert torch.equal(RNNTLoss()(*last), rnnt_loss(*last))
    with pytest.raises(ValueError, match="reduction must be"):
        RNNTLoss(reduction="median")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("fused", [True, False])
def test_gradient_is_clamped_before_it_is_scaled(fused, backend):
    joint = random_joint(*RAGGED)
    options = {"fused_log_softmax": fused, "upstream": torch.tensor([-2.0, 0.5, 3.0, 1.0, 0.0])}
    _, plain = gradients(joint, backend, fused_log_softmax=fused)
    expected = plain.clamp(-0.1, 0.1) * options["upstream"][:, None, None, None]
    assert (plain.abs() > 0.1).any() and (plain.abs() < 0.1).any()
    assert_close(gradients(joint, backend, clamp=0.1, **options)[1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("clamp", [-1, 0, -0.1])
def test_gradient_is_not_clamped_unless_the_bound_is_positive(clamp, backend):
    joint = random_joint(*RAGGED)
    assert_same_bits(gradients(joint, backend, clamp=clamp), gradients(joint, backend))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_log_probabilities_may_be_given(backend):
    joint = random_joint(*RAGGED, dtype=torch.float64)
    log_probs = joint._replace(logits=joint.logits.log_softmax(-1))
    given_them = gradients(log_probs, backend, fused_log_softmax=False)
    assert_close(given_them, gradients(log_probs, "reference", fused_log_softmax=False))
    unused = given_them[1] == 0  # only the arrows of the lattice have a gradient: Eq. 20
    assert (~unused).sum(-1).max() <= 2
    through = loss_and_gradients(with_log_softmax, joint, backend, **OPTIONS)
    assert_close(through, gradients(joint, backend))


# --- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_pass_gradcheck(fused, backend):
    logits, *rest = random_joint([3, 2], [1, 2], 2, dtype=torch.float64)
    options = OPTIONS | {"fused_log_softmax": fused, "backend": backend}
    assert torch.autograd.gradcheck(
        lambda x: rnnt_loss(x, *rest, **options), logits.requires_grad_()
    )


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_are_scaled_by_what_is_upstream(backend):
    joint = random_joint(*RAGGED)
    upstream = torch.tensor([-2.0, 0.0, 0.5, 3.0, 1.0])
    _, plain = gradients(joint, backend)
    _, scaled = gradients(joint, backend, upstream=upstream)
    assert_same_bits([scaled], [plain * upstream[:, None, None, None]])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_are_the_same_the_second_time(backend):
    logits, *rest = random_joint(*RAGGED)
    loss = rnnt_loss(logits.requires_grad_(), *rest, blank=0, backend=backend)
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, logits), first)


# --- Parity of the backends ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients_are_as_exact_as_the_reference(shape, fused, backend):
    joint = random_joint(*shape, scale=3)
    if not fused:
        joint = joint._replace(logits=joint.logits.log_softmax(-1))
    options = OPTIONS | {"fused_log_softmax": fused}
    assert_as_exact_as_the_reference(rnnt_loss, joint, backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(shape=ANY_SHAPE)
def test_any_batch_is_as_exact_as_the_reference(backend, shape):
    assert_as_exact_as_the_reference(rnnt_loss, random_joint(**shape), backend, **OPTIONS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1, 40, 400])
def test_double_precision_is_kept(scale, backend):
    joint = random_joint(*RAGGED, dtype=torch.float64, scale=scale)
    exact = gradients(joint, "reference")
    assert_close(gradients(joint, backend), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [RAGGED, ([50, 70], [30, 25], 200)], ids=["small", "in pieces"])
def test_half_types_lose_nothing_but_the_rounding_of_the_gradient(shape, dtype, backend):
    joint = random_joint(*shape, dtype=dtype, scale=3)
    loss, gradient = gradients(joint, backend)
    wide_loss, wide = gradients(cast(joint, torch.float32), backend)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    assert_same_bits([loss, gradient], [wide_loss, wide.to(dtype)])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_in_the_padding_changes_nothing(dtype, backend):
    clean = random_joint(*RAGGED, dtype=dtype, padding=1)
    poisoned = Joint(*(x.clone() for x in clean))
    lengths = list(zip(clean.logit_lengths, clean.target_lengths, strict=True))
    for b, (T, U) in enumerate(lengths):
        poisoned.logits[b, T:] = nan
        poisoned.logits[b, :, U + 1 :] = nan
        poisoned.targets[b, U:] = [-7, 10**6, 0][b % 3]
    actual = gradients(poisoned, backend)
    assert_same_bits(actual, gradients(clean, backend))
    for b, (T, U) in enumerate(lengths):
        assert not actual[1][b, T:].any() and not actual[1][b, :, U + 1 :].any()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_targets_and_lengths_may_be_any_integers(dtype, backend):
    joint = random_joint(*RAGGED)
    integers = Joint(joint.logits, *(x.to(dtype) for x in joint[1:]))
    assert_same_bits(gradients(integers, backend), gradients(joint, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_nothing(dtype, backend):
    joint = random_joint(*RAGGED, dtype=dtype)
    every_other = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in joint]
    transposed = [x.mT.contiguous().mT for x in joint[:2]] + every_other[2:]
    for strided in (every_other, transposed):
        assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
        assert_same_bits(gradients(Joint(*strided), backend), gradients(joint, backend))


# --- Determinism --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_result_is_the_same_bits_from_run_to_run_and_with_any_threads(
    dtype, backend, set_num_threads
):
    joint = random_joint([50, 31, 8], [20, 3, 12], 33, dtype=dtype)
    runs = []
    for num_threads in (1, 1, 2, 2, 5):
        set_num_threads(num_threads)
        runs.append(gradients(joint, backend))
    for first, second in pairwise(runs):
        assert_same_bits(second, first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_utterance_has_the_same_bits_alone_and_in_a_batch(backend):
    joint = random_joint([50, 31, 8], [20, 3, 12], 33)
    together = gradients(joint, backend)
    for b, (T, U) in enumerate(zip(*joint[2:], strict=True)):
        logits, targets, *lengths = (x[b : b + 1] for x in joint)
        alone = gradients(Joint(logits[:, :T, : U + 1], targets[:, :U], *lengths), backend)
        within = [x[b : b + 1] for x in together]
        assert_same_bits(alone, [within[0], within[1][:, :T, : U + 1]])


# --- Numbers that underflow, and -inf -----------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [40, 400])
def test_nothing_is_lost_to_underflow(scale, backend):
    joint = random_joint([20, 9], [8, 12], 30, scale=scale)
    loss, gradient = gradients(joint, backend)
    exact = gradients(cast(joint, torch.float64), "reference")
    assert_close(loss.double(), exact[0], rtol=1e-5, atol=0)
    assert_close(gradient.double(), exact[1], rtol=0, atol=1e-3)


# Logits (t, u, k) of four frames and the targets 1, 2, 3, which can be emitted still.
IMPOSSIBLE = {
    "a label at one frame": [(1, 1, 2)],
    "nulls before a label": [(0, 1, 0), (2, 1, 0), (3, 1, 0)],
    "the wrong labels": [(2, 0, 4), (1, 2, 2), (3, 3, 1)],
    "one node": [(1, 1, slice(None))],
}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("places", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_is_impossible_has_no_likelihood_and_no_gradient(places, fused, dtype, backend):
    logits, _, *lengths = random_joint([4], [3], 4, dtype=dtype)
    joint = Joint(logits, torch.tensor([[1, 2, 3]]), *lengths)
    for place in places:
        logits[0][place] = -inf
    loss, gradient = gradients(joint, backend, fused_log_softmax=fused)
    exact = gradients(cast(joint, torch.float64), "reference", fused_log_softmax=fused)
    assert exact[0].isfinite().all()
    assert_close(loss.double(), exact[0], rtol=1e-6, atol=1e-6)
    assert_close(gradient, exact[1].to(dtype), rtol=1e-6, atol=1e-3 if dtype.itemsize < 4 else 1e-6)
    assert not gradient[logits == -inf].any()


FORBIDDEN = {
    "a label": (slice(None), 1, 2),
    "the last null": (3, 3, 0),
    "a frame": 1,
    "a column": (slice(None), 2),
    "everything": slice(None),
}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("where", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_target_that_cannot_be_emitted_has_infinite_loss_and_no_gradient(
    where, fused, dtype, backend
):
    joint = random_joint([4, 4], [3, 3], 4, dtype=dtype)
    joint.targets[:] = torch.tensor([1, 2, 3])
    possible = gradients(joint, backend, fused_log_softmax=fused)
    joint.logits[1][where] = -inf
    loss, gradient = gradients(joint, backend, fused_log_softmax=fused)
    assert loss[1] == inf
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    assert_same_bits([loss[0], gradient[0]], [x[0] for x in possible])


# --- Size ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_logits_may_have_more_elements_than_an_int32_can_count(set_num_threads):
    set_num_threads(1)  # a frame this large is one thread's: a second only waits
    T, U, outputs = 2100, 1023, 1024
    logits = torch.linspace(-3, 3, outputs, dtype=torch.float16)
    targets = 1 + torch.arange(U)[None] % (outputs - 1)
    many = logits.expand(1, T, U + 1, outputs)
    assert many.numel() > 2**31
    loss = rnnt_loss(many, targets, torch.tensor([T]), torch.tensor([U]), blank=0)
    log_prob = logits.double().log_softmax(0)
    num_alignments = lgamma(T + U) - lgamma(U + 1) - lgamma(T)
    expected = -(num_alignments + T * log_prob[0] + log_prob[targets].sum())
    assert_close(loss.double(), expected, rtol=1e-6, atol=0)


PEAK = """
import torch
from transduce import rnnt_loss

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

def gradient(T, U, outputs):
    logits = torch.ones(2, T, U + 1, outputs, dtype=torch.{dtype}, requires_grad=True)
    before = peak()
    lengths = torch.tensor([T, T - 1]), torch.tensor([U, U // 2])
    loss = rnnt_loss(logits, torch.ones(2, U, dtype=torch.int64), *lengths, blank=0)
    gradient, = torch.autograd.grad(loss, logits)
    return (peak() - before) / gradient.nbytes

torch.set_num_threads(1)
gradient(3, 2, 5)  # compiles
print(gradient(256, 63, 1024 * 4 // torch.{dtype}.itemsize))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_the_only_large_tensor_that_is_allocated(dtype):
    script = PEAK.format(dtype=dtype)
    ratio = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True
    ).stdout
    assert 0.9 < float(ratio) < 1.25


# --- Errors -------------------------------------------------------------------------------------

GOOD = random_joint([4, 3], [2, 3], 5)
LOGITS, TARGETS, LOGIT_LENGTHS, TARGET_LENGTHS = GOOD
WRONG = {
    "no frames": ({"logit_lengths": torch.tensor([4, 0])}, r"logit_lengths\[1\] .* not 0"),
    "too many frames": ({"logit_lengths": torch.tensor([5, 4])}, r"logit_lengths\[0\] .* not 5"),
    "too many labels": ({"target_lengths": torch.tensor([2, 4])}, r"target_lengths\[1\] .* not 4"),
    "fewer than none": ({"target_lengths": torch.tensor([-1, 3])}, r"target_lengths\[0\] .* -1"),
    "a label too large": ({"targets": changed(TARGETS, 1, 2, 6)}, "targets of item 1 .* label 6"),
    "a negative label": ({"targets": changed(TARGETS, 0, 0, -3)}, "targets of item 0 .* label -3"),
    "null as a label": ({"targets": changed(TARGETS, 1, 1, 0)}, "targets of item 1 .* null"),
    "the last null as a label": (
        {"targets": changed(TARGETS, 0, 0, 5), "blank": -1},
        "targets of item 0 .* null symbol, 5",
    ),
    "NaN": ({"logits": changed(LOGITS, 1, 2, 3, 4, nan)}, "logits of item 1 has NaN"),
    "+inf": ({"logits": changed(LOGITS, 0, 3, 0, 5, inf)}, r"logits of item 0 has \+inf"),
    "NaN among log-probabilities": (
        {"logits": changed(LOGITS, 1, 0, 0, 4, nan), "fused_log_softmax": False},
        "logits of item 1 has NaN",
    ),
    "logits without a batch": ({"logits": LOGITS[0]}, "logits must be"),
    "targets without a batch": ({"targets": TARGETS[0]}, "targets must be"),
    "targets of other logits": ({"targets": TARGETS[:, 1:]}, "targets must be"),
    "one length for all": ({"logit_lengths": torch.tensor(3)}, "logit_lengths must be"),
    "lengths of another batch": ({"target_lengths": torch.tensor([2])}, "target_lengths must be"),
    "integers for logits": ({"logits": LOGITS.int()}, "logits must be floating-point"),
    "targets in float": ({"targets": TARGETS.float()}, "targets must be integers"),
    "lengths in float": ({"target_lengths": TARGET_LENGTHS.float()}, "must be integers"),
    "null beyond the outputs": ({"blank": 6}, "blank must be .* not 6"),
    "null before the outputs": ({"blank": -7}, "blank must be .* not -7"),
    "an unknown reduction": ({"reduction": "median"}, "reduction must be .* not 'median'"),
    "an unknown backend": ({"backend": "abacus"}, "backend must be .* not 'abacus'"),
}


@pytest.mark.parametrize("backend", ["auto", *ALL_BACKENDS])
@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(arguments, message, backend):
    with pytest.raises(ValueError, match=message):
        rnnt_loss(**{**GOOD._asdict(), "blank": 0, "backend": backend, **arguments})


def test_cuda_is_refused_for_tensors_on_the_cpu():
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        rnnt_loss(*GOOD, blank=0, backend="cuda")
