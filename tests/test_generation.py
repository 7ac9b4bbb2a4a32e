"""Generation of continuous outputs: medians and means, samples, and the bound."""

import math

import pytest
import torch
from torch.testing import assert_close

from transduce.architectures import ContinuousTransducer
from transduce.decoding.generation import GenerationOptions, generate
from transduce.lattice.mixtures import mixture_at, mixture_of

D, M = 2, 2
MEANS = GenerationOptions(temperature=0.0)


def network_of(num_symbols=3, **options):
    return ContinuousTransducer(num_symbols, D, 4, prediction_size=4, num_components=M, **options)


def planted(num_symbols=3, null=0.0, logits=(0.0, 0.0), means=(0.0,) * 4, precision=0.0):
    """Return a network whose g is constant and whose f is zero."""
    torch.manual_seed(0)
    network = network_of(num_symbols, product_rank=0)
    with torch.no_grad():
        for part in (network.transcription_network, network.prediction_network):
            part.output.weight.zero_()
            part.output.bias.zero_()
        wanted = [null, *logits, *means, *[precision] * (M * D)]
        network.prediction_network.output.bias.copy_(torch.tensor(wanted))
    return network


def batch(*lengths):
    num_frames = torch.tensor(lengths)
    return torch.ones(len(lengths), max(lengths), dtype=torch.int64), num_frames


def logit(probability):
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize("probability, outputs", [(0.6, 0), (0.4, 1), (0.2, 3), (0.1, 6)])
def test_the_number_of_outputs_at_an_input_is_their_median(probability, outputs):
    # The median of a geometric distribution: the smallest n with (1 - p)^(n + 1) below one half.
    assert (1 - probability) ** (outputs + 1) < 0.5 <= (1 - probability) ** outputs
    for found, length in zip(
        generate(planted(null=logit(probability)), *batch(3, 1), MEANS), (3, 1), strict=True
    ):
        assert found.inputs == tuple(t for t in range(length) for _ in range(outputs))
        assert found.outputs.shape == (length * outputs, D)


def test_an_output_is_the_mean_of_the_most_probable_component():
    network = planted(null=logit(0.4), logits=(1.0, 2.0), means=(1.0, 2.0, 3.0, 4.0))
    [found] = generate(network, *batch(2), MEANS)
    assert_close(found.outputs, torch.tensor([[3.0, 4.0]] * 2))


def test_each_output_is_read_before_the_next():
    torch.manual_seed(1)
    network = network_of(product_rank=3).eval()
    frames, num_frames = batch(4, 2)
    for found, ids, length in zip(
        generate(network, frames, num_frames, MEANS), frames, (4, 2), strict=True
    ):
        f, g, _ = network(ids[None, :length], torch.tensor([length]), found.outputs[None])
        for u, (t, vector) in enumerate(zip(found.inputs, found.outputs, strict=True)):
            node = mixture_at(*(mixture_of(x, M, D) for x in (f[0, t], g[0, u])))
            assert_close(vector, node.means[node.logits[1:].argmax()].detach())


def test_samples_have_the_probabilities_of_the_model():
    null, share, count = 0.25, 0.8, 1500
    network = planted(
        null=logit(null), logits=(0.0, logit(share)), means=(-9.0, -9.0, 9.0, 9.0), precision=1.0
    )
    [found] = generate(network, *batch(count), GenerationOptions(1.0, "drawn"))
    outputs = found.outputs
    assert len(outputs) / count == pytest.approx((1 - null) / null, rel=0.1)
    lengths = torch.bincount(torch.tensor(found.inputs), minlength=count)
    assert (lengths == 0).float().mean() == pytest.approx(null, rel=0.1)
    is_second = outputs[:, 0] > 0
    assert_close(is_second.float().mean(), torch.tensor(share), rtol=0.05, atol=0)
    # 0 and 1, each bounded by softplus: 2 c - softplus(c) - softplus(c - 1)
    c = -math.log(0.1)
    log_precision = 2 * c - math.log1p(math.exp(c)) - math.log1p(math.exp(c - 1))
    deviation = math.exp(-log_precision / 2)
    assert_close(outputs[is_second].std(), torch.tensor(deviation), rtol=0.03, atol=0)


@pytest.mark.slow
def test_a_lower_temperature_scales_the_deviations_and_sharpens_the_weights():
    network = planted(null=logit(0.1), logits=(0.0, 1.0), means=(-9.0, -9.0, 9.0, 9.0))
    one, half = (
        generate(network, *batch(300), GenerationOptions(t, "drawn"))[0].outputs for t in (1.0, 0.5)
    )
    shares = [(x[:, 0] > 0).float().mean() for x in (one, half)]
    assert_close(shares[0], torch.tensor(1.0).sigmoid(), rtol=0.05, atol=0)
    assert_close(shares[1], torch.tensor(2.0).sigmoid(), rtol=0.05, atol=0)
    deviations = [x[x[:, 0] > 0].std() for x in (one, half)]
    assert_close(deviations[1], deviations[0] / 2, rtol=0.05, atol=0)


def test_a_seed_gives_the_same_outputs_again_whatever_else_is_in_the_batch():
    network = planted(null=logit(0.1))
    first, again, other, alone = (
        generate(network, *batch(*lengths), GenerationOptions(1.0, "drawn", seed=seed))
        for seed, lengths in ((7, (3, 2)), (7, (3, 2)), (8, (3, 2)), (7, (2,)))
    )
    assert all(torch.equal(a.outputs, b.outputs) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].outputs[:1], other[0].outputs[:1])
    assert first[1].inputs == alone[0].inputs
    assert_close(first[1].outputs, alone[0].outputs)


@pytest.mark.parametrize("durations", ["median", "drawn"])
def test_the_bound_ends_the_outputs_of_each_input_and_says_so(durations):
    options = GenerationOptions(0.5, durations, max_outputs_per_input=4)
    with pytest.warns(UserWarning, match="max_outputs_per_input 4 ended the outputs at 3 inputs"):
        found = generate(planted(null=-50.0), *batch(2, 1), options)
    assert [one.inputs for one in found] == [(0,) * 4 + (1,) * 4, (0,) * 4]


def test_a_network_in_training_generates_as_in_use_and_stays_in_training():
    network = network_of(dropout=0.9)
    network.train()
    first, again = (generate(network, *batch(3)) for _ in range(2))
    assert torch.equal(first[0].outputs, again[0].outputs)
    assert network.training and network.prediction_network.training


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"temperature": -1.0}, "temperature must be at least"),
        ({"max_outputs_per_input": 0}, "max_outputs_per_input must be at least"),
        ({"durations": "long"}, "durations must be median or drawn, not 'long'"),
    ],
)
def test_a_wrong_option_is_named(options, problem):
    with pytest.raises(ValueError, match=problem):
        GenerationOptions(**options)
