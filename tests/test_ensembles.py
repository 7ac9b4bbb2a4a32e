"""Ensembles: the average at every node of the lattice, computed as one transducer."""

import pytest
import torch
from torch.testing import assert_close

from transduce import Transducer, beam_search, ensemble, greedy_search, transducer_loss
from transduce.ctc import ctc_best_path
from transduce.ensembles import mean_prediction
from transduce.networks import PredictionNetwork, TranscriptionNetwork

K = 4
# Members may differ in size, depth and direction; their prediction networks have equal depth.
SIZES = [
    dict(hidden_size=5, prediction_size=3),
    dict(hidden_size=8, num_layers=2, prediction_size=20),
    dict(hidden_size=3, bidirectional=False, prediction_size=7),
]


def member(seed=0, prediction_layers=1, scale=10.0, **sizes):
    """Weights large enough for the distributions to differ from node to node; null is likely."""
    torch.manual_seed(seed)
    model = Transducer(6, K, prediction_layers=prediction_layers, **sizes).double().eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(scale)
        model.prediction_network.output.bias[0] += 3
    return model


def members(prediction_layers=1, **common):
    return [member(seed, prediction_layers, **sizes, **common) for seed, sizes in enumerate(SIZES)]


@pytest.mark.parametrize("prediction_layers", [1, 2, 3])
@pytest.mark.parametrize("pooling", [1, 2])
def test_every_node_has_the_renormalised_average_of_the_members(prediction_layers, pooling):
    models = members(prediction_layers, pooling=pooling)
    frames, num_frames = torch.randn(2, 5, 6).double(), torch.tensor([5, 3])
    labels = torch.randint(1, K + 1, (2, 3))

    def nodes(model):
        f, g, lengths = model(frames, num_frames, labels)
        return (f[:, :, None] + g[:, None]).log_softmax(-1), lengths

    found, lengths = nodes(ensemble(models))
    logs = torch.stack([nodes(model)[0] for model in models]).mean(0)
    expected = logs - logs.logsumexp(-1, keepdim=True)
    assert lengths.tolist() == nodes(models[0])[1].tolist()
    for b, T in enumerate(lengths.tolist()):
        assert_close(found[b, :T], expected[b, :T], atol=1e-12, rtol=1e-12)
    assert not torch.allclose(found, nodes(models[0])[0], atol=0.1)


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_a_model_are_the_model(copies):
    model = member(hidden_size=5, prediction_size=7, prediction_layers=2)
    together = ensemble([model] * copies)
    frames, num_frames = torch.randn(2, 6, 6).double(), torch.tensor([6, 4])
    labels, num_labels = torch.randint(1, K + 1, (2, 3)), torch.tensor([3, 2])
    losses = []
    for one in (model, together):
        f, g, lengths = one(frames, num_frames, labels)
        losses.append(transducer_loss(f, g, labels, lengths, num_labels))
    assert_close(*losses, atol=1e-10, rtol=1e-10)
    for search in (
        lambda one: greedy_search(one, frames, num_frames),
        lambda one: [h for best in beam_search(one, frames, num_frames, beam_width=3, n_best=3)
                     for h in best],
    ):  # fmt: skip
        for theirs, ours in zip(search(model), search(together), strict=True):
            assert theirs.labels == ours.labels and theirs.frames == ours.frames
            assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "tensors"])
def test_all_searches_find_the_same_in_an_ensemble(backend):
    together = ensemble(members(2))
    frames, num_frames = torch.randn(3, 5, 6).double(), torch.tensor([5, 1, 3])
    options = dict(beam_width=4, n_best=4)
    found, expected = (
        beam_search(together, frames, num_frames, backend=name, **options)
        for name in (backend, "reference")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert [h.labels for h in ours] == [h.labels for h in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.log_prob == pytest.approx(b.log_prob, abs=1e-9)
            assert a.frames == b.frames and len(a.timings) == len(a.labels)


def test_a_step_at_a_time_is_the_whole():
    mean = mean_prediction([m.prediction_network for m in members(2)])
    labels = torch.randint(1, K + 1, (2, 4))
    whole = mean(labels)
    g, state = mean.step(torch.zeros(2, dtype=torch.int64))
    for u in range(4):
        assert_close(g, whole[:, u], atol=1e-12, rtol=1e-12)
        g, state = mean.step(labels[:, u], state)


def test_ctc_networks_are_averaged_frame_by_frame():
    networks = [TranscriptionNetwork(6, K, 5).eval() for _ in range(3)]
    frames = torch.randn(2, 7, 6)
    f, lengths = ensemble(networks)(frames)
    logs = torch.stack([network(frames)[0].log_softmax(-1) for network in networks]).mean(0)
    assert_close(f.log_softmax(-1), logs.log_softmax(-1), atol=1e-6, rtol=1e-5)
    assert len(ctc_best_path(f, lengths)) == 2


def test_an_utterances_mean_is_to_the_last_bit_what_it_is_alone():
    together = ensemble(members())
    frames, num_frames = torch.randn(3, 5, 6).double(), torch.tensor([5, 2, 3])
    network = together.transcription_network
    for b, found in enumerate(network.each_alone(frames, num_frames)):
        assert torch.equal(found, network(frames[b : b + 1, : num_frames[b]])[0][0])


def test_prediction_networks_without_null_are_averaged_too():
    networks = [PredictionNetwork(K, size, with_null=False) for size in (3, 6)]
    labels = torch.randint(1, K + 1, (2, 3))
    mean = ensemble(networks)(labels)
    assert_close(mean, (networks[0](labels) + networks[1](labels)) / 2, atol=1e-6, rtol=1e-5)


def test_an_ensemble_has_no_dropout():
    models = [
        Transducer(6, K, 5, num_layers=2, dropout=0.5, prediction_layers=2).train()
        for _ in range(2)
    ]
    together = ensemble(models)
    frames, labels = torch.randn(1, 5, 6), torch.randint(1, K + 1, (1, 3))
    first, second = (together(frames, torch.tensor([5]), labels) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: [], "give at least one"),
        (lambda: [Transducer(6, 4), Transducer(6, 5)], "same num_labels.* is 4 .* member 2 is 5"),
        (lambda: [Transducer(6, 4), Transducer(7, 4)], "same input_size"),
        (lambda: [Transducer(6, 4), Transducer(6, 4, pooling=2)], "same pooling"),
        (lambda: [Transducer(6, 4), Transducer(6, 4, prediction_layers=2)], "prediction_layers"),
        (lambda: [Transducer(6, 4), TranscriptionNetwork(6, 4)], "one kind"),
        (lambda: [ensemble([Transducer(6, 4)]), Transducer(6, 4)], "itself an ensemble"),
        (lambda: [ensemble([TranscriptionNetwork(6, 4)])], "itself an ensemble"),
    ],
)
def test_members_that_do_not_go_together_are_refused(build, said):
    with pytest.raises(ValueError, match=said) as error:
        ensemble(build())
    assert "\n" not in str(error.value)
