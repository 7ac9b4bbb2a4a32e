"""Weight noise, averaged weights (EMA), and SpecAugment."""

from pathlib import Path

import pytest
import torch

from transduce.data.batches import Batch, Example
from transduce.data.pairs import Origin, Pair
from transduce.training.recipe import SpecAugment
from transduce.training.regularisation import MovingAverage, spec_augment, weight_noise


def test_noise_is_added_and_the_weights_are_restored_exactly():
    weights = [torch.randn(300, 200, requires_grad=True), torch.randn(7, requires_grad=True)]
    before = [tensor.detach().clone() for tensor in weights]
    generator = torch.Generator().manual_seed(0)
    with weight_noise(weights, 0.075, generator):
        noise = (weights[0] - before[0]).detach()
        assert not torch.equal(weights[1], before[1])
    assert noise.std().item() == pytest.approx(0.075, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    with weight_noise(weights, 0.075, generator):
        assert not torch.equal((weights[0] - before[0]).detach(), noise)  # new noise
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_noise_is_removed_after_an_error():
    weights = [torch.zeros(3)]
    with pytest.raises(KeyError), weight_noise(weights, 1.0, torch.Generator()):
        raise KeyError
    assert weights[0].tolist() == [0, 0, 0]


def test_a_deviation_of_zero_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    with weight_noise([torch.zeros(3)], 0.0, generator):
        assert torch.equal(generator.get_state(), state)


def batch_of(lengths, size=8):
    pair = Pair("a", (), (), Origin(Path("a.tsv"), 1))
    return Batch.of([Example(pair, torch.ones(T, size), torch.ones(1).long()) for T in lengths])


def test_time_masks_are_bands_within_the_width_and_the_share():
    torch.manual_seed(0)
    batch = batch_of([100] * 200 + [10] * 200)
    frames = spec_augment(batch, SpecAugment(time_masks=1, time_width=25, time_share=0.2)).frames
    gone = (frames == 0).all(2) & (batch.frames == 1).all(2)
    assert ((frames == 0).any(2) & (batch.frames == 1).all(2)).equal(gone)  # whole frames
    widths = gone.sum(1)
    assert widths[:200].max() == 20 and widths[200:].max() == 2
    assert widths.min() == 0
    edges = (gone[:, 1:] != gone[:, :-1]).sum(1)
    assert edges.max() <= 2  # one band each
    assert gone[:200].any(0).all()  # at any place


def test_frequency_masks_are_the_same_in_every_frame():
    torch.manual_seed(0)
    batch = batch_of([9] * 300)
    frames = spec_augment(batch, SpecAugment(frequency_masks=1, frequency_width=3)).frames
    gone = frames[:, 0] == 0
    assert (frames == 0).equal(gone[:, None].expand(-1, 9, -1))
    assert gone.sum(1).max() == 3 and gone.any(0).all()


def test_text_is_not_masked_and_the_default_settings_change_nothing():
    batch = batch_of([5, 3])
    assert spec_augment(batch, SpecAugment()).frames.equal(batch.frames)
    ids = Batch(batch.pairs, torch.ones(2, 5).long(), *[batch.num_frames] * 3)
    settings = SpecAugment(time_masks=9, time_stretch=0.5, frequency_stretch=0.5)
    assert spec_augment(ids, settings) is ids


def ramps(lengths, size=8):
    """Return frames whose numbers tell their place: 10 b + t + d/10 in item b, frame t."""
    pair = Pair("a", (), (), Origin(Path("a.tsv"), 1))
    return Batch.of(
        [
            Example(
                pair,
                10.0 * b + torch.arange(T)[:, None] + torch.arange(size) / 10,
                torch.ones(1).long(),
            )
            for b, T in enumerate(lengths)
        ]
    )


def test_an_utterance_is_stretched_from_its_first_frame_to_its_last():
    torch.manual_seed(0)
    lengths = [50] * 40 + [1, 2, 7]
    batch = ramps(lengths)
    stretched = spec_augment(batch, SpecAugment(time_stretch=0.3))
    assert stretched.frames.shape[1] == stretched.num_frames.max()
    after = stretched.num_frames[:40].float()
    assert 35 <= after.min() < 40 and 60 < after.max() <= 65
    for b, (before, T) in enumerate(zip(lengths, stretched.num_frames.tolist(), strict=True)):
        last = before - 1 if T > 1 else 0
        expected = 10.0 * b + torch.linspace(0, last, T)[:, None] + torch.arange(8) / 10
        torch.testing.assert_close(stretched.frames[b, :T], expected, rtol=0, atol=0.01)
        assert (stretched.frames[b, T:] == 0).all()


def test_a_spectrum_is_stretched_from_its_lowest_coefficient():
    torch.manual_seed(0)
    batch = ramps([4] * 200, size=11)
    frames = spec_augment(batch, SpecAugment(frequency_stretch=0.2)).frames
    coefficients = (frames - batch.frames[:, :, :1]) * 10  # the source of each
    factor = coefficients[:, 0, 1]
    assert 0.8 <= factor.min() < 0.82 and 1.18 < factor.max() <= 1.21
    expected = (factor[:, None] * torch.arange(11)).clamp(max=10)
    torch.testing.assert_close(coefficients, expected[:, None].expand(-1, 4, -1), rtol=0, atol=0.05)


def test_copies_are_stretched_alike_and_have_different_masks():
    batch = batch_of([30, 20])
    torch.manual_seed(0)
    views = spec_augment(batch, SpecAugment(time_masks=1, time_stretch=0.3), copies=2)
    assert views.pairs == batch.pairs * 2
    assert torch.equal(*views.num_frames.chunk(2))
    assert not torch.equal(views.num_frames[:2], batch.num_frames)
    assert torch.equal(*views.labels.chunk(2))
    one, other = views.frames.chunk(2)
    assert not torch.equal(one, other)
    kept = (one != 0) & (other != 0)
    assert torch.equal(one[kept], other[kept])


def test_copies_of_text_are_equal():
    text = Batch.of(
        [Example(Pair("a", (), (), Origin(Path("a.tsv"))), torch.tensor([1, 2]), torch.tensor([3]))]
    )
    views = spec_augment(text, SpecAugment(time_masks=1), copies=2)
    assert views.frames.tolist() == [[1, 2], [1, 2]]
    assert views.num_labels.tolist() == [1, 1]


def test_the_average_is_exponential_over_the_steps():
    weight = torch.zeros(3)
    average = MovingAverage([weight], 0.9)
    seen = []
    for step in range(1, 200):
        weight += torch.randn(3)
        average.update(step)
        seen.append(weight.clone())
    expected = sum(0.1 * 0.9 ** (198 - i) * one for i, one in enumerate(seen))
    torch.testing.assert_close(average.tensors[0], expected, rtol=1e-3, atol=1e-4)
    with average.in_place():
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(weight, seen[-1])


def test_the_initial_weights_are_soon_forgotten():
    weight = torch.full((2,), 5.0)
    average = MovingAverage([weight], 0.999)
    weight.zero_()
    for step in range(1, 41):
        average.update(step)
    assert average.tensors[0].max() < 1e-3


def test_a_decay_of_zero_keeps_the_weights_themselves():
    weight = torch.randn(50)
    average = MovingAverage([weight], 0.0)
    weight += torch.randn(50)
    average.update(7)
    assert torch.equal(average.tensors[0], weight)
