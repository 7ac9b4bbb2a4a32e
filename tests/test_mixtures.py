"""mixture_loss: continuous outputs, held against loops and against all alignments."""

import math
from typing import NamedTuple

import pytest
import torch
from lattices import ALL_BACKENDS, RAGGED, alignments, changed, loss_and_gradients, path_score
from torch import Tensor
from torch.testing import assert_close

from transduce.lattice import reference
from transduce.lattice.mixtures import (
    SMALLEST_DEVIATION,
    mixture_loss,
    mixture_of,
    mixture_transitions,
    num_parameters,
)

pytestmark = pytest.mark.usefixtures("empty_is_nan")
DOUBLE = torch.float64


class Batch(NamedTuple):
    """The arguments of mixture_loss."""

    transcription: Tensor
    prediction: Tensor
    outputs: Tensor
    num_frames: Tensor
    num_outputs: Tensor


def random_batch(
    num_frames, num_outputs, M=2, D=3, R=2, *, dtype=DOUBLE, scale=1.0, padding=0, seed=0
):
    """Draw utterances of these lengths, each with at least so much padding."""
    draw = torch.Generator().manual_seed(seed)
    B, T, U = len(num_frames), max(num_frames) + padding, max(num_outputs) + padding
    shapes = [(B, T, num_parameters(M, R, D)), (B, U + 1, num_parameters(M, R, D)), (B, U, D)]
    f, g, y = (scale * torch.randn(shape, generator=draw, dtype=DOUBLE) for shape in shapes)
    return Batch(*(x.to(dtype) for x in (f, g, y)), *map(torch.tensor, (num_frames, num_outputs)))


def by_loops(f, g, y, M=2):
    return reference.mixture_transitions(f, g, y, M, SMALLEST_DEVIATION)


def loss_of(*batch, M=2, backend="auto"):
    return mixture_loss(*batch, num_components=M, backend=backend)


# --- What it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("M, D, R", [(1, 1, 0), (1, 4, 1), (3, 1, 3), (4, 5, 2), (2, 3, 0)])
def test_the_arrows_are_those_of_the_loops(M, D, R):
    f, g, y, *_ = random_batch([4], [5], M, D, R)
    expected = by_loops(f[0], g[0], y[0], M)
    for ours, theirs in zip(mixture_transitions(f, g, y, M), expected, strict=True):
        assert_close(ours[0], theirs)


def test_gradients_of_the_arrows_are_those_of_the_loops():
    ours, theirs = ([x.requires_grad_() for x in random_batch([3], [4])[:3]] for _ in range(2))
    weights = [torch.randn(shape, dtype=DOUBLE) for shape in [(3, 5), (3, 4)]]
    for arrows in (
        [x[0] for x in mixture_transitions(*ours, 2)],
        by_loops(*(x[0] for x in theirs)),
    ):
        sum((w * x).sum() for w, x in zip(weights, arrows, strict=True)).backward()
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("T, U", [(1, 0), (1, 3), (4, 1), (3, 3), (2, 6)])
def test_the_loss_sums_the_densities_of_all_alignments(T, U, backend):
    batch = random_batch([T], [U])
    loss, *gradients = loss_and_gradients(loss_of, batch, backend)
    leaves = [x[0].clone().requires_grad_() for x in batch[:3]]
    arrows = by_loops(*leaves)
    paths = torch.stack([path_score(a, *arrows) for a in alignments(T, U)])
    assert len(paths) == math.comb(T + U - 1, U)
    evidence = paths.logsumexp(0)
    assert_close(loss[0], -evidence.detach())
    expected = torch.autograd.grad(-evidence, leaves, allow_unused=True)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours[0], torch.zeros_like(ours[0]) if theirs is None else theirs)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradients_pass_gradcheck(backend):
    f, g, y, *lengths = random_batch([3, 2, 1], [2, 3, 0], padding=1)
    numbers = [x.requires_grad_() for x in (f, g, y)]
    assert torch.autograd.gradcheck(lambda *x: loss_of(*x, *lengths, backend=backend), numbers)


def test_the_density_of_an_output_integrates_to_one_less_the_probability_of_null():
    f, g, *_ = random_batch([1], [1], M=3, D=1)
    grid = torch.linspace(-40, 40, 20_001, dtype=DOUBLE)
    points = len(grid)
    log_null, log_label = mixture_transitions(
        f.expand(points, -1, -1), g.expand(points, -1, -1), grid[:, None, None], 3
    )
    area = torch.trapezoid(log_label[:, 0, 0].exp(), grid)
    assert_close(area, 1 - log_null[0, 0, 0].exp())


def test_in_float32_it_is_as_exact_as_its_numbers():
    batch = random_batch(*RAGGED[:2], M=4, D=40)
    single = Batch(*(x.float() if x.is_floating_point() else x for x in batch))
    exact = Batch(*(x.double() if x.is_floating_point() else x for x in single))
    found, truth = (loss_and_gradients(loss_of, one, "cpu", M=4) for one in (single, exact))
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


# --- Bounds -------------------------------------------------------------------------------------


def test_no_deviation_is_below_the_bound():
    f, g = (mixture_of(torch.full((4,), x), 1, 1) for x in (1e30, 50.0))
    deviation = (-(f.log_precisions + g.log_precisions) / 2).exp()
    assert_close(deviation, torch.full_like(deviation, SMALLEST_DEVIATION))
    f, g = (mixture_of(torch.full((4,), x), 1, 1) for x in (-4.0, -5.0))
    assert_close(f.log_precisions + g.log_precisions, torch.tensor([[-9.0]]), atol=0.01, rtol=0)


def test_the_loss_of_likely_outputs_is_negative_and_bounded():
    f, g, y, *lengths = random_batch([1], [3], M=1, D=2, R=0)
    certain = torch.tensor([-50.0, 0, 0, 0, 50, 50], dtype=DOUBLE)
    g = torch.cat([certain.expand(3, -1), -certain[None]])[None]
    f, y = torch.zeros(1, 1, 6, dtype=DOUBLE), torch.zeros_like(y)
    f[..., 4:] = 50.0
    peak = 2 * -math.log(SMALLEST_DEVIATION * math.sqrt(2 * math.pi))
    assert_close(loss_of(f, g, y, *lengths, M=1), torch.tensor([-3 * peak], dtype=DOUBLE))


@pytest.mark.parametrize("size", [1e3, 1e10, 1e30])
def test_parameters_of_any_size_give_no_nan(size):
    batch = random_batch(*RAGGED[:2], dtype=torch.float32)
    huge = Batch(size * batch.transcription, size * batch.prediction, *batch[2:])
    loss, *gradients = loss_and_gradients(loss_of, huge, "cpu")
    assert not loss.isnan().any()
    assert not any(x.isnan().any() for x in gradients)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_padding_is_never_read(value):
    batch = random_batch(*RAGGED[:2], padding=2)
    filled = [x.clone() for x in batch[:3]]
    for b, (T, U) in enumerate(zip(*(n.tolist() for n in batch[3:]), strict=True)):
        for x, length in zip(filled, (T, U + 1, U), strict=True):
            x[b, length:] = value
    clean = loss_and_gradients(loss_of, batch, "cpu")
    dirty = loss_and_gradients(loss_of, Batch(*filled, *batch[3:]), "cpu")
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, change, sentence",
    [
        ("transcription", lambda x: x[0], r"transcription must be \[B, T, P\]"),
        ("prediction", lambda x: x[..., :-1], "P = 21 as in transcription"),
        ("outputs", lambda x: x[:, 1:], r"outputs must be \[B, U, D\] = \[5, 5, D\]"),
        ("outputs", lambda x: x[..., :-1], r"\(1 \+ R\) \+ 2 M D = 3 \(1 \+ R\) \+ 8"),
        ("outputs", lambda x: x.float(), "must have one type"),
        ("num_frames", lambda x: x.double(), "num_frames must be integers"),
        ("num_outputs", lambda x: x[:-1], r"num_outputs must be \[B\] = \[5\]"),
        ("num_outputs", lambda x: changed(x, 0, 9), r"between 0 and 5, not 9"),
    ],
)
def test_a_wrong_argument_is_named(field, change, sentence):
    batch = random_batch(*RAGGED[:2])
    wrong = batch._replace(**{field: change(getattr(batch, field))})
    with pytest.raises(ValueError, match=sentence):
        loss_of(*wrong)


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_components must be at least 1, not 0"):
        loss_of(*random_batch([1], [1]), M=0)
