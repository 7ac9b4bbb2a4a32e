"""Ensembles: the mean of the members' next-label distributions, whatever their alignments."""

import math
import warnings
from itertools import product

import pytest
import torch

from transduce import (
    Ensemble,
    Hypothesis,
    SearchOptions,
    Transducer,
    greedy_search,
    label_timings,
    lattice_transitions,
    transducer_loss,
)
from transduce.data.batches import Batch
from transduce.networks import PredictionNetwork, TranscriptionNetwork

K = 3
# Members may differ in size, depth, direction and pooling.
SIZES = [
    dict(hidden_size=5, prediction_size=3),
    dict(hidden_size=8, num_layers=2, prediction_size=20, pooling=2),
    dict(hidden_size=3, bidirectional=False, prediction_layers=2),
]


def member(seed=0, scale=8.0, num_labels=K, **sizes):
    """Return a transducer with large weights, so that nodes differ, and a probable null."""
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


def batch_of(frames, num_frames, labels=None, num_labels=None):
    B = len(frames)
    if labels is None:
        labels, num_labels = torch.zeros(B, 0).long(), torch.zeros(B).long()
    return Batch((), frames, num_frames, labels, num_labels)


def search(ensemble, frames, num_frames, **options):
    return ensemble.search(batch_of(frames, num_frames), SearchOptions(**options))


@torch.no_grad()
def log_prob(model, frames, labels):
    """Return ln Pr(y|x) of one utterance from the loss of one transducer."""
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
    losses = Ensemble([model] * copies).losses(batch_of(frames, num_frames, labels, num_labels))
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        expected = log_prob(model, frames[b, :T], labels[b, :U].tolist())
        assert float(losses[b]) == pytest.approx(-expected, abs=1e-9)


def test_next_label_distributions_are_averaged_and_sum_to_one():
    # By brute force: Pr(k|y) is the probability of all sequences that begin with y, k over that of
    # all that begin with y. With a probable null, hardly any sequence is longer than six labels.
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
        loss = together.losses(batch_of(frames, num_frames, labels, torch.tensor([len(y)])))
        assert float(loss) == pytest.approx(-by_hand(y), abs=2e-3)


def test_a_wide_search_finds_the_most_probable_sequences():
    together, (frames, num_frames) = Ensemble(members()), utterances(4)
    every = list(sequences(5))
    labels = torch.zeros(len(every), 5, dtype=torch.int64)
    for row, y in zip(labels, every, strict=True):
        row[: len(y)] = torch.tensor(y)
    repeated = frames.expand(len(every), -1, -1), num_frames.expand(len(every))
    num_labels = torch.tensor([len(y) for y in every])
    losses = together.losses(batch_of(*repeated, labels, num_labels))
    best = sorted(zip(losses.tolist(), every, strict=True))[:5]
    [found] = search(together, frames, num_frames, beam_width=K**5, n_best=5)
    assert [h.labels for h in found] == [y for _, y in best]
    for h, (loss, y) in zip(found, best, strict=True):
        assert h.log_prob == h.score == pytest.approx(-loss, abs=1e-9)
        assert len(h.timings) == len(h.frames) == len(y)
    [narrow] = search(together, frames, num_frames, beam_width=2, with_timings=False)
    assert narrow[0].log_prob <= found[0].log_prob + 1e-12 and narrow[0].timings == ()


class Spike(TranscriptionNetwork):
    """A transcription network that outputs null except at one frame, where all labels are equal."""

    def __init__(self, at):
        super().__init__(6, K, 2)
        self.at = at

    def forward(self, frames, num_frames, backend="auto"):
        f = torch.zeros(*frames.shape[:2], K + 1)
        f[:, :, 0] = 40.0
        f[:, self.at, 0] = 0.0
        return f, num_frames


class Script(PredictionNetwork):
    """A prediction network that outputs 1, then 2, then null."""

    def start(self, batch):
        return (torch.zeros(batch, 1),)

    def step(self, labels, state, backend="auto"):
        g = 20.0 * torch.eye(K + 1)[[1, 2, 0, 0]]
        return g[state[0][:, 0].long().clamp(max=3)], (state[0] + 1,)


def test_members_that_emit_at_different_frames_agree_on_the_labels():
    models = []
    for at in (0, 3):
        model = Transducer(6, K, 2)
        model.transcription_network, model.prediction_network = Spike(at), Script(K, 2)
        models.append(model)
    frames, num_frames = utterances(4)
    [found] = search(Ensemble(models), frames, num_frames, beam_width=2, with_timings=False)
    assert found[0].labels == (1, 2) and math.exp(found[0].log_prob) > 0.99


def test_an_utterances_output_does_not_depend_on_the_rest_of_the_batch():
    together, (frames, num_frames) = Ensemble(members()), utterances(6, 0, 2)
    options = dict(beam_width=3, n_best=3)
    found = search(together, frames, num_frames, **options)
    assert found[1] == (Hypothesis((), 0.0, 0.0, ()),)
    for b in (0, 2):
        [alone] = search(together, frames[[b], : num_frames[b]], num_frames[[b]], **options)
        assert [h.labels for h in alone] == [h.labels for h in found[b]]
        assert [h.log_prob for h in alone] == pytest.approx([h.log_prob for h in found[b]])
        assert alone[0].timings == found[b][0].timings


def test_timings_are_the_first_members_and_confidences_the_mean_of_all():
    models, (frames, num_frames) = members(), utterances(6)
    [best] = search(Ensemble(models), frames, num_frames, beam_width=9, n_best=9)
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


def test_the_beam_finds_at_least_the_greedy_searchs_probability():
    model = member(scale=1.0, hidden_size=4, prediction_size=4)
    frames, num_frames = utterances(5, 3)
    [first, second] = search(Ensemble([model]), frames, num_frames, beam_width=4)
    greedy = greedy_search(model, frames, num_frames)
    assert first[0].log_prob >= greedy[0].log_prob and second[0].log_prob >= greedy[1].log_prob


def test_the_loss_of_an_utterance_without_frames_is_refused():
    frames, _ = utterances(6, 2)
    labels, num_labels = torch.tensor([[1], [1]]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"num_frames\[1\] must be at least 1, not 0"):
        Ensemble(members()).losses(batch_of(frames, torch.tensor([6, 0]), labels, num_labels))


def test_endless_labels_are_bounded_with_a_warning():
    model = member(hidden_size=3, prediction_size=3)
    with torch.no_grad():
        model.prediction_network.output.bias[0] -= 60
    frames, num_frames = utterances(2)
    with pytest.warns(UserWarning, match="item 0 had not ended after 3 labels for each"):
        options = dict(beam_width=1, max_labels_per_frame=3)
        [found] = search(Ensemble([model]), frames, num_frames, **options)
    assert len(found[0].labels) <= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(Ensemble(members()), frames, num_frames, beam_width=1)


def test_nan_in_a_transcription_is_named():
    model = member(hidden_size=3, prediction_size=3)
    frames, num_frames = utterances(3, 3)
    frames[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"the transcription network gave NaN or .* for item 1"):
        search(Ensemble([model]), frames, num_frames, beam_width=2)


def test_an_ensemble_searches_in_eval_mode():
    models = [Transducer(6, K, 5, num_layers=2, dropout=0.5).train() for _ in range(2)]
    together = Ensemble(models).train()
    frames, num_frames = torch.randn(1, 5, 6), torch.tensor([5])
    first, second = (search(together, frames, num_frames, beam_width=2) for _ in range(2))
    assert first == second and together.training


# --- Scorers ------------------------------------------------------------------------------------


class Waves:
    """A scorer whose ln Pr(x, y) is a wave of the frames and the labels, without their padding."""

    def __init__(self, height=4.0, offset=0.0):
        self.height, self.offset = height, offset

    def log_joint(self, frames, labels):
        turns = sum((u + 1) * label for u, label in enumerate(labels))
        return self.height * math.sin(float(frames.sum()) + 7 * turns) + self.offset

    def log_joints(self, frames, num_frames, rows, labels, num_labels):
        found = [
            self.log_joint(frames[b, : num_frames[b]], y[:length].tolist())
            for b, y, length in zip(rows.tolist(), labels, num_labels, strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)


def ranked_by_hand(models, scorers, frames, width):
    """Return what each direction finds, with the mean of all scores, the best first."""
    num_frames = torch.tensor([len(frames)])
    groups = [
        [model for model in models if getattr(model, "backwards", False) == backwards]
        for backwards in (False, True)
    ]
    groups = [Ensemble(group) for group in groups if group]
    found = set()
    for group in groups:
        [best] = search(group, frames[None], num_frames, beam_width=width, n_best=width)
        found |= {hypothesis.labels for hypothesis in best}
    scores, logs = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)
    for labels in found:
        y = torch.tensor([labels], dtype=torch.int64)
        for group in groups:
            batch = batch_of(frames[None], num_frames, y, torch.tensor([len(labels)]))
            scores[labels] -= len(group.members) * float(group.losses(batch))
    for scorer in scorers:
        logs = {labels: scorer.log_joint(frames, labels) for labels in found}
        total = math.log(sum(map(math.exp, logs.values())))
        scores = {labels: scores[labels] + logs[labels] - total for labels in found}
    size = len(models) + len(scorers)
    return sorted(((score / size, labels) for labels, score in scores.items()), reverse=True)


@pytest.mark.parametrize("backwards", [(False, False, False), (True, False, True), (True,)])
@pytest.mark.parametrize("scorers", [[Waves(30.0)], [Waves(40.0, -700.0), Waves(9.0, 5.0)]])
def test_scorers_rank_what_the_members_find(backwards, scorers):
    models = members()[: len(backwards)]
    for model, is_backwards in zip(models, backwards, strict=True):
        model.backwards = is_backwards
    together, (frames, num_frames) = Ensemble(models, scorers=scorers), utterances(5, 0, 3)
    frames[2, 3:] = 1e3  # padding
    found = search(together, frames, num_frames, beam_width=6, n_best=4)
    assert found[1] == (Hypothesis((), 0.0, 0.0, ()),)
    changed = 0
    for b in (0, 2):
        expected = ranked_by_hand(models, scorers, frames[b, : num_frames[b]], 6)
        assert [h.labels for h in found[b]] == [labels for _, labels in expected[:4]]
        for h, (score, labels) in zip(found[b], expected, strict=False):
            assert h.log_prob == h.score == pytest.approx(score, abs=1e-9)
            assert len(h.timings) == len(labels)
        [alone] = search(
            Ensemble(models), frames[[b], : num_frames[b]], num_frames[[b]], beam_width=6
        )
        changed += alone[0].labels != found[b][0].labels
    assert changed


def test_scorers_do_not_change_the_loss():
    models, (frames, num_frames) = members(), utterances(5)
    batch = batch_of(frames, num_frames, torch.tensor([[1, 2]]), torch.tensor([2]))
    alone, together = Ensemble(models), Ensemble(models, scorers=[Waves()])
    assert torch.equal(alone.losses(batch), together.losses(batch))


def test_scorers_refuse_a_beam_that_gives_them_one_output():
    models, (frames, num_frames) = members(), utterances(5, 4)
    with pytest.raises(ValueError, match="one output to rank; give a wider beam, such as 4"):
        search(Ensemble(models, scorers=[Waves()]), frames, num_frames, beam_width=1)
    both = Ensemble([member(), member(backwards=True)], scorers=[Waves()])
    assert search(both, frames, num_frames, beam_width=1)  # one output of each direction


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
def test_incompatible_members_are_refused(build, said):
    with pytest.raises(ValueError, match=said) as error:
        Ensemble(build())
    assert "\n" not in str(error.value)
