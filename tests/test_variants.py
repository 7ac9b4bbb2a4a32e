"""Variants of the loss: transitions against autograd, FastEmit, HAT and the delay penalty."""

from math import inf

import pytest
import torch
from lattices import (
    ALL_BACKENDS,
    RAGGED,
    alignments,
    path_score,
    random_arrows,
    random_batch,
)
from torch.testing import assert_close

from transduce.lattice.loss import lattice_loss, rnnt_loss, transducer_loss
from transduce.lattice.variants import (
    additive_transitions,
    delay_penalty,
    fastemit_loss,
    hat_transitions,
    joint_transitions,
)

DOUBLE = torch.float64


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def gradients(loss, *tensors):
    return [loss.detach(), *torch.autograd.grad(loss.sum(), tensors)]


def random_logits(num_frames, num_labels, K, **options):
    f, g, labels, *lengths = random_batch(num_frames, num_labels, K, **options)
    draw = torch.Generator().manual_seed(1)
    shape = (f.shape[0], f.shape[1], g.shape[1], K + 1)
    return torch.randn(shape, generator=draw, dtype=DOUBLE), labels, lengths


# --- Transitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("null", [0, 3, -1])
def test_the_loss_of_a_joint_networks_arrows_is_rnnt_loss(null):
    logits, labels, lengths = random_logits(*RAGGED)
    labels = torch.where(labels == null % 7, 1 if null else 2, labels)
    (x,), (y,) = leaves(logits), leaves(logits)
    found = lattice_loss(*joint_transitions(x, labels, null), *lengths)
    expected = rnnt_loss(y, labels, *lengths, blank=null, reduction="none")
    assert_close(gradients(found, x), gradients(expected, y))


@pytest.mark.parametrize("scale", [1, 40, 200])
def test_the_loss_of_additive_arrows_is_transducer_loss(scale):
    f, g, labels, *lengths = random_batch(*RAGGED, dtype=DOUBLE, scale=scale)
    ours, theirs = leaves(f, g), leaves(f, g)
    found = lattice_loss(*additive_transitions(*ours, labels), *lengths)
    expected = transducer_loss(*theirs, labels, *lengths)
    assert_close(gradients(found, *ours), gradients(expected, *theirs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", [-7, 10**6])
def test_additive_arrows_are_those_of_the_joint_tensor(padding):
    f, g, labels, *_ = random_batch([5, 4], [3, 2], 6, dtype=DOUBLE)
    labels[1, 2] = padding
    found = additive_transitions(f, g, labels)
    assert_close(found, joint_transitions(f[:, :, None] + g[:, None], labels))
    half = additive_transitions(f.half(), g.half(), labels)
    assert [x.dtype for x in half] == [torch.float32] * 2


@pytest.mark.parametrize("transitions", [joint_transitions, hat_transitions])
def test_transitions_pass_gradcheck(transitions):
    logits, labels, _ = random_logits([2, 3], [2, 1], 3)
    assert torch.autograd.gradcheck(lambda x: transitions(x, labels), leaves(logits))


def test_additive_transitions_pass_gradcheck():
    f, g, labels, *_ = random_batch([2, 3], [2, 1], 3, dtype=DOUBLE)
    assert torch.autograd.gradcheck(lambda *x: additive_transitions(*x, labels), leaves(f, g))


def test_hat_is_a_bernoulli_of_null_and_a_softmax_of_the_labels():
    logits, labels, _ = random_logits([4], [3], 5)
    log_null, log_label = hat_transitions(logits, labels)
    for t in range(4):
        for u in range(4):
            null = torch.sigmoid(logits[0, t, u, 0])
            others = logits[0, t, u, 1:].softmax(0)
            assert_close(log_null[0, t, u].exp(), null)
            if u < 3:
                assert_close(log_label[0, t, u].exp(), (1 - null) * others[labels[0, u] - 1])


@pytest.mark.parametrize("transitions", [joint_transitions, hat_transitions])
def test_impossible_outputs_give_impossible_arrows_and_no_nan(transitions):
    logits, labels, lengths = random_logits([4, 4], [3, 3], 5)
    logits[0, 1, 1] = -inf  # one node
    logits[1, :, 2, labels[1, 2]] = -inf  # a label at all frames
    (x,) = leaves(logits)
    loss, gradient = gradients(lattice_loss(*transitions(x, labels), *lengths), x)
    assert loss.isfinite().tolist() == [True, False]
    assert gradient.isfinite().all() and not gradient[1].any() and gradient[0].any()


def test_impossible_vectors_give_impossible_arrows_and_no_nan():
    f, g, labels, *lengths = random_batch([4, 4], [3, 3], 5, dtype=DOUBLE)
    f[1, 2], g[0, 1, 4] = -inf, -inf
    labels[0] = torch.tensor([1, 2, 3])
    ours, theirs = leaves(f, g), leaves(f, g)
    found = gradients(lattice_loss(*additive_transitions(*ours, labels), *lengths), *ours)
    assert found[0].isfinite().tolist() == [True, False]
    assert_close(found, gradients(transducer_loss(*theirs, labels, *lengths), *theirs))


# --- Emitting early -----------------------------------------------------------------------------


@pytest.mark.parametrize("T, U", [(1, 2), (4, 1), (3, 3)])
def test_a_delay_penalty_weighs_each_alignment_by_its_mean_delay(T, U):
    arrows = random_arrows([T], [U], dtype=DOUBLE, padding=1)
    weight = 0.3
    penalised = delay_penalty(arrows.log_label, arrows.num_frames, weight)
    found = lattice_loss(arrows.log_null, penalised, *arrows[2:])
    null, label = arrows.log_null[0, :T, : U + 1], arrows.log_label[0, :T, :U]
    scores = [
        path_score(times, null, label) + weight * sum((T - 1) / 2 - t for t in times)
        for times in alignments(T, U)
    ]
    assert_close(found[0], -torch.stack(scores).logsumexp(0))


def test_a_delay_penalty_makes_emissions_earlier():
    arrows = random_arrows([9], [3], dtype=DOUBLE)
    frames = torch.arange(9, dtype=DOUBLE)[:, None]
    means = []
    for weight in (0.0, 0.5):
        label = delay_penalty(arrows.log_label, arrows.num_frames, weight)
        _, taken = lattice_loss(arrows.log_null, label, *arrows[2:], with_occupancies=True)
        means.append((taken.label[0] * frames).sum())
    assert means[1] < means[0]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_fastemit_scales_the_gradients_of_the_labels_alone(backend):
    arrows = random_arrows(*RAGGED[:2], padding=1)
    arrows.log_label[0, 1, 1] = -inf
    ours, theirs = leaves(*arrows[:2]), leaves(*arrows[:2])
    found = fastemit_loss(*ours, *arrows[2:], weight=0.25, backend=backend)
    expected = lattice_loss(*theirs, *arrows[2:], backend=backend)
    loss, null, label = gradients(found, *ours)
    plain_loss, plain_null, plain_label = gradients(expected, *theirs)
    assert torch.equal(loss, plain_loss) and torch.equal(null, plain_null)
    assert_close(label, 1.25 * plain_label)
    assert plain_label.any() and label[0, 1, 1] == 0


def test_fastemit_reduces_as_asked():
    arrows = random_arrows(*RAGGED[:2])
    losses = lattice_loss(*arrows)
    for reduction, expected in (("sum", losses.sum()), ("mean", losses.mean())):
        assert_close(fastemit_loss(*arrows, weight=0.1, reduction=reduction), expected)
