"""The losses and searches of the networks, against their definitions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transduce import NGram, SearchOptions, transducer_loss
from transduce.architectures import ContinuousTransducer, NetworkConfig, build_network
from transduce.data.batches import Batch, Example
from transduce.data.pairs import Origin, Pair
from transduce.lattice.consistency import lattice_symmetric_kl, symmetric_kl
from transduce.lattice.mixtures import mixture_loss

KINDS = ["transducer", "ctc", "prediction"]


def example(frames, labels):
    pair = Pair("a", (), (), Origin(Path("a.tsv"), 1))
    return Example(pair, torch.tensor(frames), torch.tensor(labels))


EXAMPLES = [example([1, 2, 3, 1, 2], [2, 1, 1]), example([3, 3], [2])]
BATCH = Batch.of(EXAMPLES)


def network_of(kind, **sizes):
    return build_network(NetworkConfig(kind, hidden_size=4, prediction_size=4, **sizes), 3, 2)


def test_a_lookahead_is_for_forward_networks_that_read_an_input():
    with pytest.raises(ValueError, match="lookahead is 2, but the network is bidirectional"):
        NetworkConfig(lookahead=2)
    with pytest.raises(ValueError, match="lookahead is for networks with an input"):
        NetworkConfig("prediction", bidirectional=False, lookahead=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequences_loss_does_not_depend_on_the_rest_of_the_batch(kind):
    network = network_of(kind)
    both = network.losses(BATCH)
    alone = [network.losses(Batch.of([one])) for one in EXAMPLES]
    assert both.shape == (2,)
    torch.testing.assert_close(both, torch.cat(alone))


def test_the_transducers_loss_is_the_transducer_loss_of_its_two_networks():
    network = network_of("transducer")
    f, num_frames = network.transcription_network(BATCH.frames, BATCH.num_frames)
    g = network.prediction_network(BATCH.labels)
    expected = transducer_loss(f, g, BATCH.labels, num_frames, BATCH.num_labels)
    assert torch.equal(network.losses(BATCH), expected)


def test_the_ctc_loss_sums_over_all_paths():
    network = network_of("ctc")
    log_prob = network(torch.tensor([[3, 3]]))[0][0].log_softmax(-1)
    paths = [(0, 2), (2, 0), (2, 2)]
    total = torch.stack([log_prob[0, a] + log_prob[1, b] for a, b in paths]).logsumexp(0)
    torch.testing.assert_close(network.losses(BATCH)[1], -total)


def test_the_next_label_predictors_loss_sums_over_its_labels():
    network = network_of("prediction")
    log_prob = network(torch.tensor([[2, 1, 1]]))[0].log_softmax(-1)
    total = log_prob[0, 1] + log_prob[1, 0] + log_prob[2, 0]
    torch.testing.assert_close(network.losses(BATCH)[0], -total)


@pytest.mark.parametrize("labels", [[1], [1, 2], [1, 1], [1, 1, 1, 2], [2, 1, 2]])
@pytest.mark.parametrize("pooling", [1, 2])
def test_ctc_can_align_exactly_the_examples_with_a_finite_loss(labels, pooling):
    network = network_of("ctc", pooling=pooling)
    for num_frames in range(1, 14):
        one = example([1] * num_frames, labels)
        loss = network.losses(Batch.of([one]))
        assert network.can_align(one) == bool(loss.isfinite().all())


@pytest.mark.parametrize("kind", ["transducer", "prediction"])
def test_the_other_networks_can_align_everything(kind):
    one = example([1], [1, 1, 2, 2])
    network = network_of(kind, pooling=2)
    assert network.can_align(one) and network.losses(Batch.of([one])).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_with_nan_weights_has_nan_losses(kind):
    network = network_of(kind)
    with torch.no_grad():
        for weights in network.parameters():
            weights.fill_(torch.nan)
    assert network.losses(BATCH).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_two_views_have_their_mean_loss_and_their_divergence(kind):
    network = network_of(kind, dropout=0.5)
    views = BATCH.repeat(2)
    torch.manual_seed(0)
    losses, _, divergence = network.consistency_losses(views)
    torch.manual_seed(0)
    one, other = network.losses(views).chunk(2)
    torch.testing.assert_close(losses, (one + other) / 2)
    torch.manual_seed(0)
    if kind == "transducer":
        f, g, num_frames = network(views.frames, views.num_frames, views.labels)
        expected = lattice_symmetric_kl(f, g, views.labels, num_frames, views.num_labels)
    elif kind == "ctc":
        expected = symmetric_kl(*network(views.frames, views.num_frames))
    else:
        expected = symmetric_kl(network(views.labels), views.num_labels)
    torch.testing.assert_close(divergence, expected)
    assert (divergence > 0).all()
    network.eval()
    losses, _, divergence = network.consistency_losses(views)
    torch.testing.assert_close(losses, network.losses(BATCH))
    torch.testing.assert_close(divergence, torch.zeros(2))


def test_two_views_with_nan_outputs_have_nan_losses_and_no_divergence():
    network = network_of("transducer")
    with torch.no_grad():
        network.prediction_network.output.bias[1] = torch.nan
    losses, _, divergence = network.consistency_losses(BATCH.repeat(2))
    assert losses.isnan().all()
    assert not divergence.any()


def test_the_networks_say_what_they_read_and_whether_they_have_timings():
    networks = [network_of(kind) for kind in KINDS]
    assert [network.kind for network in networks] == ["transducer", "CTC", "prediction"]
    assert [network.reads_input for network in networks] == [True, True, False]
    assert [network.has_timings for network in networks] == [True, False, False]


def test_ctc_gives_several_outputs_without_fusion_and_one_with_it():
    ctc = network_of("ctc")
    options = SearchOptions(4, n_best=3, with_timings=False)
    assert {len(found) for found in ctc.search(BATCH, options)} == {3}
    only = NGram(1, 2, [[2] * 50])  # expects one label
    plain = SearchOptions(4, with_timings=False)
    fused = replace(plain, fusion=only, fusion_weight=9.0)
    [alone, _], [[first], _] = ctc.search(BATCH, plain), ctc.search(BATCH, fused)
    assert set(first.labels) <= {2} and first.labels != alone[0].labels


def test_only_the_transducer_finds_timings_and_a_predictor_finds_nothing():
    transducer, ctc, predictor = (network_of(kind) for kind in KINDS)
    with torch.no_grad():
        transducer.prediction_network.output.bias[0] += 3  # outputs are short
    [found, _] = transducer.search(BATCH, SearchOptions(2))
    assert len(found[0].timings) == len(found[0].labels)
    with pytest.raises(ValueError, match="CTC has no timings"):
        ctc.search(BATCH, SearchOptions(2))
    with pytest.raises(ValueError, match="has no input to transcribe"):
        predictor.search(BATCH, SearchOptions(1, with_timings=False))


# --- The continuous transducer ------------------------------------------------------------------


def speaker(**options):
    torch.manual_seed(0)
    return ContinuousTransducer(3, 2, 4, prediction_size=4, num_components=3, **options)


def spoken(frames, num_outputs):
    draw = torch.Generator().manual_seed(num_outputs)
    return replace(example(frames, [1]), labels=torch.randn(num_outputs, 2, generator=draw))


SPOKEN = [spoken([1, 2, 3], 7), spoken([3], 2), spoken([2, 2], 0)]


def test_the_continuous_transducers_loss_is_the_mixture_loss_of_its_two_networks():
    network, batch = speaker(), Batch.of(SPOKEN)
    f, num_frames = network.transcription_network(batch.frames, batch.num_frames)
    g = network.prediction_network(batch.labels)
    vectors = (f, g, batch.labels, num_frames, batch.num_labels)
    assert torch.equal(network.losses(batch), mixture_loss(*vectors, num_components=3))


def test_a_continuous_sequences_loss_does_not_depend_on_the_rest_of_the_batch():
    network = speaker()
    alone = [network.losses(Batch.of([one])) for one in SPOKEN]
    torch.testing.assert_close(network.losses(Batch.of(SPOKEN)), torch.cat(alone))


def test_a_continuous_transducer_never_reads_padding():
    network, batch = speaker(), Batch.of(SPOKEN)
    dirty = batch.labels.clone()
    dirty[1, 2:], dirty[2] = torch.nan, torch.inf
    found = []
    for labels in (batch.labels, dirty):
        network.zero_grad()
        losses = network.losses(replace(batch, labels=labels))
        losses.sum().backward()
        found.append([losses.detach(), *(weights.grad for weights in network.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_feedback_has_noise_in_training_alone():
    network, batch = speaker(feedback_noise=0.5), Batch.of(SPOKEN)
    exact = speaker().losses(batch)
    assert torch.equal(network.eval().losses(batch), exact)
    torch.manual_seed(1)
    first, again = (network.train().losses(batch) for _ in range(2))
    assert not torch.equal(first[0], again[0])  # the noise is drawn anew
    assert first[2] == exact[2]  # there is none where no output comes before


def test_a_continuous_transducer_has_neither_search_nor_consistency():
    network = speaker()
    with pytest.raises(ValueError, match="outputs vectors, not labels"):
        network.search(Batch.of(SPOKEN), SearchOptions())
    with pytest.raises(ValueError, match="has no consistency loss"):
        network.consistency_losses(Batch.of(SPOKEN).repeat(2))


def test_losses_of_numbers_that_are_not_finite_are_nan():
    network = speaker()
    with torch.no_grad():
        network.prediction_network.output.bias[0] = torch.inf
    assert network.losses(Batch.of(SPOKEN)).isnan().all()
