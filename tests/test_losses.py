"""The losses of the three networks, against what they mean."""

from pathlib import Path

import pytest
import torch
from transduce.model.losses import consistent_losses, ctc_can_align, sequence_losses

from transduce import transducer_loss
from transduce.architectures import NetworkConfig, build_network
from transduce.data.batches import Batch, Example
from transduce.data.pairs import Origin, Pair
from transduce.lattice.consistency import disagreement, lattice_disagreement


def example(frames, labels):
    pair = Pair("a", (), (), Origin(Path("a.tsv"), 1))
    return Example(pair, torch.tensor(frames), torch.tensor(labels))


BATCH = Batch.of([example([1, 2, 3, 1, 2], [2, 1, 1]), example([3, 3], [2])])


def network_of(kind, **sizes):
    config = NetworkConfig(kind, hidden_size=4, prediction_size=4, **sizes)
    return build_network(config, 3, 2), config


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_a_sequences_loss_does_not_depend_on_what_is_beside_it(kind):
    network, config = network_of(kind)
    both = sequence_losses(network, config, BATCH)
    alone = [
        sequence_losses(network, config, Batch.of([one]))
        for one in (example([1, 2, 3, 1, 2], [2, 1, 1]), example([3, 3], [2]))
    ]
    assert both.shape == (2,)
    torch.testing.assert_close(both, torch.cat(alone))


def test_the_transducers_is_the_transducer_loss_of_its_two_networks():
    network, config = network_of("transducer")
    f, num_frames = network.transcription_network(BATCH.frames, BATCH.num_frames)
    g = network.prediction_network(BATCH.labels)
    expected = transducer_loss(f, g, BATCH.labels, num_frames, BATCH.num_labels)
    assert torch.equal(sequence_losses(network, config, BATCH), expected)


def test_ctcs_is_the_sum_over_all_paths():
    network, config = network_of("ctc")
    log_prob = network(torch.tensor([[3, 3]]))[0][0].log_softmax(-1)
    paths = [(0, 2), (2, 0), (2, 2)]
    total = torch.stack([log_prob[0, a] + log_prob[1, b] for a, b in paths]).logsumexp(0)
    torch.testing.assert_close(sequence_losses(network, config, BATCH)[1], -total)


def test_the_prediction_networks_is_the_sum_over_its_labels():
    network, config = network_of("prediction")
    log_prob = network(torch.tensor([[2, 1, 1]]))[0].log_softmax(-1)
    total = log_prob[0, 1] + log_prob[1, 0] + log_prob[2, 0]
    torch.testing.assert_close(sequence_losses(network, config, BATCH)[0], -total)


@pytest.mark.parametrize("labels", [[1], [1, 2], [1, 1], [1, 1, 1, 2], [2, 1, 2]])
@pytest.mark.parametrize("pooling", [1, 2])
def test_ctc_can_align_exactly_what_has_a_finite_loss(labels, pooling):
    network, config = network_of("ctc", pooling=pooling)
    for num_frames in range(1, 14):
        one = example([1] * num_frames, labels)
        loss = sequence_losses(network, config, Batch.of([one]))
        assert ctc_can_align(one, pooling) == bool(loss.isfinite().all())


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_a_network_that_has_come_to_give_no_numbers_has_nan(kind):
    network, config = network_of(kind)
    with torch.no_grad():
        for weights in network.parameters():
            weights.fill_(torch.nan)
    assert sequence_losses(network, config, BATCH).isnan().all()


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_what_is_seen_twice_has_its_mean_loss_and_its_disagreement(kind):
    network, config = network_of(kind, dropout=0.5)
    views = BATCH.repeat(2)
    torch.manual_seed(0)
    losses, apart = consistent_losses(network, config, views)
    torch.manual_seed(0)
    one, other = sequence_losses(network, config, views).chunk(2)
    torch.testing.assert_close(losses, (one + other) / 2)
    torch.manual_seed(0)
    if kind == "transducer":
        f, g, num_frames = network(views.frames, views.num_frames, views.labels)
        expected = lattice_disagreement(f, g, views.labels, num_frames, views.num_labels)
    elif kind == "ctc":
        expected = disagreement(*network(views.frames, views.num_frames))
    else:
        expected = disagreement(network(views.labels), views.num_labels)
    torch.testing.assert_close(apart, expected)
    assert (apart > 0).all()
    network.eval()
    losses, apart = consistent_losses(network, config, views)
    torch.testing.assert_close(losses, sequence_losses(network, config, BATCH))
    torch.testing.assert_close(apart, torch.zeros(2))


def test_a_network_that_says_no_numbers_has_no_loss_seen_twice_either():
    network, config = network_of("transducer")
    with torch.no_grad():
        network.prediction_network.output.bias[1] = torch.nan
    losses, apart = consistent_losses(network, config, BATCH.repeat(2))
    assert losses.isnan().all()
    assert not apart.any()
