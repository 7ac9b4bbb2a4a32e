"""Ensembles: the mean of what each member expects next, whatever frame it would emit it at."""

import math
import warnings
from itertools import product

import pytest
import torch

from transduce import (
    Ensemble,
    Transducer,
    greedy_search,
    label_timings,
    lattice_transitions,
    transducer_loss,
)
from transduce.networks import PredictionNetwork, TranscriptionNetwork

K = 3
# Members may differ in size, depth, direction and pooling.
SIZES = [
    dict(hidden_size=5, prediction_size=3),
    dict(hidden_size=8, num_layers=2, prediction_size=20, pooling=2),
    dict(hidden_size=3, bidirectional=False, prediction_layers=2),
]


def member(seed=0, scale=8.0, num_labels=K, **sizes):
    """Weights large enough for the distributions to differ from node to node; null is likely."""
    torch.manual_seed(seed)
    model = Transducer(6, num_labels, **sizes).double().eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(scale)
        model.prediction_network.output.bias[0] += 2
    return model


def members():
    return [member(seed, **sizes) for seed, sizes in enumerate(SIZES)]


def utterances(*lengths):
    torch.manual_seed(9)
    return torch.randn(len(lengths), max(lengths), 6).double(), torch.tensor(lengths)


@torch.no_grad()
def log_prob(model, frames, labels):
    """ln Pr(y|x) of one utterance by the loss of one transducer."""
    y = torch.tensor([labels], dtype=torch.int64)
    f, g, num_vectors = model(frames[None], torch.tensor([len(frames)]), y)
    return -float(transducer_loss(f, g, y, num_vectors, torch.tensor([len(labels)])))


def sequences(longest, num_labels=K):
    for n in range(longest + 1):
        yield from product(range(1, num_labels + 1), repeat=n)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_a_model_are_the_model(sizes, copies):
    model = member(**sizes)
    frames, num_frames = utterances(7, 4, 1)
    labels, num_labels = torch.tensor([[2, 2, 1], [3, 0, 0], [0, 0, 0]]), torch.tensor([3, 1, 0])
    losses = Ensemble([model] * copies).losses(frames, num_frames, labels, num_labels)
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        expected = log_prob(model, frames[b, :T], labels[b, :U].tolist())
        assert float(losses[b]) == pytest.approx(-expected, abs=1e-9)


def test_what_is_expected_next_is_averaged_and_sums_to_one():
    # By brute force: Pr(k|y) is the share, of all sequences that begin with y, of those that go on
    # with k. With a likely null hardly any are longer than these.
    models, (frames, num_frames) = members(), utterances(3)
    with torch.no_grad():
        for model in models:
            model.prediction_network.output.bias[0] += 4
    every = list(sequences(6))
    logs = [[log_prob(model, frames[0], y) for y in every] for model in models]
    assert all(sum(map(math.exp, row)) > 0.99999 for row in logs)

    def share(row, prefix, then):
        n = len(prefix)
        begin = sum(math.exp(p) for y, p in zip(every, row, strict=True) if y[:n] == prefix)
        return (
            sum(
                math.exp(p)
                for y, p in zip(every, row, strict=True)
                if y[:n] == prefix and then(y[n:])
            )
            / begin
        )

    def by_hand(y):
        total = 0.0
        for u in range(len(y) + 1):
            options = [lambda rest: not rest] + [
                (lambda rest, k=k: rest[:1] == (k,)) for k in range(1, K + 1)
            ]
            means = [
                math.exp(sum(math.log(share(row, y[:u], then)) for row in logs) / len(logs))
                for then in options
            ]
            total += math.log(means[y[u] if u < len(y) else 0] / sum(means))
        return total

    together = Ensemble(models)
    for y in [(), (1,), (2, 3)]:
        labels = torch.tensor([y], dtype=torch.int64)
        loss = together.losses(frames, num_frames, labels, torch.tensor([len(y)]))
        assert float(loss) == pytest.approx(-by_hand(y), abs=2e-3)


def test_a_wide_search_finds_the_most_probable_of_all():
    together, (frames, num_frames) = Ensemble(members()), utterances(4)
    every = list(sequences(5))
    labels = torch.zeros(len(every), 5, dtype=torch.int64)
    for row, y in zip(labels, every, strict=True):
        row[: len(y)] = torch.tensor(y)
    losses = together.losses(
        frames.expand(len(every), -1, -1), num_frames.expand(len(every)),
        labels, torch.tensor([len(y) for y in every]),
    )  # fmt: skip
    best = sorted(zip(losses.tolist(), every, strict=True))[:5]
    [found] = together.search(frames, num_frames, beam_width=K**5, n_best=5)
    assert [h.labels for h in found] == [y for _, y in best]
    for h, (loss, y) in zip(found, best, strict=True):
        assert h.log_prob == h.score == pytest.approx(-loss, abs=1e-9)
        assert len(h.timings) == len(h.frames) == len(y)
    [narrow] = together.search(frames, num_frames, beam_width=2, with_timings=False)
    assert narrow[0].log_prob <= found[0].log_prob + 1e-12 and narrow[0].timings == ()


class Spike(TranscriptionNetwork):
    """Null everywhere but at one frame, where the prediction network is to say what."""

    def __init__(self, at):
        super().__init__(6, K, 2)
        self.at = at

    def forward(self, frames, num_frames):
        f = torch.zeros(*frames.shape[:2], K + 1)
        f[:, :, 0] = 40.0
        f[:, self.at, 0] = 0.0
        return f, num_frames


class Script(PredictionNetwork):
    """Says 1, then 2, then null."""

    def step(self, labels, state=None):
        said = torch.zeros(1, len(labels), 1) if state is None else state[0] + 1
        g = 20.0 * torch.eye(K + 1)[[1, 2, 0, 0]]
        return g[said.flatten().long().clamp(max=3)], (said, said)


def test_members_that_emit_at_different_frames_agree_all_the_same():
    models = []
    for at in (0, 3):
        model = Transducer(6, K, 2)
        model.transcription_network, model.prediction_network = Spike(at), Script(K, 2)
        models.append(model)
    frames, num_frames = utterances(4)
    [found] = Ensemble(models).search(frames, num_frames, beam_width=2, with_timings=False)
    assert found[0].labels == (1, 2) and math.exp(found[0].log_prob) > 0.99


def test_an_utterance_is_searched_as_if_it_were_alone():
    together, (frames, num_frames) = Ensemble(members()), utterances(6, 0, 2)
    options = dict(beam_width=3, n_best=3)
    found = together.search(frames, num_frames, **options)
    assert [h.labels for h in found[1]] == [()] and found[1][0].log_prob == 0.0
    for b in (0, 2):
        [alone] = together.search(frames[[b], : num_frames[b]], num_frames[[b]], **options)
        assert [h.labels for h in alone] == [h.labels for h in found[b]]
        assert [h.log_prob for h in alone] == pytest.approx([h.log_prob for h in found[b]])
        assert alone[0].timings == found[b][0].timings


def test_timings_are_the_first_members_with_the_mean_of_all_confidences():
    models, (frames, num_frames) = members(), utterances(6)
    [best] = Ensemble(models).search(frames, num_frames, beam_width=9, n_best=9)
    found = next(h for h in best if len(h.labels) >= 2)
    y = torch.tensor([found.labels])
    alone = []
    with torch.no_grad():
        for model in models:
            f, g, _ = model(frames, num_frames, y)
            alone.append(label_timings(*lattice_transitions(f[0], g[0], y[0])))
    assert len(found.timings) == len(found.labels)
    for timing, *each in zip(found.timings, *alone, strict=True):
        assert timing[:3] == each[0][:3]
        assert timing.confidence == pytest.approx(sum(t.confidence for t in each) / len(each))
    assert found.frames == tuple(timing.frame for timing in alone[0])


def test_a_sure_model_gives_what_the_greedy_search_gives():
    model = member(scale=1.0, hidden_size=4, prediction_size=4)
    frames, num_frames = utterances(5, 3)
    [first, second] = Ensemble([model]).search(frames, num_frames, beam_width=4)
    greedy = greedy_search(model, frames, num_frames)
    assert first[0].log_prob >= greedy[0].log_prob and second[0].log_prob >= greedy[1].log_prob


def test_what_has_no_frames_has_no_loss():
    frames, _ = utterances(6, 2)
    labels, num_labels = torch.tensor([[1], [1]]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"num_frames\[1\] must be at least 1, not 0"):
        Ensemble(members()).losses(frames, torch.tensor([6, 0]), labels, num_labels)


def test_labels_without_end_are_bounded_and_said_to_be():
    model = member(hidden_size=3, prediction_size=3)
    with torch.no_grad():
        model.prediction_network.output.bias[0] -= 60
    frames, num_frames = utterances(2)
    with pytest.warns(UserWarning, match="item 0 had not ended after 3 labels for each"):
        [found] = Ensemble([model]).search(frames, num_frames, beam_width=1, max_labels_per_frame=3)
    assert len(found[0].labels) <= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ensemble(members()).search(frames, num_frames, beam_width=1)


def test_numbers_that_are_none_are_named():
    model = member(hidden_size=3, prediction_size=3)
    frames, num_frames = utterances(3, 3)
    frames[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"the transcription network gave NaN or .* for item 1"):
        Ensemble([model]).search(frames, num_frames, beam_width=2)


def test_an_ensemble_has_no_dropout_while_it_searches():
    models = [Transducer(6, K, 5, num_layers=2, dropout=0.5).train() for _ in range(2)]
    together = Ensemble(models).train()
    frames, num_frames = torch.randn(1, 5, 6), torch.tensor([5])
    first, second = (together.search(frames, num_frames, beam_width=2) for _ in range(2))
    assert first == second and together.training


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: [], "give at least one"),
        (lambda: [Transducer(6, 4), Transducer(6, 5)], "same num_labels.* is 4 .* member 2 is 5"),
        (lambda: [Transducer(6, 4), Transducer(7, 4)], "same input_size"),
        (lambda: [Transducer(6, 4), TranscriptionNetwork(6, 4)], "must be transducers"),
        (lambda: [Ensemble([Transducer(6, 4)])], "must be transducers"),
    ],
)
def test_members_that_do_not_go_together_are_refused(build, said):
    with pytest.raises(ValueError, match=said) as error:
        Ensemble(build())
    assert "\n" not in str(error.value)
