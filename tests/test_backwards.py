"""A transducer that goes backwards: the same network, on sequences that are turned round."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transduce.model.losses import consistent_losses, sequence_losses
from transduce.model.recognition import evaluate, recognise, transcript, validation_error

from transduce import Ensemble
from transduce.alphabet import Alphabet
from transduce.analysis.lattice import view_lattice
from transduce.architectures import NetworkConfig, build_network
from transduce.data.batches import Batch
from transduce.data.pairs import Notation, Origin, Pair
from transduce.decoding import Hypothesis
from transduce.decoding.hypothesis import Timing
from transduce.model.checkpoint import TrainedModel, load_ensemble, load_model, save_model
from transduce.model.signature import Signature
from transduce.sequences import reverse_padded
from transduce.training.pretraining import PretrainingError, check_direction

CHARACTERS = Notation("characters", None)
SIGNATURE = Signature(Alphabet("xyz"), CHARACTERS, Alphabet("abc"), CHARACTERS)
WORDS = [("abcab", "xyx"), ("c", "z"), ("bb", ""), ("cabcc", "zyxz"), ("acb", "xzy")]


def model_of(backwards, seed=0, num_steps=0, **sizes):
    """A transducer of letters; with `num_steps` one that has learnt WORDS."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=12, prediction_size=12) | sizes
    config = NetworkConfig(backwards=backwards, **sizes)
    network = build_network(config, 3, 3)
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    batch = Batch.of(SIGNATURE.examples(pairs_of(WORDS)))
    for _ in range(num_steps):
        optimiser.zero_grad()
        sequence_losses(network, config, batch).mean().backward()
        optimiser.step()
    return TrainedModel(network.eval(), config, SIGNATURE)


def pairs_of(words):
    origin = Origin(Path("words.tsv"), 1)
    return [Pair(word, tuple(word), tuple(said), origin) for word, said in words]


def turned(words):
    return [(word[::-1], said[::-1]) for word, said in words]


def forwards(model):
    """The same network, which takes sequences as they are."""
    return replace(model, config=replace(model.config, backwards=False))


@pytest.fixture(scope="module", params=[1, 2], ids=lambda pooling: f"pooling {pooling}")
def learnt(request):
    return model_of(True, num_steps=200, pooling=request.param)


def test_sequences_are_turned_round_and_padding_stays():
    ids, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]), torch.tensor([4, 2, 0])
    assert reverse_padded(ids, lengths).tolist() == [[4, 3, 2, 1], [6, 5, 0, 0], [0, 0, 0, 0]]
    vectors = torch.randn(2, 5, 3)
    found = reverse_padded(vectors, torch.tensor([3, 5]))
    assert torch.equal(found[0], torch.cat((vectors[0, :3].flip(0), vectors[0, 3:])))
    assert torch.equal(found[1], vectors[1].flip(0))
    assert reverse_padded(torch.zeros(2, 0), torch.tensor([0, 0])).shape == (2, 0)


def test_the_losses_are_those_of_the_sequences_turned_round():
    model = model_of(True)
    batch, round_ = (Batch.of(SIGNATURE.examples(pairs_of(w))) for w in (WORDS, turned(WORDS)))
    expected = sequence_losses(model.network, forwards(model).config, round_)
    found = sequence_losses(model.network, model.config, batch)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, sequence_losses(model.network, forwards(model).config, batch))
    twice = consistent_losses(model.network, model.config, batch.repeat(2))
    also = consistent_losses(model.network, forwards(model).config, round_.repeat(2))
    torch.testing.assert_close(twice, also)


@pytest.mark.parametrize(
    "search",
    [dict(beam_width=1), dict(beam_width=4), dict(beam_width=4, n_best=3, with_timings=True)],
)
def test_what_is_found_is_in_its_own_order(learnt, search):
    examples, round_ = (
        SIGNATURE.examples(pairs_of(w), with_labels=False) for w in (WORDS, turned(WORDS))
    )
    there, back = (
        recognise(learnt, examples, **search),
        recognise(forwards(learnt), round_, **search),
    )
    for (_, said), found, mirrored in zip(WORDS, there, back, strict=True):
        assert "".join(SIGNATURE.targets.decode(found[0].labels)) == said
        assert [h.labels for h in found] == [h.labels[::-1] for h in mirrored]
        assert [h.log_prob for h in found] == [h.log_prob for h in mirrored]


def test_timings_are_counted_from_the_beginning(learnt):
    [example, *_] = SIGNATURE.examples(pairs_of(WORDS), with_labels=False)
    [found] = recognise(learnt, [example], beam_width=4, with_timings=True)
    frames = found[0].frames
    assert list(frames) == sorted(frames) and len(frames) == 3
    last = -(-5 // learnt.config.pooling) - 1
    assert all(0 <= t.start <= t.frame <= t.end <= last for t in found[0].timings)
    lines = transcript(learnt, example, found).as_text(timestamps=True).splitlines()
    assert [line.split("\t")[0] for line in lines] == ["x", "y", "x"]


def test_a_hypothesis_from_the_end():
    timings = (Timing(0, 0, 2, 0.5), Timing(3, 2, 4, 0.9))
    found = Hypothesis((1, 2), -1.0, -0.5, (0, 3), timings).reversed(6)
    assert found.labels == (2, 1) and found.frames == (2, 5)
    assert found.timings == (Timing(2, 1, 3, 0.9), Timing(5, 3, 5, 0.5))
    assert found.reversed(6) == Hypothesis((1, 2), -1.0, -0.5, (0, 3), timings)


def test_evaluation_has_nothing_to_know_of_it(learnt):
    pairs = pairs_of([pair for pair in WORDS if pair[1]])
    assert evaluate(learnt, pairs).error == 0
    assert validation_error(learnt, SIGNATURE.examples(pairs)) == 0


def test_a_model_remembers_its_way(tmp_path, learnt):
    save_model(learnt, tmp_path)
    assert load_model(tmp_path).config.backwards


# --- In an ensemble -----------------------------------------------------------------------------


def asked(words):
    batch = Batch.of(SIGNATURE.examples(pairs_of(words)))
    return batch.frames, batch.num_frames, batch.labels, batch.num_labels


def networks(*models):
    return [model.network for model in models], [model.config.backwards for model in models]


def test_an_ensemble_of_one_is_the_model(learnt):
    alone = sequence_losses(
        learnt.network, learnt.config, Batch.of(SIGNATURE.examples(pairs_of(WORDS)))
    )
    together = Ensemble(*networks(learnt))
    torch.testing.assert_close(together.losses(*asked(WORDS)), alone.double(), atol=1e-4, rtol=1e-4)
    frames, num_frames, *_ = asked(WORDS)
    found = together.search(frames, num_frames, beam_width=4)
    examples = SIGNATURE.examples(pairs_of(WORDS), with_labels=False)
    expected = recognise(learnt, examples, beam_width=4, with_timings=True)
    assert [best[0].labels for best in found] == [best[0].labels for best in expected]
    for (one, *_), (other, *_) in zip(found, expected, strict=True):
        assert one.frames == other.frames
        assert [t[:3] for t in one.timings] == [t[:3] for t in other.timings]


def test_parties_are_weighed_by_their_members():
    models = model_of(False, 1), model_of(True, 2), model_of(True, 3)
    together = Ensemble(*networks(*models)).losses(*asked(WORDS))
    there = Ensemble(*networks(models[0])).losses(*asked(WORDS))
    back = Ensemble(*networks(*models[1:])).losses(*asked(WORDS))
    torch.testing.assert_close(together, there / 3 + 2 * back / 3)


@pytest.mark.parametrize("ways", [(False, True), (True, False), (True, False, True)])
def test_a_wide_search_of_both_parties_finds_the_most_probable_of_all(ways):
    models = [model_of(way, seed, 20) for seed, way in enumerate(ways)]
    together = Ensemble(*networks(*models))
    every = ["".join(said) for n in range(4) for said in product("xyz", repeat=n)]
    losses = together.losses(*asked([("abc", said) for said in every])).tolist()
    frames, num_frames, *_ = asked([("cc", ""), ("abc", "")])
    found = together.search(frames, num_frames, beam_width=200, n_best=200)[1]
    short = [h for h in found if len(h.labels) <= 3]
    assert len(short) == len(every)
    said = {"".join(SIGNATURE.targets.decode(h.labels)): h.log_prob for h in short}
    for one, loss in zip(every, losses, strict=True):
        assert said[one] == pytest.approx(-loss, abs=1e-6)
    assert [h.log_prob for h in found] == sorted((h.log_prob for h in found), reverse=True)
    assert all(list(h.frames) == sorted(h.frames) for h in found)


@pytest.mark.parametrize("never", [0, 1])
def test_what_one_party_finds_impossible_is_not_found(never):
    models = model_of(False, 1), model_of(True, 2)
    with torch.no_grad():
        models[never].network.prediction_network.output.bias[1] = -torch.inf
    together = Ensemble(*networks(*models))
    losses = together.losses(*asked([("abc", "yxz"), ("ab", "yz"), ("ab", "x")]))
    assert losses[[0, 2]].tolist() == [torch.inf, torch.inf] and losses[1].isfinite()
    frames, num_frames, *_ = asked([("abc", "")])
    [found] = together.search(frames, num_frames, beam_width=30, n_best=4)
    assert all(h.log_prob > -torch.inf and 1 not in h.labels for h in found)


def test_an_utterance_without_frames_has_the_empty_output():
    together = Ensemble(*networks(model_of(False), model_of(True)))
    frames, num_frames, *_ = asked(WORDS[:2])
    num_frames = torch.tensor([0, 1])
    found = together.search(frames, num_frames, beam_width=2)
    assert [h.labels for h in found[0]] == [()] and found[1][0].log_prob < 0
    assert together.search(frames, torch.tensor([0, 0]), beam_width=2)[1][0].labels == ()


def test_files_of_both_ways_make_an_ensemble(tmp_path, learnt):
    other = model_of(False, 1, 200)
    save_model(learnt, tmp_path / "back.safetensors")
    save_model(other, tmp_path / "there.safetensors")
    together = load_ensemble([tmp_path / "back.safetensors", tmp_path / "there.safetensors"])
    pairs = pairs_of([pair for pair in WORDS if pair[1]])
    assert evaluate(together, pairs, beam_width=4).error == 0
    assert evaluate(together, pairs).bits_per_label < 0.5


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ctc", "prediction"])
def test_only_transducers_go_backwards(kind):
    with pytest.raises(ValueError, match=f"backwards is for a transducer, not {kind}"):
        NetworkConfig(kind, backwards=True)


def test_weights_to_begin_with_go_the_same_way():
    check_direction(model_of(True), True)
    with pytest.raises(PretrainingError, match="it goes forwards, and the network to be trained b"):
        check_direction(model_of(False), True)
    with pytest.raises(PretrainingError, match="it goes backwards, and"):
        check_direction(model_of(True), False)


def test_an_ensemble_is_told_of_every_member():
    with pytest.raises(ValueError, match="told so of 1 where there are 2"):
        Ensemble([model_of(False).network] * 2, [True])


def test_its_lattice_is_not_shown(learnt):
    with pytest.raises(ValueError, match=r"a transducer that goes backwards.*; give one that"):
        view_lattice(learnt, torch.tensor([1, 2]), [1])
