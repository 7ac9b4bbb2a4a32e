"""The losses as PyTorch operators: traced, compiled, transformed and checkpointed."""

from math import nan

import pytest
import torch
from lattices import (
    ALL_BACKENDS,
    RAGGED,
    Joint,
    assert_same_bits,
    changed,
    random_arrows,
    random_batch,
)
from slow import slow_except
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from transduce.lattice.loss import lattice_loss, rnnt_loss, transducer_loss
from transduce.lattice.operators import additive_loss, arrow_loss, joint_loss

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def joint_batch(dtype=torch.float32):
    f, g, *rest = random_batch(*RAGGED, dtype=dtype)
    return Joint((f[:, :, None] + g[:, None]).detach(), *rest)


def rnnt(*arguments, **options):
    return rnnt_loss(*arguments, blank=0, reduction="none", **options)


LOSSES = {
    "transducer_loss": (transducer_loss, lambda dtype: random_batch(*RAGGED, dtype=dtype)),
    "rnnt_loss": (rnnt, joint_batch),
    "lattice_loss": (lattice_loss, lambda dtype: random_arrows(*RAGGED[:2], dtype=dtype)),
}
EVERY = pytest.mark.parametrize("loss_function, draw", LOSSES.values(), ids=LOSSES)
BACKEND = pytest.mark.parametrize("backend", ALL_BACKENDS)


def leaves_and_rest(batch):
    leaves = [x.clone().requires_grad_() for x in batch if x.is_floating_point()]
    return leaves, list(batch[len(leaves) :])


def gradients(function, leaves):
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


@BACKEND
@pytest.mark.parametrize("dtype", slow_except({0}, DTYPES))
def test_the_operators_keep_pytorchs_rules(dtype, backend):
    leaves, rest = leaves_and_rest(random_batch(*RAGGED, dtype=dtype))
    opcheck(additive_loss.operator, (*leaves, *rest, True, backend))
    opcheck(additive_loss.operator, (*(x.detach() for x in leaves), *rest, False, backend))
    leaves, rest = leaves_and_rest(joint_batch(dtype))
    opcheck(joint_loss.operator, (*leaves, *rest, 0, True, -1.0, True, backend))
    leaves, rest = leaves_and_rest(random_arrows(*RAGGED[:2], dtype=dtype))
    opcheck(arrow_loss.operator, (*leaves, *rest, True, backend))


@BACKEND
@EVERY
def test_a_compiled_loss_has_the_same_bits(loss_function, draw, backend):
    leaves, rest = leaves_and_rest(draw(torch.float32))

    def loss(*leaves):
        return loss_function(*leaves, *rest, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(compiled, leaves), gradients(loss, leaves))


@EVERY
def test_a_compiled_loss_takes_any_lengths(loss_function, draw):
    torch.compiler.reset()
    compiled = torch.compile(loss_function, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves, rest = leaves_and_rest(draw(torch.float32))
    for size in (5, 3):  # of the batch
        fewer = [x[:size].detach().requires_grad_() for x in leaves]
        others = [x[:size] for x in rest]
        found = gradients(lambda *x, y=others: compiled(*x, *y), fewer)
        assert_same_bits(found, gradients(lambda *x, y=others: loss_function(*x, *y), fewer))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@EVERY
def test_inductor_compiles_a_loss(loss_function, draw):
    leaves, rest = leaves_and_rest(draw(torch.float32))
    torch.compiler.reset()

    def loss(*leaves):
        return loss_function(*(2 * x for x in leaves), *rest)

    found = gradients(torch.compile(loss, fullgraph=True), leaves)
    assert_close(found, gradients(loss, leaves))


WRONG = {
    "num_frames": (3, (1, 0), r"num_frames\[1\] must be between 1 and 7, not 0"),
    "labels": (2, (2, 0, 9), "labels of item 2 has label 9"),
    "transcription": (0, (2, 1, 3, nan), "transcription of item 2 has NaN"),
}


@pytest.mark.parametrize("which, change, message", WRONG.values(), ids=WRONG)
def test_a_compiled_loss_raises_the_same_sentences(which, change, message):
    batch = list(random_batch(*RAGGED))
    torch.compiler.reset()
    compiled = torch.compile(transducer_loss, fullgraph=True, backend="aot_eager")
    compiled(*batch)
    batch[which] = changed(batch[which], *change)
    with pytest.raises(ValueError, match=message):
        compiled(*batch)


@BACKEND
@EVERY
def test_torch_func_differentiates_the_losses(loss_function, draw, backend):
    leaves, rest = leaves_and_rest(draw(torch.float32))

    def loss(*leaves):
        return loss_function(*leaves, *rest, backend=backend).sum()

    places = tuple(range(len(leaves)))
    _, *expected = gradients(loss, leaves)
    found = torch.func.grad(loss, argnums=places)(*(x.detach() for x in leaves))
    assert_same_bits(found, expected)


@BACKEND
@EVERY
def test_torch_func_may_transform_what_the_loss_does_not_depend_on(loss_function, draw, backend):
    leaves, rest = leaves_and_rest(draw(torch.float32))
    expected = loss_function(*leaves, *rest, backend=backend).sum().detach()

    def scaled(x):
        return x * loss_function(*leaves, *rest, backend=backend).sum()

    assert torch.func.grad(scaled)(torch.ones(())) == expected


@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant, loss_function, draw):
    leaves, rest = leaves_and_rest(draw(torch.float32))

    def loss(*leaves):
        return loss_function(*(x * 1.5 for x in leaves), *rest)

    _, *expected = gradients(loss, leaves)
    checkpoint(loss, *leaves, use_reentrant=reentrant).sum().backward()
    assert_same_bits([x.grad for x in leaves], expected)


@EVERY
def test_autocast_changes_nothing(loss_function, draw):
    leaves, rest = leaves_and_rest(draw(torch.float32))
    expected = gradients(lambda *x: loss_function(*x, *rest), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(gradients(lambda *x: loss_function(*x, *rest), leaves), expected)


@BACKEND
@EVERY
def test_a_second_derivative_is_refused(loss_function, draw, backend):
    leaves, rest = leaves_and_rest(draw(torch.float32))
    loss = (loss_function(*leaves, *rest, backend=backend) ** 2).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


@EVERY
def test_fake_tensors_give_the_shapes(loss_function, draw):
    batch = draw(torch.bfloat16)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        loss = loss_function(*(mode.from_tensor(x) for x in batch))
    assert loss.shape == (5,) and loss.dtype == torch.float32


@BACKEND
@EVERY
def test_many_upstream_gradients_go_back_at_once(loss_function, draw, backend):
    leaves, rest = leaves_and_rest(draw(torch.float32))
    loss = loss_function(*leaves, *rest, backend=backend)
    upstream = torch.eye(len(loss))
    found = torch.autograd.grad(loss, leaves, upstream, retain_graph=True, is_grads_batched=True)
    for b, row in enumerate(upstream):
        expected = torch.autograd.grad(loss, leaves, row, retain_graph=True)
        assert_same_bits([x[b] for x in found], expected)


def test_an_untransformed_loss_goes_back_without_an_operator():
    leaves, rest = leaves_and_rest(random_batch(*RAGGED))
    loss = transducer_loss(*leaves, *rest, backend="reference").sum()
    called = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            called.append(str(function))
            return function(*arguments, **(options or {}))

    with Mode():
        torch.autograd.grad(loss, leaves)
    assert called and not any("transduce" in name for name in called)
