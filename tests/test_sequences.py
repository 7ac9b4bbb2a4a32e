"""Operations on padded sequences."""

import torch

from transduce.sequences import reverse_padded, zero_padding


def test_each_sequence_is_reversed_and_its_padding_stays():
    ids = torch.tensor([[1, 2, 3, 9], [1, 2, 3, 4], [8, 9, 9, 9], [7, 9, 9, 9]])
    found = reverse_padded(ids, torch.tensor([3, 4, 0, 1]))
    assert found.tolist() == [[3, 2, 1, 9], [4, 3, 2, 1], [8, 9, 9, 9], [7, 9, 9, 9]]


def test_reversing_twice_restores_vectors_of_any_shape():
    x, lengths = torch.randn(3, 5, 2, 4), torch.tensor([5, 2, 0])
    reversed_once = reverse_padded(x, lengths)
    assert torch.equal(reversed_once[0], x[0].flip(0))
    assert torch.equal(reverse_padded(reversed_once, lengths), x)


def test_padding_becomes_zero_whatever_it_was():
    x, lengths = torch.full((2, 3, 2), torch.nan), torch.tensor([3, 1])
    x[0], x[1, :1] = 1.0, 2.0
    x.requires_grad_()
    found = zero_padding(x, lengths)
    assert found.tolist() == [[[1.0, 1.0]] * 3, [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]]
    found.sum().backward()
    assert x.grad.tolist() == [[[1.0, 1.0]] * 3, [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]
