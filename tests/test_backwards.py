"""Transducers that read backwards: the same network on reversed sequences."""

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from transduce import Ensemble, SearchOptions, beam_search, greedy_search
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.data.batches import Batch
from transduce.data.pairs import Notation, Origin, Pair
from transduce.decoding import Hypothesis
from transduce.decoding.hypothesis import Timing
from transduce.model.checkpoint import TrainedModel, load_ensemble, load_model, save_model
from transduce.model.evaluate import evaluate, validation_error
from transduce.model.model import Model, search_examples
from transduce.model.signature import Signature
from transduce.sequences import reverse_padded
from transduce.training.pretraining import PretrainingError, check_direction

CHARACTERS = Notation("characters", None)
SIGNATURE = Signature(Alphabet("xyz"), CHARACTERS, Alphabet("abc"), CHARACTERS)
WORDS = [("abcab", "xyx"), ("c", "z"), ("bb", ""), ("cabcc", "zyxz"), ("acb", "xzy")]
WIDE = SearchOptions(4, with_timings=False)


def model_of(backwards, seed=0, num_steps=0, **sizes):
    """Return a transducer of letters, trained on WORDS for `num_steps`."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=12, prediction_size=12) | sizes
    config = NetworkConfig(backwards=backwards, **sizes)
    network = build_network(config, 3, 3)
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    batch = batch_of(WORDS)
    for _ in range(num_steps):
        optimiser.zero_grad()
        network.losses(batch).mean().backward()
        optimiser.step()
    return TrainedModel(network.eval(), config, SIGNATURE)


def pairs_of(words):
    origin = Origin(Path("words.tsv"), 1)
    return [Pair(word, tuple(word), tuple(said), origin) for word, said in words]


def batch_of(words):
    return Batch.of(SIGNATURE.examples(pairs_of(words)))


def reverse_words(words):
    return [(word[::-1], said[::-1]) for word, said in words]


def forwards(model):
    """Return a model with the same weights that reads forwards."""
    network = copy.copy(model.network)
    network.backwards = False
    return replace(model, network=network, config=replace(model.config, backwards=False))


@pytest.fixture(scope="module", params=[1, 2], ids=lambda pooling: f"pooling {pooling}")
def learnt(request):
    return model_of(True, num_steps=200, pooling=request.param)


def test_sequences_are_reversed_and_padding_stays():
    ids, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]), torch.tensor([4, 2, 0])
    assert reverse_padded(ids, lengths).tolist() == [[4, 3, 2, 1], [6, 5, 0, 0], [0, 0, 0, 0]]
    vectors = torch.randn(2, 5, 3)
    found = reverse_padded(vectors, torch.tensor([3, 5]))
    assert torch.equal(found[0], torch.cat((vectors[0, :3].flip(0), vectors[0, 3:])))
    assert torch.equal(found[1], vectors[1].flip(0))
    assert reverse_padded(torch.zeros(2, 0), torch.tensor([0, 0])).shape == (2, 0)


def test_the_losses_are_those_of_the_reversed_sequences():
    model = model_of(True)
    batch, reversed_batch = batch_of(WORDS), batch_of(reverse_words(WORDS))
    forward = forwards(model).network
    found = model.network.losses(batch)
    torch.testing.assert_close(found, forward.losses(reversed_batch))
    assert not torch.allclose(found, forward.losses(batch))
    twice = model.network.consistency_losses(batch.repeat(2))
    torch.testing.assert_close(twice, forward.consistency_losses(reversed_batch.repeat(2)))


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(1, with_timings=False),
        SearchOptions(4, with_timings=False),
        SearchOptions(4, n_best=3),
    ],
    ids=["greedy", "beam", "n-best"],
)
def test_the_search_returns_labels_in_forward_order(learnt, options):
    examples, reversed_examples = (
        SIGNATURE.examples(pairs_of(words), with_labels=False)
        for words in (WORDS, reverse_words(WORDS))
    )
    backward = search_examples(learnt, examples, options)
    forward = search_examples(forwards(learnt), reversed_examples, options)
    for (_, said), found, mirrored in zip(WORDS, backward, forward, strict=True):
        assert "".join(SIGNATURE.targets.decode(found[0].labels)) == said
        assert [h.labels for h in found] == [h.labels[::-1] for h in mirrored]
        assert [h.log_prob for h in found] == [h.log_prob for h in mirrored]


@pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_the_search_functions_equal_the_forward_search_of_reversed_frames(learnt, search, backend):
    batch, reversed_batch = batch_of(WORDS), batch_of(reverse_words(WORDS))
    pooling = learnt.config.pooling

    def run(network, batch):
        if search == "greedy":
            found = greedy_search(network, batch.frames, batch.num_frames, backend=backend)
            return [[hypothesis] for hypothesis in found]
        options = dict(beam_width=4, n_best=3, backend=backend)
        return beam_search(network, batch.frames, batch.num_frames, **options)

    backward = run(learnt.network, batch)
    forward = run(forwards(learnt).network, reversed_batch)
    for (word, _), found, mirrored in zip(WORDS, backward, forward, strict=True):
        num_vectors = -(-len(word) // pooling)
        assert found == [hypothesis.reversed(num_vectors) for hypothesis in mirrored]
    said = ["".join(SIGNATURE.targets.decode(found[0].labels)) for found in backward]
    assert said == [said for _, said in WORDS]


def test_timings_count_from_the_beginning(learnt):
    [example, *_] = SIGNATURE.examples(pairs_of(WORDS), with_labels=False)
    [found] = search_examples(learnt, [example], SearchOptions(4))
    frames = found[0].frames
    assert list(frames) == sorted(frames) and len(frames) == 3
    last = -(-5 // learnt.config.pooling) - 1
    assert all(0 <= t.start <= t.frame <= t.end <= last for t in found[0].timings)
    transcript = Model.of(learnt).transcript(example, found)
    lines = transcript.as_text(timestamps=True).splitlines()
    assert [line.split("\t")[0] for line in lines] == ["x", "y", "x"]


def test_a_hypothesis_is_reversed_with_its_frames_and_timings():
    timings = (Timing(0, 0, 2, 0.5), Timing(3, 2, 4, 0.9))
    found = Hypothesis((1, 2), -1.0, -0.5, (0, 3), timings).reversed(6)
    assert found.labels == (2, 1) and found.frames == (2, 5)
    assert found.timings == (Timing(2, 1, 3, 0.9), Timing(5, 3, 5, 0.5))
    assert found.reversed(6) == Hypothesis((1, 2), -1.0, -0.5, (0, 3), timings)


def test_evaluation_compares_outputs_in_forward_order(learnt):
    pairs = pairs_of([pair for pair in WORDS if pair[1]])
    assert evaluate(learnt, pairs).error == 0
    assert validation_error(learnt, SIGNATURE.examples(pairs)) == 0


def test_a_model_file_keeps_the_direction(tmp_path, learnt):
    save_model(learnt, tmp_path)
    found = load_model(tmp_path)
    assert found.config.backwards and found.network.backwards


# --- In an ensemble -----------------------------------------------------------------------------


def ensemble_of(*models):
    return Ensemble([model.network for model in models])


def test_an_ensemble_of_one_is_the_model(learnt):
    alone = learnt.network.losses(batch_of(WORDS))
    together = ensemble_of(learnt)
    found = together.losses(batch_of(WORDS))
    torch.testing.assert_close(found, alone.double(), atol=1e-4, rtol=1e-4)
    found = together.search(batch_of(WORDS), SearchOptions(4))
    examples = SIGNATURE.examples(pairs_of(WORDS), with_labels=False)
    expected = search_examples(learnt, examples, SearchOptions(4))
    assert [best[0].labels for best in found] == [best[0].labels for best in expected]
    for (one, *_), (other, *_) in zip(found, expected, strict=True):
        assert one.frames == other.frames
        assert [t[:3] for t in one.timings] == [t[:3] for t in other.timings]


def test_directions_are_weighted_by_their_numbers_of_members():
    models = model_of(False, 1), model_of(True, 2), model_of(True, 3)
    together = ensemble_of(*models).losses(batch_of(WORDS))
    forward = ensemble_of(models[0]).losses(batch_of(WORDS))
    backward = ensemble_of(*models[1:]).losses(batch_of(WORDS))
    torch.testing.assert_close(together, forward / 3 + 2 * backward / 3)


@pytest.mark.parametrize("directions", [(False, True), (True, False), (True, False, True)])
def test_a_wide_search_in_both_directions_finds_the_most_probable_sequences(directions):
    models = [model_of(backwards, seed, 20) for seed, backwards in enumerate(directions)]
    together = ensemble_of(*models)
    every = ["".join(said) for n in range(4) for said in product("xyz", repeat=n)]
    losses = together.losses(batch_of([("abc", said) for said in every])).tolist()
    options = SearchOptions(200, n_best=200)
    found = together.search(batch_of([("cc", ""), ("abc", "")]), options)[1]
    short = [h for h in found if len(h.labels) <= 3]
    assert len(short) == len(every)
    said = {"".join(SIGNATURE.targets.decode(h.labels)): h.log_prob for h in short}
    for one, loss in zip(every, losses, strict=True):
        assert said[one] == pytest.approx(-loss, abs=1e-6)
    assert [h.log_prob for h in found] == sorted((h.log_prob for h in found), reverse=True)
    assert all(list(h.frames) == sorted(h.frames) for h in found)


@pytest.mark.parametrize("never", [0, 1])
def test_sequences_that_one_direction_finds_impossible_are_not_returned(never):
    models = model_of(False, 1), model_of(True, 2)
    with torch.no_grad():
        models[never].network.prediction_network.output.bias[1] = -torch.inf
    together = ensemble_of(*models)
    losses = together.losses(batch_of([("abc", "yxz"), ("ab", "yz"), ("ab", "x")]))
    assert losses[[0, 2]].tolist() == [torch.inf, torch.inf] and losses[1].isfinite()
    [found] = together.search(batch_of([("abc", "")]), SearchOptions(30, n_best=4))
    assert all(h.log_prob > -torch.inf and 1 not in h.labels for h in found)


def test_an_utterance_without_frames_has_the_empty_output():
    together = ensemble_of(model_of(False), model_of(True))
    batch = replace(batch_of(WORDS[:2]), num_frames=torch.tensor([0, 1]))
    found = together.search(batch, SearchOptions(2))
    assert [h.labels for h in found[0]] == [()] and found[1][0].log_prob < 0
    batch = replace(batch, num_frames=torch.tensor([0, 0]))
    assert together.search(batch, SearchOptions(2))[1][0].labels == ()


def test_files_of_both_directions_make_an_ensemble(tmp_path, learnt):
    other = model_of(False, 1, 200)
    save_model(learnt, tmp_path / "backward.safetensors")
    save_model(other, tmp_path / "forward.safetensors")
    together = load_ensemble([tmp_path / "backward.safetensors", tmp_path / "forward.safetensors"])
    pairs = pairs_of([pair for pair in WORDS if pair[1]])
    assert evaluate(together, pairs, WIDE).error == 0
    assert evaluate(together, pairs).bits_per_label < 0.5


def test_an_ensemble_asks_its_members_for_their_directions():
    members = [model_of(backwards).network for backwards in (True, False, True)]
    assert Ensemble(members).directions == (True, False)
    assert Ensemble(members[::2]).directions == (True,)
    with pytest.raises(TypeError):
        Ensemble(members, [True, False, True])


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ctc", "prediction"])
def test_only_transducers_read_backwards(kind):
    with pytest.raises(ValueError, match=f"backwards is for a transducer, not {kind}"):
        NetworkConfig(kind, backwards=True)


def test_initial_weights_must_come_from_a_network_of_the_same_direction():
    check_direction(model_of(True), True)
    with pytest.raises(PretrainingError, match="it reads forwards, and the network to be trained"):
        check_direction(model_of(False), True)
    with pytest.raises(PretrainingError, match="it reads backwards, and"):
        check_direction(model_of(True), False)
