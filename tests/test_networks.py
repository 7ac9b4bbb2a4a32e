"""The networks: the paper's sizes, what depends on what, ragged batches, pooling."""

import pytest
import torch
from torch.testing import assert_close

import transduce
from transduce import PredictionNetwork, TranscriptionNetwork, Transducer, transducer_loss
from transduce.networks import average_frames

PAPER = [
    (PredictionNetwork(39, 128, with_null=False), 91_431),
    (TranscriptionNetwork(26, 39, 128), 169_768),
    (Transducer(26, 39), 261_328),
]


@pytest.mark.parametrize("network, count", PAPER, ids=["prediction", "CTC", "transducer"])
def test_the_papers_sizes_give_the_papers_counts(network, count):
    assert sum(weights.numel() for weights in network.parameters()) == count


@pytest.mark.parametrize("network, count", PAPER, ids=["prediction", "CTC", "transducer"])
def test_all_weights_start_uniform_between_minus_and_plus_a_tenth(network, count):
    weights = torch.cat([w.detach().flatten() for w in network.parameters()])
    assert weights.abs().max() <= 0.1
    assert_close(weights.mean(), torch.tensor(0.0), atol=1e-3, rtol=0)
    assert_close(weights.std(), torch.tensor(0.2 / 12**0.5), atol=1e-3, rtol=0)
    assert all(w.detach().abs().max() > 0.05 for w in network.parameters())


@pytest.mark.parametrize("with_null", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_step_is_a_column_of_the_whole(num_layers, with_null):
    network = PredictionNetwork(5, 20, num_layers, with_null=with_null)
    labels = torch.randint(1, 6, (3, 4))
    whole = network(labels)
    assert whole.shape == (3, 5, 5 + with_null)
    g, state = network.step(torch.zeros(3, dtype=torch.int64), network.start(3))
    assert_close(g, whole[:, 0], atol=1e-6, rtol=1e-5)
    for u in range(4):
        g, state = network.step(labels[:, u], state)
        assert_close(g, whole[:, u + 1], atol=1e-6, rtol=1e-5)


def test_a_prediction_depends_on_the_labels_before_it_alone():
    network = PredictionNetwork(5, 8)
    labels = torch.tensor([[1, 2, 3]])
    changed = torch.tensor([[1, 2, 5]])
    before, after = network(labels), network(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def test_labels_may_be_one_hot_vectors():
    network = PredictionNetwork(5, 8)
    labels = torch.tensor([[1, 5, 3, 0]])
    vectors = torch.nn.functional.one_hot(labels, 6)[..., 1:].float()
    assert_close(network(vectors), network(labels), atol=1e-6, rtol=1e-5)


def test_no_labels_leave_one_prediction():
    assert PredictionNetwork(5, 8)(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 1, 6)


SHAPES = [
    dict(num_layers=1), dict(num_layers=3), dict(bidirectional=False), dict(pooling=2),
    dict(num_layers=3, pooling=3), dict(num_layers=2, bidirectional=False, pooling=4),
    dict(bidirectional=False, lookahead=2),
    dict(num_layers=2, bidirectional=False, pooling=3, lookahead=4),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_one_by_one_is_bit_for_bit_what_each_is_alone(options, backend):
    network = TranscriptionNetwork(7, 40, 37, **options)
    num_frames = torch.tensor([9, 1, 6, 30, 9, 2, 17])
    frames = torch.randn(7, 30, 7)
    for b, found in enumerate(network.forward_one_by_one(frames, num_frames, backend=backend)):
        one = frames[b : b + 1, : num_frames[b]]
        [alone] = network.forward_one_by_one(one, num_frames[b : b + 1], backend=backend)
        assert torch.equal(found, alone)
        assert_close(found, network(one, backend="reference")[0][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_an_utterance_among_others_is_as_it_is_alone(options, ids):
    if ids and options.get("lookahead"):
        pytest.skip("a lookahead is for vectors")
    network = TranscriptionNetwork(7, 4, 12, **options)
    num_frames = torch.tensor([9, 1, 6])
    frames = torch.randint(0, 8, (3, 9)) if ids else torch.randn(3, 9, 7)
    together, lengths = network(frames, num_frames)
    pooling = options.get("pooling", 1)
    assert lengths.tolist() == [-(-n // pooling) for n in num_frames.tolist()]
    assert together.shape == (3, int(lengths.max()), 5)
    for b, n in enumerate(num_frames.tolist()):
        alone, length = network(frames[b : b + 1, :n])
        assert length.item() == lengths[b]
        assert_close(together[b, : lengths[b]], alone[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_the_bidirectional_network_sees_what_comes(bidirectional):
    network = TranscriptionNetwork(3, 4, 8, bidirectional=bidirectional)
    frames = torch.randn(1, 6, 3)
    changed = frames.clone()
    changed[0, 5] += 1
    early = network(frames)[0][:, :5] - network(changed)[0][:, :5]
    assert (early.abs().max() > 0) == bidirectional


FORWARD = [
    dict(lookahead=2), dict(lookahead=2, num_layers=2, pooling=2), dict(lookahead=9, pooling=3),
]  # fmt: skip


def forward_network(*sizes, **options):
    return TranscriptionNetwork(*sizes, bidirectional=False, **options)


@pytest.mark.parametrize("options", FORWARD, ids=str)
def test_a_vector_depends_on_the_lookahead_and_on_nothing_further(options):
    network = forward_network(3, 4, 8, **options)
    pooling, lookahead = options.get("pooling", 1), options["lookahead"]
    frames = torch.randn(1, 20, 3)
    before = network(frames)[0][0]
    for changed in range(20):
        other = frames.clone()
        other[0, changed] += 1
        differs = (network(other)[0][0] != before).any(1)
        # Vector v averages the frames up to v pooling + pooling - 1, each with its lookahead.
        first = max(0, changed - lookahead) // pooling
        assert not differs[:first].any() and differs[first]


def test_a_lookahead_is_the_network_without_it_on_stacked_frames():
    network = forward_network(3, 4, 8, lookahead=2)
    plain = forward_network(9, 4, 8)
    plain.load_state_dict(network.state_dict())
    frames, num_frames = torch.randn(2, 5, 3), torch.tensor([5, 2])
    stacked = torch.zeros(2, 5, 9)
    for b, length in enumerate(num_frames.tolist()):
        for t in range(length):
            rows = frames[b, t : min(t + 3, length)].flatten()
            stacked[b, t, : len(rows)] = rows
    for found, expected in zip(
        network(frames, num_frames), plain(stacked, num_frames), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_lookahead_is_the_same_on_every_backend():
    network = forward_network(3, 4, 8, num_layers=2, pooling=2, lookahead=3)
    frames, num_frames = torch.randn(2, 9, 3), torch.tensor([9, 4])
    expected = network(frames, num_frames, backend="reference")[0]
    for backend in ("eager", "cpu"):
        assert_close(network(frames, num_frames, backend=backend)[0], expected)


def test_a_lookahead_of_a_network_that_sees_all_frames_is_refused():
    with pytest.raises(ValueError, match="lookahead is 3, but the network is bidirectional"):
        TranscriptionNetwork(3, 4, 5, lookahead=3)
    with pytest.raises(ValueError, match="lookahead must be at least 0, not -1"):
        forward_network(3, 4, 5, lookahead=-1)
    with pytest.raises(ValueError, match=r"reads vectors \[B, T, D\], not \[1, 2\]; for ids set"):
        forward_network(3, 4, 5, lookahead=1)(torch.tensor([[1, 2]]))


def test_pooling_averages_the_frames_that_are_there():
    hidden, num_frames = torch.randn(2, 7, 3), torch.tensor([7, 4])
    hidden[1, 4:] = 0
    pooled, lengths = average_frames(hidden, num_frames, 3)
    assert lengths.tolist() == [3, 2]
    for b in range(2):
        for i in range(int(lengths[b])):
            there = hidden[b, 3 * i : min(3 * i + 3, int(num_frames[b]))]
            assert_close(pooled[b, i], there.mean(0))


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_what_the_networks_output_is_what_the_loss_takes(ids):
    model = Transducer(6, 4, hidden_size=9, pooling=2)
    frames = torch.randint(0, 7, (2, 5)) if ids else torch.randn(2, 5, 6)
    labels, num_labels = torch.tensor([[1, 4, 2], [3, 0, 0]]), torch.tensor([3, 1])
    f, num_frames = model.transcription_network(frames, torch.tensor([5, 3]))
    g = model.prediction_network(labels)
    loss = transducer_loss(f, g, labels, num_frames, num_labels)
    f_too, g_too, num_too = model(frames, torch.tensor([5, 3]), labels)
    assert torch.equal(f, f_too) and torch.equal(g, g_too) and torch.equal(num_frames, num_too)
    loss.sum().backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in model.parameters())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradients_of_the_whole_agree_with_differences(backend):
    torch.manual_seed(0)
    model = Transducer(3, 4, hidden_size=3).double()
    labels, num_labels = torch.tensor([[1, 4], [2, 0]]), torch.tensor([2, 1])
    frames = torch.randn(2, 4, 3, dtype=torch.float64)
    names, weights = zip(*model.named_parameters(), strict=True)

    def loss(*values):
        named = dict(zip(names, values, strict=True))
        arguments = (frames, torch.tensor([4, 3]), labels)
        f, g, num_frames = torch.func.functional_call(model, named, arguments, {"backend": backend})
        return transducer_loss(f, g, labels, num_frames, num_labels, backend=backend)

    start = [w.detach().requires_grad_() for w in weights]
    assert torch.autograd.gradcheck(loss, start, fast_mode=True)


def test_a_pooling_of_less_than_one_is_refused():
    with pytest.raises(ValueError, match="pooling"):
        TranscriptionNetwork(3, 4, 5, pooling=0)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("u", range(4))
def test_a_label_changes_every_prediction_after_it_and_none_before(u, num_layers):
    network = PredictionNetwork(5, 20, num_layers)
    labels = torch.tensor([[1, 2, 3, 4], [5, 5, 1, 2]])
    changed = labels.clone()
    changed[:, u] = labels[:, u] % 5 + 1
    before, after = network(labels), network(changed)
    assert torch.equal(before[:, : u + 1], after[:, : u + 1])
    assert (before[:, u + 1 :] != after[:, u + 1 :]).any(2).all()


@pytest.mark.parametrize("padding", range(6))
def test_whatever_pads_the_labels_changes_no_prediction_before_it(padding):
    network = PredictionNetwork(5, 20)
    labels = torch.tensor([[1, 2, 3]])
    padded = torch.nn.functional.pad(labels, (0, 4), value=padding)
    assert torch.equal(network(padded)[:, :4], network(labels))


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_what_is_past_the_end_changes_neither_values_nor_gradients(options):
    network = TranscriptionNetwork(7, 4, 12, **options)
    num_frames, weights = torch.tensor([9, 1, 6]), list(network.parameters())
    frames = torch.randn(3, 9, 7)
    poisoned = frames.clone()
    poisoned[torch.arange(9) >= num_frames[:, None]] = torch.nan
    results = []
    for x in (frames, poisoned):
        x.requires_grad_()
        f, lengths = network(x, num_frames)
        inside = torch.arange(f.shape[1]) < lengths[:, None]
        loss = f[inside].square().sum()
        results.append((f, *torch.autograd.grad(loss, [x, *weights])))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_gradients_through_layers_and_pooling_agree_with_differences(options):
    network = TranscriptionNetwork(2, 2, 2, **options).double()
    frames = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    num_frames = torch.tensor([5, 1, 4])

    def f(*_):
        f, lengths = network(frames, num_frames)
        return f[torch.arange(f.shape[1]) < lengths[:, None]]

    assert torch.autograd.gradcheck(f, [frames, *network.parameters()], fast_mode=True)


@pytest.mark.parametrize("pooling", [1, 2])
def test_dropout_acts_in_training_only_and_after_every_layer(pooling):
    frames, width = torch.randn(2, 6, 3), 60
    for num_layers in (1, 2):
        network = TranscriptionNetwork(3, 4, 30, num_layers, dropout=0.5, pooling=pooling)
        plain = TranscriptionNetwork(3, 4, 30, num_layers, pooling=pooling)
        plain.load_state_dict(network.state_dict())
        expected = plain(frames)[0]
        assert torch.equal(network.eval()(frames)[0], expected)
        network.output, plain.output = torch.nn.Identity(), torch.nn.Identity()
        hidden, whole = network.train()(frames)[0], plain(frames)[0]
        assert 0.3 < (hidden == 0).float().mean() < 0.7 and hidden.shape[-1] == width
        kept = hidden != 0  # of one layer, what is left is doubled, and there is nothing more
        assert torch.allclose(hidden[kept], 2 * whole[kept]) == (num_layers == 1)


def test_dropout_acts_on_what_the_prediction_network_remembers():
    network, labels = PredictionNetwork(5, 30, dropout=0.5), torch.tensor([[1, 2, 3]])
    expected = network.eval()(labels)
    assert torch.equal(network(labels), expected)
    assert not torch.equal(network.train()(labels), expected)


def test_without_lengths_every_frame_counts():
    network, frames = TranscriptionNetwork(3, 4, 8), torch.randn(2, 6, 3)
    f, lengths = network(frames)
    assert lengths.tolist() == [6, 6]
    assert torch.equal(f, network(frames, torch.tensor([6, 6]))[0])


def test_a_state_dict_carries_the_whole_model():
    model, other = Transducer(3, 4, 8, 3, pooling=2), Transducer(3, 4, 8, 3, pooling=2)
    arguments = torch.randn(2, 6, 3), torch.tensor([6, 5]), torch.tensor([[1, 4], [2, 3]])
    assert not torch.equal(model(*arguments)[0], other(*arguments)[0])
    other.load_state_dict(model.state_dict())
    for found, expected in zip(other(*arguments), model(*arguments), strict=True):
        assert torch.equal(found, expected)


def test_the_package_itself_has_the_networks_and_all_it_names():
    assert {"PeepholeLSTM", "PredictionNetwork", "TranscriptionNetwork"} <= set(transduce.__all__)
    assert {"NULL", "Alphabet", "Transducer", "transducer_loss"} <= set(transduce.__all__)
    assert [name for name in transduce.__all__ if not hasattr(transduce, name)] == []


def test_padding_labels_may_be_any_negative_number():
    torch.manual_seed(0)
    network = PredictionNetwork(5, 8)
    padded = torch.tensor([[1, 2, 0], [3, 0, 0]])
    other = torch.tensor([[1, 2, -100], [3, -1, -1]])
    expected = network(padded, backend="reference")
    assert torch.equal(network(other, backend="reference"), expected)


MISTAKES = {
    "a label that is not there": (
        torch.tensor([[1, 2], [1, 41]]),
        r"labels of item 1 has label 41 at position 1, but there are only 5, counted from 1",
    ),
    "labels in one dimension": (torch.tensor([1, 2]), r"labels must be ids \[B, U\]"),
    "labels that are no integers": (torch.tensor([[1.0]]), r"not torch.float32 \[1, 1\]"),
}


@pytest.mark.parametrize("labels, message", MISTAKES.values(), ids=MISTAKES)
def test_the_prediction_network_says_what_is_wrong_with_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        PredictionNetwork(5, 8)(labels, backend="reference")


def test_frames_with_their_time_first_are_suspected():
    network = TranscriptionNetwork(3, 5, 8)
    with pytest.raises(ValueError, match=r"num_frames must be \[B\] = \[7\], because frames is"):
        network(torch.zeros(7, 2, 3), torch.tensor([7, 4]), backend="reference")
