"""The searches with networks that are not ours: any encoder, any predictor, any joint."""

from itertools import product

import pytest
import torch
from torch import nn

from transduce import (
    NGram,
    PredictionNetwork,
    Transducer,
    beam_search,
    best_alignment,
    greedy_search,
    rnnt_loss,
    search,
)

K = 3
BACKENDS = ["reference", "eager"]


class ConformerLike(nn.Module):
    """Self-attention and a depthwise convolution over frames, with a stride of two."""

    def __init__(self, size, outputs):
        super().__init__()
        self.inputs = nn.Linear(4, size)
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.convolution = nn.Conv1d(size, size, 3, padding=1, groups=size)
        self.output = nn.Linear(size, outputs)

    def forward(self, frames, num_frames):
        x = self.inputs(frames[:, ::2])
        num_vectors = (num_frames + 1) // 2
        padding = torch.arange(x.shape[1]) >= num_vectors[:, None]
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.convolution(x.masked_fill(padding[..., None], 0.0).mT).mT
        return self.output(x.relu()), num_vectors


class Stateless(nn.Module):
    """A predictor that knows the last two labels only; its state is one tensor of integers."""

    def __init__(self, outputs, context=2):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(K + 1, 5)
        self.output = nn.Linear(5 * context, outputs)

    def start(self, batch):
        return torch.zeros(batch, self.context, dtype=torch.int64)

    def step(self, labels, state):
        state = torch.cat([state[:, 1:], labels[:, None]], 1)
        return self.output(self.embedding(state).flatten(1)), state


class Gru(nn.Module):
    """A recurrent predictor; its state is a tuple of one tensor."""

    def __init__(self, size):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(K + 1, size), nn.GRUCell(size, size)
        self.size = size

    def start(self, batch):
        return (torch.zeros(batch, self.size, dtype=self.embedding.weight.dtype),)

    def step(self, labels, state):
        h = self.cell(self.embedding(labels), state[0])
        return h, (h,)


class TanhJoint(nn.Module):
    """A joiner of two layers; f and g may have other sizes than there are outputs."""

    def __init__(self, f_size, g_size, size, outputs):
        super().__init__()
        self.by_f, self.by_g = nn.Linear(f_size, size), nn.Linear(g_size, size)
        self.output = nn.Linear(size, outputs)

    def forward(self, f, g):
        return self.output(torch.tanh(self.by_f(f) + self.by_g(g)))


class Client(nn.Module):
    """What somebody else has: two networks and perhaps a joint."""

    def __init__(self, transcription_network, prediction_network, joint=None):
        super().__init__()
        self.transcription_network = transcription_network
        self.prediction_network = prediction_network
        if joint is not None:
            self.joint = joint


class Subclass(PredictionNetwork):
    """Steps as it likes, so the compiled kernels must leave it alone."""

    def step(self, labels, state, **options):
        g, state = super().step(labels, state, **options)
        return 2 * g, state


def client(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "stateless":
        model = Client(ConformerLike(8, K + 1), Stateless(K + 1))
    elif kind == "tanh":
        model = Client(ConformerLike(8, 6), Gru(7), TanhJoint(6, 7, 9, K + 1))
    elif kind == "subclass":
        model = Transducer(4, K, 7)
        model.prediction_network = Subclass(K, 7)
    else:
        model = Transducer(4, K, 7)
    with torch.no_grad():
        for weights in model.parameters():
            weights *= 4 if kind in ("ours", "subclass") else 2
    return model.double().eval()


KINDS = ["stateless", "tanh", "ours", "subclass"]


def frames_of(T, B=1, seed=1):
    return torch.randn(B, T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logits_of(model, frames, labels):
    """The logits [1, T, U+1, K+1] of a client, and the number of its vectors."""
    f, num_vectors = model.transcription_network(frames, torch.tensor([frames.shape[1]]))
    rows, state = [], model.prediction_network.start(1)
    for label in (0, *labels):
        g, state = model.prediction_network.step(torch.tensor([label]), state)
        rows.append(g)
    g = torch.cat(rows)
    joint = getattr(model, "joint", torch.add)
    T, U1 = f.shape[1], len(g)
    logits = joint(f[0].repeat_interleave(U1, 0), g.repeat(T, 1))
    return logits.view(1, T, U1, -1), num_vectors


@torch.no_grad()
def exact_log_prob(model, frames, labels):
    logits, num_vectors = logits_of(model, frames, labels)
    targets, length = torch.tensor([labels], dtype=torch.int64), torch.tensor([len(labels)])
    return -float(rnnt_loss(logits, targets, num_vectors, length, blank=0, reduction="sum"))


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_at_unlimited_width_every_probability_is_the_lattices(kind, backend):
    T = 2 if kind in ("ours", "subclass") else 3  # frames of two vectors
    model, frames = client(kind), frames_of(T)
    found = beam_search(
        model, frames, torch.tensor([T]), beam_width=10**4, n_best=10**4,
        max_labels_per_frame=3, with_timings=False, backend=backend,
    )  # fmt: skip
    log_prob = {h.labels: h.log_prob for h in found[0]}
    count = 0
    for length in range(4):
        for labels in product(range(1, K + 1), repeat=length):
            assert log_prob[labels] == pytest.approx(
                exact_log_prob(model, frames, labels), abs=1e-9
            )
            count += 1
    assert count == sum(K**n for n in range(4))


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_find_what_the_sequential_loop_finds(kind, width, fused):
    model, frames, num_frames = client(kind), frames_of(12, 3), torch.tensor([12, 7, 1])
    options = dict(beam_width=width, n_best=width, max_labels_per_frame=6)
    if fused:
        options |= dict(fusion=NGram(2, K, [[1, 2, 3], [2, 2]]), fusion_weight=0.4, null_bias=-0.5)
    expected = beam_search(model, frames, num_frames, backend="reference", **options)
    found = beam_search(model, frames, num_frames, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert [h.labels for h in ours] == [h.labels for h in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)
            assert one.frames == other.frames
            assert [t[:3] for t in one.timings] == [t[:3] for t in other.timings]


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_our_own_transducer_finds_the_same_through_the_generic_way():
    model, frames, num_frames = client("ours"), frames_of(15, 2), torch.tensor([15, 9])
    options = dict(beam_width=10, n_best=10, max_labels_per_frame=5)
    fast = beam_search(model, frames, num_frames, backend="cpu", **options)
    f, num_vectors = model.transcription_network(frames, num_frames)
    assert f.requires_grad  # as in training
    generic = search(f, num_vectors, model.prediction_network, joint=lambda f, g: f + g, **options)
    for ours, theirs in zip(fast, generic, strict=True):
        assert [h.labels for h in ours] == [h.labels for h in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)
            assert one.frames == other.frames


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("kind", KINDS)
def test_timings_are_those_of_the_clients_own_lattice(kind):
    model, frames = client(kind), frames_of(9)
    hypotheses = beam_search(model, frames, torch.tensor([9]), beam_width=5, n_best=5)[0]
    assert any(h.labels for h in hypotheses)
    for h in hypotheses:
        logits, _ = logits_of(model, frames, h.labels)
        log_pr = logits[0].log_softmax(-1)
        U = len(h.labels)
        log_label = log_pr[:, torch.arange(U), torch.tensor(h.labels, dtype=torch.int64)]
        if U:
            assert list(h.frames) == best_alignment(log_pr[..., 0], log_label)[0]


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("kind", KINDS)
def test_the_greedy_search_takes_any_networks(kind):
    model, frames, num_frames = client(kind), frames_of(12, 4), torch.tensor([12, 3, 0, 8])
    found = greedy_search(model, frames, num_frames)
    expected = greedy_search(model, frames, num_frames, backend="reference")
    assert [(h.labels, h.frames) for h in found] == [(h.labels, h.frames) for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected])


def test_a_compiled_model_is_searched():
    model, frames, num_frames = client("ours"), frames_of(8, 2), torch.tensor([8, 5])
    expected = beam_search(model, frames, num_frames, beam_width=4)
    compiled = torch.compile(model, backend="eager")
    assert beam_search(compiled, frames, num_frames, beam_width=4) == expected


def test_a_search_of_no_vectors_finds_the_empty_sequence():
    model = client("tanh")
    found = search(
        torch.zeros(2, 0, 6).double(), torch.tensor([0, 0]), model.prediction_network,
        joint=model.joint, beam_width=2,
    )  # fmt: skip
    assert [[h.labels for h in best] for best in found] == [[()], [()]]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(backend="cpu"), "backend 'cpu' searches with a PredictionNetwork and the sum"),
        (dict(num_vectors=torch.tensor([9])), r"num_vectors\[0\] must be between 0 and 3, not 9"),
        (dict(transcription=torch.zeros(3, 4)), r"transcription must be \[B, T, \.\.\.\]"),
        (dict(transcription=torch.full((1, 3, 4), torch.nan).double()), "NaN or \\+inf for item 0"),
        (dict(null_bias=float("nan")), "null_bias must be a finite number"),
        (
            dict(prediction_network=torch.nn.Linear(3, 3)),
            r"needs start\(batch\) and step\(labels, state\), and Linear has no start and no step",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(change, words):
    model = client("stateless")
    arguments = dict(
        transcription=torch.zeros(1, 3, 4).double(),
        num_vectors=torch.tensor([3]),
        prediction_network=model.prediction_network,
        beam_width=2,
    )
    with pytest.raises((TypeError, ValueError), match=words):
        search(**arguments | change)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("beam_width", [1, 4])
@pytest.mark.parametrize("num_labels", [2, 5])
def test_a_prediction_network_of_other_labels_is_refused(num_labels, beam_width, backend):
    network = PredictionNetwork(num_labels, 4)
    sentence = (
        f"the transcription has K\\+1 = 4 outputs, and the prediction network {num_labels + 1}"
    )
    with pytest.raises(ValueError, match=sentence):
        search(
            torch.randn(1, 3, 4), torch.tensor([3]), network, beam_width=beam_width, backend=backend
        )
