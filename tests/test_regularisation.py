"""Noise on weights, masks on frames."""

from pathlib import Path

import pytest
import torch

from transduce.data.batches import Batch, Example
from transduce.data.pairs import Origin, Pair
from transduce.recipe import SpecAugment
from transduce.regularisation import spec_augment, weight_noise


def test_noise_is_added_and_removed_to_the_last_bit():
    weights = [torch.randn(300, 200, requires_grad=True), torch.randn(7, requires_grad=True)]
    before = [tensor.detach().clone() for tensor in weights]
    generator = torch.Generator().manual_seed(0)
    with weight_noise(weights, 0.075, generator):
        noise = (weights[0] - before[0]).detach()
        assert not torch.equal(weights[1], before[1])
    assert noise.std().item() == pytest.approx(0.075, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    with weight_noise(weights, 0.075, generator):
        assert not torch.equal((weights[0] - before[0]).detach(), noise)  # drawn anew
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_noise_is_removed_when_something_fails():
    weights = [torch.zeros(3)]
    with pytest.raises(KeyError), weight_noise(weights, 1.0, torch.Generator()):
        raise KeyError
    assert weights[0].tolist() == [0, 0, 0]


def test_no_noise_is_no_draw():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    with weight_noise([torch.zeros(3)], 0.0, generator):
        assert torch.equal(generator.get_state(), state)


def batch_of(lengths, size=8):
    pair = Pair("a", (), (), Origin(Path("a.tsv"), 1))
    return Batch.of([Example(pair, torch.ones(T, size), torch.ones(1).long()) for T in lengths])


def test_masks_in_time_are_bands_no_wider_than_allowed():
    torch.manual_seed(0)
    batch = batch_of([100] * 200 + [10] * 200)
    frames = spec_augment(batch, SpecAugment(time_masks=1, time_width=25, time_share=0.2))
    gone = (frames == 0).all(2) & (batch.frames == 1).all(2)
    assert ((frames == 0).any(2) & (batch.frames == 1).all(2)).equal(gone)  # whole frames
    widths = gone.sum(1)
    assert widths[:200].max() == 20 and widths[200:].max() == 2
    assert widths.min() == 0
    edges = (gone[:, 1:] != gone[:, :-1]).sum(1)
    assert edges.max() <= 2  # one band each
    assert gone[:200].any(0).all()  # anywhere


def test_masks_in_frequency_are_the_same_in_every_frame():
    torch.manual_seed(0)
    batch = batch_of([9] * 300)
    frames = spec_augment(batch, SpecAugment(frequency_masks=1, frequency_width=3))
    gone = frames[:, 0] == 0
    assert (frames == 0).equal(gone[:, None].expand(-1, 9, -1))
    assert gone.sum(1).max() == 3 and gone.any(0).all()


def test_text_and_settings_of_nothing_leave_all_as_it_is():
    batch = batch_of([5, 3])
    assert spec_augment(batch, SpecAugment()).equal(batch.frames)
    ids = Batch(batch.pairs, torch.ones(2, 5).long(), *[batch.num_frames] * 3)
    assert spec_augment(ids, SpecAugment(time_masks=9)) is ids.frames
