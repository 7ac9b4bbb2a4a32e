"""The symmetric KL divergences, against the sums over nodes and frames that define them."""

import pytest
import torch
from hypothesis import given
from lattices import ANY_SHAPE, SHAPES, random_batch, twice

from transduce.lattice import reference
from transduce.lattice.consistency import lattice_symmetric_kl, symmetric_kl


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def by_nodes(f, g, labels, num_frames, num_labels):
    """Sum the divergences node by node; the distribution that is learnt from is a constant."""
    B = len(labels) // 2
    sums = []
    for b in range(B):
        T, U = int(num_frames[b]), int(num_labels[b])
        nodes = [reference.output_distribution(f[i, :T], g[i, : U + 1]) for i in (b, b + B)]
        arrows = [reference.transitions(node.detach(), labels[b, :U], null=0) for node in nodes]
        occupancy = sum(reference.log_occupancy(*pair).exp() for pair in arrows) / 2
        one, other = nodes
        apart = (kl(other.detach(), one) + kl(one.detach(), other)) / 2
        sums.append((occupancy * apart).sum())
    return torch.stack(sums)


def assert_as_by_nodes(arguments, tolerance=1e-9):
    found, expected = lattice_symmetric_kl(*arguments), by_nodes(*arguments)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weights = torch.arange(1, len(found) + 1, dtype=found.dtype)
    vectors = arguments[:2]
    for ours, theirs in zip(
        torch.autograd.grad(weights @ found, vectors),
        torch.autograd.grad(weights @ expected, vectors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "a long lattice"])
def test_it_is_the_mean_divergence_at_the_nodes_that_alignments_pass(name):
    one, other = (random_batch(*SHAPES[name], padding=1, seed=seed) for seed in (0, 1))
    assert_as_by_nodes(twice(one, other))


@given(ANY_SHAPE)
def test_it_is_so_of_any_batch(shape):
    one = random_batch(**shape)
    other = random_batch(**(shape | {"seed": shape["seed"] + 100}))
    assert_as_by_nodes(twice(one, other))


def test_what_agrees_does_not_disagree_and_pulls_nowhere():
    one = random_batch(*SHAPES["ragged"])
    arguments = twice(one, one)
    apart = lattice_symmetric_kl(*arguments)
    assert torch.equal(apart, torch.zeros_like(apart))
    for gradient in torch.autograd.grad(apart.sum(), arguments[:2]):
        assert not gradient.any()


def test_padding_is_not_read():
    one, other = (random_batch(*SHAPES["ragged"], seed=seed) for seed in (0, 1))
    padded = []
    for batch in (one, other):
        f, g = batch.transcription.clone(), batch.prediction.clone()
        for b, (T, U) in enumerate(zip(batch.num_frames, batch.num_labels, strict=True)):
            f[b, T:] = 50.0 * torch.randn_like(f[b, T:])
            g[b, U + 1 :] = 50.0 * torch.randn_like(g[b, U + 1 :])
        padded.append(batch._replace(transcription=f, prediction=g))
    found = lattice_symmetric_kl(*twice(*padded))
    torch.testing.assert_close(found, lattice_symmetric_kl(*twice(one, other)))


def test_in_half_of_the_bits_it_is_a_number_of_float32():
    one, other = (random_batch(*SHAPES["ragged"], seed=seed) for seed in (0, 1))
    arguments = twice(one, other, torch.bfloat16)
    found = lattice_symmetric_kl(*arguments)
    assert found.dtype == torch.float32
    exact = lattice_symmetric_kl(*twice(one, other))
    torch.testing.assert_close(found.double(), exact, rtol=0.03, atol=0.03)


def test_autocast_changes_nothing():
    one, other = (random_batch(*SHAPES["ragged"], seed=seed) for seed in (0, 1))
    arguments = twice(one, other, torch.float32)
    expected = lattice_symmetric_kl(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lattice_symmetric_kl(*arguments), expected)


def test_networks_that_say_the_opposite_give_no_nan():
    """Densities underflow: f and g put all their weight on different labels."""
    one, other = (random_batch(*SHAPES["ragged"], scale=200.0, seed=seed) for seed in (0, 1))
    arguments = twice(one, other, torch.float32)
    found = lattice_symmetric_kl(*arguments)
    assert found.isfinite().all()
    for gradient in torch.autograd.grad(found.sum(), arguments[:2]):
        assert gradient.isfinite().all()


def test_of_single_outputs_it_is_the_mean_divergence_within_the_length():
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 5, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([5, 2, 5, 2])
    one, other = outputs.log_softmax(-1).chunk(2)
    apart = (kl(other.detach(), one) + kl(one.detach(), other)) / 2
    expected = torch.stack([apart[0].sum(), apart[1, :2].sum()])
    found = symmetric_kl(outputs, lengths)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x[0] + 3 * x[1], outputs)[0] for x in (found, expected))
    )
