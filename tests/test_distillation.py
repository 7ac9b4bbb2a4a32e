"""The next-label distributions and the distillation loss, against sums over all alignments."""

from functools import cache

import pytest
import torch
from hypothesis import given
from lattices import (
    ANY_SHAPE,
    RAGGED,
    SHAPES,
    alignments,
    assert_exact_enough,
    changed,
    path_score,
    random_batch,
)
from slow import slow_except
from torch.library import opcheck

from transduce import Transducer, transducer_loss
from transduce.data.batches import Batch
from transduce.decoding.ensemble import _DirectionGroup
from transduce.lattice import reference
from transduce.lattice.distillation import (
    distillation_loss,
    distillation_losses,
    next_label_log_probs,
)
from transduce.lattice.operators import distilled_loss
from transduce.sequences import reverse_padded

BACKEND = pytest.mark.parametrize("backend", ["eager", "cpu"])


def leaves(batch, dtype=torch.float64):
    """Return the arguments of a loss, f and g as leaves in `dtype`."""
    f, g = (x.detach().to(dtype).requires_grad_() for x in batch[:2])
    return [f, g, *batch[2:]]


def random_targets(batch, *, certain=0.0, seed=0):
    """Draw distributions q; `certain` is the share of what follows in y."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(batch[1].shape, generator=draw, dtype=torch.float64).softmax(-1)
    return certain * one_hot(batch) + (1 - certain) * drawn


def one_hot(batch):
    """Return the targets that are certain of y."""
    following = torch.nn.functional.pad(batch[2], (0, 1))
    following[torch.arange(following.shape[1]) >= batch[4][:, None]] = 0
    return torch.nn.functional.one_hot(following, batch[1].shape[2]).double()


def by_enumeration(f, g, labels):
    """Return Pr(k|y_1 ... y_u,x) and Pr(end|...) of one utterance, from sums over alignments.

    The labels before k are y's, and k comes last: what follows in the frames does not matter.
    """
    log_pr = reference.output_distribution(f, g)  # [T, U+1, K+1]
    T, columns, outputs = log_pr.shape
    joint = f.new_zeros(columns, outputs)
    for u in range(columns):
        log_label = torch.stack([log_pr[:, i, labels[i]] for i in range(u)] or [f.new_zeros(T)], 1)
        for times in alignments(T, u):
            whole = path_score(times, log_pr[:, : u + 1, 0], log_label)
            joint[u, 0] = joint[u, 0] + whole.exp()
            for t in range(times[-1] if times else 0, T):
                # The nulls after the frame t are not yet emitted when k is.
                unborn = log_pr[t:, u, 0].sum()
                for k in range(1, outputs):
                    joint[u, k] = joint[u, k] + (whole - unborn + log_pr[t, u, k]).exp()
    return (joint / joint.sum(1, keepdim=True)).log()


def by_reference(f, g, labels, num_frames, num_labels, targets):
    """Return the loss from the next labels of the reference, [B]."""
    losses = []
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        log_prob = reference.output_distribution(f[b, :T], g[b, : U + 1])
        expected = reference.next_label_log_probs(log_prob, labels[b, :U])
        losses.append(-(targets[b, : U + 1].to(f.dtype) * expected).sum())
    return torch.stack(losses)


def assert_same_gradients(found, expected, vectors, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weights = torch.arange(1, len(found) + 1, dtype=found.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(weights @ found, vectors),
        torch.autograd.grad(weights @ expected, vectors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("T, U", [(1, 0), (1, 2), (3, 0), (2, 3), (4, 2)])
def test_the_next_label_sums_over_every_alignment(T, U):
    f, g, labels, *lengths = random_batch([T], [U], 3, dtype=torch.float64)
    found = next_label_log_probs(f, g, labels, *lengths)
    expected = by_enumeration(f[0], g[0], labels[0])
    torch.testing.assert_close(found[0], expected)
    log_prob = reference.output_distribution(f[0], g[0])
    torch.testing.assert_close(reference.next_label_log_probs(log_prob, labels[0]), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_the_next_labels_are_distributions_whose_product_is_the_likelihood(name):
    batch = random_batch(*SHAPES[name], dtype=torch.float64, padding=1)
    found = next_label_log_probs(*batch)
    inside = torch.arange(found.shape[1]) <= batch.num_labels[:, None]
    total = found.exp().sum(-1)[inside]
    torch.testing.assert_close(total, torch.ones_like(total))
    along = (one_hot(batch) * found).sum(2).where(inside, 0.0).sum(1)
    torch.testing.assert_close(-along, transducer_loss(*batch))
    assert not found[~inside].any()


@BACKEND
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "a long lattice"])
def test_the_loss_is_the_cross_entropy_of_the_next_labels(name, backend):
    """Of any targets: they need not sum to one."""
    batch = random_batch(*SHAPES[name], padding=1)
    arguments, targets = leaves(batch), random_targets(batch)
    targets = targets * torch.linspace(0.5, 2.0, targets.shape[1])[:, None]
    found = distillation_loss(*arguments, targets, backend=backend)
    assert_same_gradients(found, by_reference(*arguments, targets), arguments[:2])


@BACKEND
@given(shape=ANY_SHAPE)
def test_it_is_so_of_any_batch(shape, backend):
    batch = random_batch(**shape)
    arguments, targets = leaves(batch), random_targets(batch)
    found = distillation_loss(*arguments, targets, backend=backend)
    assert_same_gradients(found, by_reference(*arguments, targets), arguments[:2])


@BACKEND
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
@pytest.mark.parametrize("name", slow_except(range(7), SHAPES))
def test_targets_that_are_certain_of_y_give_the_transducers_loss(name, scale, backend):
    batch = random_batch(*SHAPES[name], scale=scale, padding=1)
    arguments = leaves(batch)
    found, log_loss = distillation_losses(*arguments, one_hot(batch), backend=backend)
    expected = transducer_loss(*arguments, backend="reference" if scale > 1 else "auto")
    torch.testing.assert_close(log_loss, expected.detach(), rtol=1e-9, atol=1e-9)
    assert_same_gradients(found, expected, arguments[:2], 1e-8)


@BACKEND
@pytest.mark.parametrize("name", ["one node", "one frame", "no labels", "ragged"])
def test_gradients_are_those_of_finite_differences(name, backend):
    batch = random_batch(*SHAPES[name], padding=1)
    f, g, *integers = leaves(batch)
    targets = random_targets(batch)
    assert torch.autograd.gradcheck(
        lambda f, g: distillation_loss(f, g, *integers, targets, backend=backend), (f, g)
    )


@BACKEND
def test_padding_is_not_read(backend):
    batch = random_batch(*SHAPES["ragged"], padding=2)
    targets = random_targets(batch)
    poisoned, q = leaves(batch), targets.clone()
    with torch.no_grad():
        for b, (T, U) in enumerate(zip(batch.num_frames, batch.num_labels, strict=True)):
            poisoned[0][b, T:] = torch.nan
            poisoned[1][b, U + 1 :] = torch.nan
            poisoned[2] = poisoned[2].clone()
            poisoned[2][b, U:] = -5
            q[b, U + 1 :] = torch.nan
    arguments = leaves(batch)
    found = distillation_loss(*poisoned, q, backend=backend)
    expected = distillation_loss(*arguments, targets, backend=backend)
    assert torch.equal(found, expected)
    ours = torch.autograd.grad(found.sum(), poisoned[:2])
    theirs = torch.autograd.grad(expected.sum(), arguments[:2])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@BACKEND
def test_what_cannot_be_emitted_has_an_infinite_loss_and_no_gradient(backend):
    batch = random_batch([4, 4, 4], [2, 2, 2], 3)
    batch.labels[:] = torch.tensor([1, 2])
    f, g, *rest = leaves(batch)
    with torch.no_grad():
        g[0, 1, 2] = -torch.inf  # the second label of the first item
        f[1, 3, 0] = -torch.inf  # the last null of the second item
    targets = random_targets(batch, certain=0.5)
    loss, log_loss = distillation_losses(f, g, *rest, targets, backend=backend)
    assert loss.isinf().tolist() == log_loss.isinf().tolist() == [True, True, False]
    for gradient in torch.autograd.grad(loss.sum(), (f, g)):
        assert not gradient[:2].any()
        assert gradient[2].isfinite().all() and gradient[2].any()


@BACKEND
def test_a_label_that_cannot_follow_costs_a_bounded_loss_and_no_gradient(backend):
    f, g, *rest = leaves(random_batch([4], [1], 3))
    rest[0][:] = 1
    with torch.no_grad():
        g[:, :, 3] = -torch.inf
    loss = distillation_loss(f, g, *rest, torch.full((1, 2, 4), 0.25), backend=backend)
    assert 40_000 < loss.item() < 60_000
    gradients = torch.autograd.grad(loss.sum(), (f, g))
    assert all(gradient.isfinite().all() for gradient in gradients)


@BACKEND
def test_networks_that_say_the_opposite_give_no_nan(backend):
    batch = random_batch(*SHAPES["ragged"], scale=2000.0)
    arguments = leaves(batch, torch.float32)
    loss = distillation_loss(*arguments, random_targets(batch), backend=backend)
    assert loss.isfinite().all()
    for gradient in torch.autograd.grad(loss.sum(), arguments[:2]):
        assert gradient.isfinite().all()


@BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype, backend):
    batch = random_batch(*SHAPES["ragged"])
    arguments, targets = leaves(batch, dtype), random_targets(batch)
    expected = distillation_loss(*arguments, targets, backend=backend)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation_loss(*arguments, targets.half(), backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    exact = distillation_loss(*leaves(batch), targets, backend=backend)
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(expected.double(), exact, rtol=tolerance, atol=tolerance)


def loss_and_gradients(loss_function, name, scale, dtype, **options):
    batch = random_batch(*SHAPES[name], padding=1, scale=scale)
    arguments, targets = leaves(batch, dtype), random_targets(batch, certain=0.3)
    loss = loss_function(*arguments, targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), arguments[:2])]


@cache
def references(name, scale):
    """Return the reference's loss and gradients in float32 and float64, once for all backends."""
    kinds = (torch.float32, torch.float64)
    return [loss_and_gradients(by_reference, name, scale, kind) for kind in kinds]


@BACKEND
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("name", slow_except(range(7), SHAPES))
def test_in_float32_it_is_as_exact_as_the_reference(name, scale, backend):
    found = loss_and_gradients(distillation_loss, name, scale, torch.float32, backend=backend)
    theirs, exact = references(name, scale)
    assert_exact_enough(found, theirs, exact)


@pytest.mark.parametrize("T, U", [(40, 5), (3, 30)])
def test_labels_whose_sums_underflow_in_float32_are_exact_too(T, U):
    """f has one label at one frame only, where no alignment of y is likely to be."""
    batch = random_batch([T], [U], 5)
    batch.transcription[:, :, 5] = -120.0
    batch.transcription[:, -1, 5] = 100.0
    batch.transcription[:, : T // 2, 0] -= 60.0
    batch.labels[:] = batch.labels.clamp(max=4)
    targets = random_targets(batch)
    found, expected = (
        [loss.detach(), *torch.autograd.grad(loss, arguments[:2])]
        for arguments in (leaves(batch, torch.float32), leaves(batch))
        for loss in [distillation_loss(*arguments, targets, backend="cpu")]
    )
    exact = by_reference(*leaves(batch), targets)
    torch.testing.assert_close(found[0].double(), exact.detach(), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_an_operator_that_compiles_and_keeps_pytorchs_rules():
    f, g, *rest = leaves(random_batch(*RAGGED), torch.float32)
    targets = random_targets((f, g, *rest)).float()
    opcheck(distilled_loss.operator, (f, g, *rest, targets, True))
    opcheck(distilled_loss.operator, (f.detach(), g.detach(), *rest, targets, False))

    def losses(f, g):
        return distillation_losses(f, g, *rest, targets)

    torch.compiler.reset()
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(f, g), losses(f, g), strict=True):
        assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(x(f, g)[0].sum(), (f, g)) for x in (compiled, losses))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


def test_numbers_that_are_not_valid_are_named():
    f, g, *rest = random_batch([3], [2], 4)
    targets = torch.full_like(g, 0.2)
    with pytest.raises(ValueError, match=r"^transcription of item 0 has NaN at \[1, 2\]"):
        distillation_loss(changed(f, 0, 1, 2, torch.nan), g, *rest, targets)
    with pytest.raises(ValueError, match=r"^targets of item 0 has NaN at \[2, 1\]"):
        distillation_loss(f, g, *rest, changed(targets, 0, 2, 1, torch.nan))
    with pytest.raises(ValueError, match=r"^labels of item 0 has label 7 at position 1"):
        distillation_loss(f, g, changed(rest[0], 0, 1, 7), *rest[1:], targets)
    with pytest.raises(ValueError, match=r"^backend must be auto, eager or cpu, not 'cuda'"):
        distillation_loss(f, g, *rest, targets, backend="cuda")


def test_targets_of_another_shape_or_type_are_refused():
    batch = random_batch([3], [2], 4)
    with pytest.raises(ValueError, match=r"^targets must be \[B, U\+1, K\+1\] = \[1, 3, 5\]"):
        distillation_loss(*batch, torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match=r"^targets must be floating-point, not torch.int64"):
        distillation_loss(*batch, torch.zeros(1, 3, 5, dtype=torch.int64))


@pytest.mark.parametrize("backwards", [False, True])
def test_the_next_labels_are_those_that_an_ensemble_searches_with(backwards):
    """The ensemble has another implementation, which goes label by label."""
    torch.manual_seed(0)
    members = [Transducer(3, 4, 6, backwards=backwards) for _ in range(2)]
    frames, num_frames = torch.randn(2, 5, 3), torch.tensor([5, 3])
    labels, num_labels = torch.tensor([[1, 3, 2], [4, 0, 0]]), torch.tensor([3, 1])
    batch = Batch((), frames, num_frames, labels, num_labels)
    with torch.no_grad():
        found = torch.stack([next_label_log_probs(*one._outputs(batch)) for one in members])
        group = _DirectionGroup(members, backwards, frames, num_frames, 0.0)
        each = torch.arange(2)
        group._start(each)
        read = reverse_padded(labels, num_labels) if backwards else labels
        for u in range(4):
            inside = u <= num_labels
            expected, ours = group._expected()[inside], found.mean(0).log_softmax(-1)[inside, u]
            torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
            group._advance(each, read[:, min(u, 2)])
