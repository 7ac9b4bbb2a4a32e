"""Batches of an epoch: the same whatever the threads and processes, and changed sound."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from toys import sound_recipe, toy_recipe

from transduce.audio.augmentation import Augmenter, SoundAugment
from transduce.data.batches import Batches
from transduce.data.pairs import DataError
from transduce.training.checks import TrainingError
from transduce.training.corpus import read_corpus
from transduce.training.fit import fit
from transduce.training.loading import Loader
from transduce.training.progress import Progress

SOUND = SoundAugment(speed=0.7, room=0.5, gain=0.5, band=0.5, codec=0.5)


def run(recipe, folder, **options):
    return fit(recipe, folder, progress=Progress(Console(quiet=True)), **options)


def loader_of(corpus, num_threads=2, settings=SOUND, seed=0):
    rate = corpus.signature.features.sample_rate
    loader = Loader(corpus.training, corpus.signature, Augmenter(settings, rate, seed))
    loader.num_threads = num_threads
    return loader


def loaded(loader, epoch, batches):
    with closing(loader.load(epoch, batches)) as found:
        return [(batch.frames, batch.num_frames, batch.labels) for batch in found]


def same(these, those):
    return len(these) == len(those) and all(
        torch.equal(a, b)
        for ours, theirs in zip(these, those, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_changed_sound_does_not_depend_on_the_number_of_threads_or_the_order(tmp_path):
    corpus = read_corpus(sound_recipe(tmp_path).data)
    batches = Batches(corpus.training, 10**6, 0, max_sequences=3).epoch(1)
    found = loaded(loader_of(corpus, 1), 1, batches)
    assert same(loaded(loader_of(corpus, 5), 1, batches), found)
    backwards = loaded(loader_of(corpus, 3), 1, batches[::-1])
    assert same(backwards[::-1], found)
    assert not same(loaded(loader_of(corpus, 1), 2, batches), found)
    assert not same(loaded(loader_of(corpus, 1, seed=1), 1, batches), found)


def test_the_shares_of_two_processes_are_the_sounds_of_one(tmp_path):
    corpus = read_corpus(sound_recipe(tmp_path).data)
    ids = [4, 0, 7, 2, 9]
    ((whole, lengths, _),) = loaded(loader_of(corpus), 0, [ids])
    for rank in range(2):
        ((share, counts, _),) = loaded(loader_of(corpus), 0, [ids[rank::2]])
        assert counts.tolist() == lengths[rank::2].tolist()
        for ours, theirs, length in zip(share, whole[rank::2], counts, strict=True):
            assert torch.equal(ours[:length], theirs[:length])


def test_without_changes_the_frames_of_sound_are_those_in_memory(tmp_path):
    """A probability that is never met: sound is read again, and nothing happens to it."""
    corpus = read_corpus(sound_recipe(tmp_path).data)
    batches = Batches(corpus.training, 10**6, 0, max_sequences=4).epoch(0)
    found = loaded(loader_of(corpus, settings=SoundAugment(gain=1e-30)), 0, batches)
    assert same(found, loaded(Loader(corpus.training, corpus.signature), 0, batches))


def test_sound_that_is_gone_is_one_sentence_when_it_is_met(tmp_path):
    corpus = read_corpus(sound_recipe(tmp_path).data)
    gone = corpus.training[3].pair
    gone.source.path.unlink()
    with pytest.raises(DataError, match=rf"sounds.jsonl, line \d+: there is no file .*{gone.name}"):
        loaded(loader_of(corpus), 0, [[0, 1], [2, 3]])


def test_no_batch_is_larger_than_allowed_at_the_lowest_speed(tmp_path):
    corpus = read_corpus(sound_recipe(tmp_path).data)
    slow = SoundAugment(speed=1.0, slowest=0.5, fastest=0.5)
    batches = Batches(corpus.training, 600, 0, stretch=2.0)
    order = batches.epoch(0)
    assert order != Batches(corpus.training, 600, 0).epoch(0)
    shapes = [batches.shape(ids) for ids in order]
    for (B, T, U), (frames, _, labels) in zip(
        shapes, loaded(loader_of(corpus, settings=slow), 0, order), strict=True
    ):
        assert frames.shape[0] == B and labels.shape[1] == U
        assert T - 3 <= frames.shape[1] <= T + 3


@pytest.mark.parametrize("kind", ["transducer", "ctc"])
def test_training_with_changed_sound_resumes_to_the_same_weights(tmp_path, kind):
    recipe = sound_recipe(tmp_path, kind, sound=SOUND, max_epochs=3)
    run(recipe, tmp_path / "whole")
    part = replace(recipe, train=replace(recipe.train, max_epochs=1))
    run(part, tmp_path / "parts")
    run(recipe, tmp_path / "parts", resume=True)
    plain = replace(recipe, train=replace(recipe.train, sound=SoundAugment()))
    run(plain, tmp_path / "plain")
    whole, parts, other = (
        load_file(tmp_path / name / "last.safetensors") for name in ("whole", "parts", "plain")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not all(torch.equal(whole[name], other[name]) for name in whole)


def test_ctc_leaves_out_what_is_too_short_at_the_highest_speed(tmp_path):
    """At double speed, 60 ms of sound for each letter are 3 frames; pooling leaves fewer."""
    recipe = sound_recipe(tmp_path, "ctc", max_epochs=1)
    fast = SoundAugment(speed=1.0, slowest=2.0, fastest=2.0)
    recipe = replace(recipe, train=replace(recipe.train, sound=fast))
    recipe = replace(recipe, network=replace(recipe.network, pooling=2))
    console = Console(record=True, width=200)
    fit(recipe, tmp_path / "run", progress=Progress(console))
    assert "CTC cannot align" in console.export_text()


def test_text_has_no_sound_to_change(tmp_path):
    recipe = toy_recipe(tmp_path, sound=SOUND)
    with pytest.raises(TrainingError, match=r"train\.sound changes sound, and the training data"):
        run(recipe, tmp_path / "run")
