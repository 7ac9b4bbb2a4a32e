"""Batches of an epoch: the same whatever the threads and processes, and changed sound."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from memory import extra_megabytes, needs_proc
from rich.console import Console
from safetensors.torch import load_file
from toys import sound_recipe, toy_recipe

from transduce.audio.augmentation import Augmenter, SoundAugment
from transduce.data.batches import Batches, UnreadExamples
from transduce.data.manifest import read_manifest
from transduce.data.pairs import DataError
from transduce.training import loading
from transduce.training.checks import TrainingError
from transduce.training.corpus import CHARACTERS, read_corpus
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
        return [(batch.frames, batch.num_frames, batch.labels) for _, batch in found]


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


# --- A training set that memory does not hold ---------------------------------------------------


def unread(recipe, **data):
    return replace(recipe, data=replace(recipe.data, memory=0.0, **data))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["transducer", "ctc"])
def test_a_training_set_that_is_not_kept_gives_the_same_weights(tmp_path, kind, cached):
    """As long as its statistics are over all pairs, as those of 2000 pairs and fewer are."""
    recipe = sound_recipe(tmp_path, kind, max_epochs=2)
    run(recipe, tmp_path / "kept")
    lazy = unread(recipe, cache=tmp_path / "cache" if cached else None)
    run(lazy, tmp_path / "unread")
    assert isinstance(read_corpus(lazy.data).training, UnreadExamples)
    kept, again = (load_file(tmp_path / name / "last.safetensors") for name in ("kept", "unread"))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_an_epoch_in_its_order_does_not_depend_on_threads_or_processes(tmp_path):
    corpus = read_corpus(unread(sound_recipe(tmp_path)).data)
    kept = read_corpus(sound_recipe(tmp_path).data)
    orders = [Batches(c.training, 10**6, 3, max_sequences=4).epoch(2) for c in (corpus, kept)]
    assert orders[0] == orders[1]
    loaders = [Loader(corpus.training, corpus.signature) for _ in range(2)]
    loaders[0].num_threads, loaders[1].num_threads = 1, 6
    found = [loaded(loader, 2, orders[0]) for loader in loaders]
    assert same(*found)
    assert same(found[0], loaded(Loader(kept.training, kept.signature), 2, orders[0]))


def test_bad_sounds_are_left_out_when_they_are_met_and_counted(tmp_path):
    recipe = unread(sound_recipe(tmp_path, max_epochs=2, max_sequences=1))
    first = read_corpus(recipe.data).training.pair(0)
    first.source.path.write_bytes(b"no sound")
    said = rf"sounds.jsonl, line {first.origin.line}: .* is not audio that can be read"
    with pytest.raises(DataError, match=said):
        run(recipe, tmp_path / "stops")
    console = Console(record=True, width=500)
    recipe = unread(recipe, skip_bad=True)
    model = fit(recipe, tmp_path / "goes on", progress=Progress(console))
    assert model.status.epoch == 2
    text = console.export_text()
    assert text.count("skipped 1 of 20") == 2
    assert f"line {first.origin.line}: " in text


def test_a_set_without_a_readable_sound_ends_with_the_first_error(tmp_path):
    recipe = unread(sound_recipe(tmp_path), skip_bad=True)
    corpus = read_corpus(recipe.data)
    for file in tmp_path.glob("*.wav"):
        file.unlink()
    loader = Loader(corpus.training, corpus.signature, skip_bad=True)
    with pytest.raises(DataError, match=r"no pair can be read; the first error is: .*line 1: "):
        loaded(loader, 0, [[0, 1]])


def test_a_sound_of_another_sample_rate_is_refused_unless_it_may_be_converted(tmp_path):
    corpus = read_corpus(sound_recipe(tmp_path).data)
    rate = corpus.signature.features.sample_rate
    for file in tmp_path.glob("*.wav"):
        soundfile.write(file, np.zeros(4 * rate), 2 * rate)
    augmenter = Augmenter(SoundAugment(gain=1e-30), rate, 0)
    with pytest.raises(DataError, match=f"has {2 * rate} samples a second"):
        loaded(Loader(corpus.training, corpus.signature, augmenter), 0, [[0]])
    ((frames, _, _),) = loaded(
        Loader(corpus.training, corpus.signature, augmenter, convert=True), 0, [[0]]
    )
    step = corpus.signature.features.shift
    assert frames.shape[1] == pytest.approx(2 / step, abs=3)


def test_no_more_is_read_than_will_soon_be_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "FRAMES_AHEAD", 1)
    corpus = read_corpus(unread(sound_recipe(tmp_path)).data)
    calls, read = [], corpus.training.read
    corpus.training.read = lambda pair: calls.append(pair) or read(pair)
    loader = Loader(corpus.training, corpus.signature)
    loader.num_threads = 2
    with closing(loader.load(0, [[i] for i in range(20)])) as batches:
        for taken in (1, 2):
            next(batches)
            time.sleep(0.5)
            assert taken <= len(calls) <= taken + 2


def measure_epochs(folder):
    """Print the megabytes that an epoch takes, and those of frames that are all held."""
    recipe = sound_recipe(folder)
    samples = np.random.default_rng(0).standard_normal(8000 * 20).astype(np.float32) / 10
    soundfile.write(folder / "long.wav", samples, 8000)
    line = json.dumps({"audio_filepath": "long.wav", "duration": 20.0, "text": "abc"})
    (folder / "sounds.jsonl").write_text(f"{line}\n" * 100)
    features = replace(recipe.data.features, num_channels=50)
    (folder / "validation.jsonl").write_text(line)
    data = replace(recipe.data, validation=folder / "validation.jsonl", num_validation=0)
    corpus = read_corpus(replace(data, features=features, memory=0.01))
    assert isinstance(corpus.training, UnreadExamples)
    loading.FRAMES_AHEAD = 1
    loader = Loader(corpus.training, corpus.signature)
    loader.num_threads = 2

    def epoch(number):
        with closing(loader.load(number, [[i] for i in range(100)])) as batches:
            return sum(batch.frames.nbytes for _, batch in batches)

    assert epoch(0) == pytest.approx(40e6, rel=0.01)
    flat = extra_megabytes(lambda: epoch(1))
    held = []
    with closing(loader.load(2, [[i] for i in range(100)] * 4)) as batches:
        print(flat, extra_megabytes(lambda: held.extend(batches)))


@needs_proc
@pytest.mark.slow
def test_memory_stays_flat_over_an_epoch(tmp_path):
    """Frames of 40 MB in all, of which a few are in memory at a time.

    In a process of its own: memory that earlier tests have freed would be used again, uncounted.
    """
    code = "import sys, pathlib, test_loading as t; t.measure_epochs(pathlib.Path(sys.argv[1]))"
    command = (sys.executable, "-c", code, tmp_path)
    here = Path(__file__).parent
    paths = os.pathsep.join((str(here), str(here.parent)))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    flat, held = map(float, done.stdout.split())
    assert flat < 12
    assert held > 60  # the measure sees frames


def test_a_teacher_needs_the_training_set_in_memory(tmp_path):
    recipe = sound_recipe(tmp_path, max_epochs=1)
    run(recipe, tmp_path / "teacher")
    student = unread(replace(recipe, train=replace(recipe.train, teacher=(tmp_path / "teacher",))))
    with pytest.raises(TrainingError, match=r"train\.teacher keeps its distributions in memory"):
        run(student, tmp_path / "student")


@pytest.mark.parametrize("memory", [8.0, 0.0])
def test_sounds_of_another_rate_are_changed_where_they_are_converted(tmp_path, memory):
    recipe = sound_recipe(tmp_path, max_epochs=1, sound=SOUND)
    features = replace(recipe.data.features, sample_rate=16000)
    data = replace(recipe.data, features=features, convert=True, memory=memory)
    assert run(replace(recipe, data=data), tmp_path / "run").status.step > 0
    with pytest.raises(DataError, match=r"--data\.convert"):
        run(replace(recipe, data=replace(data, convert=False)), tmp_path / "refused")


@pytest.mark.parametrize("memory", [8.0, 0.0])
def test_sounds_in_a_tar_archive_are_changed_and_trained_on(tmp_path, memory):
    recipe = sound_recipe(tmp_path, max_epochs=1, sound=SOUND)
    with tarfile.open(tmp_path / "sounds.tar", "w") as archive:
        for pair in read_manifest(recipe.data.training, CHARACTERS):
            text = "".join(pair.target).encode()
            archive.add(pair.source.path, f"{pair.name}.wav")
            member = tarfile.TarInfo(f"{pair.name}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    data = replace(recipe.data, training=tmp_path / "sounds.tar", memory=memory)
    found = run(replace(recipe, data=data), tmp_path / "tar").network.state_dict()
    files = replace(recipe, data=replace(recipe.data, memory=memory))
    expected = run(files, tmp_path / "files").network.state_dict()
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())
