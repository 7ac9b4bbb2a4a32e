"""Teachers of sound, and joint n-gram models. tests/test_training.py trains with transducers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import toy_recipe

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.batches import Batch
from transduce.data.pairs import Notation
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.joint_ngram import JointNGramModel, load_joint_ngram, save_joint_ngram
from transduce.model.signature import Signature
from transduce.training import teachers as module
from transduce.training.checks import TrainingError
from transduce.training.corpus import read_corpus
from transduce.training.fit import fit
from transduce.training.joint_ngram import learn_joint_ngram
from transduce.training.teachers import (
    RANKED,
    JointNGramTeacher,
    _key,
    find_candidates,
    load_teachers,
)

FEATURES = FeatureSettings(kind="log_mel", num_channels=4, num_deltas=0)
CONFIG = NetworkConfig(hidden_size=6, prediction_size=6, pooling=2)
SOUND = Signature(
    Alphabet("abc"),
    Notation("characters", None),
    features=FEATURES,
    statistics=Statistics(torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([0.5, 2.0, 1.0, 4.0])),
)
TEXT = Signature(*[Alphabet("abc"), Notation("characters", None)] * 2)


def teacher_file(tmp_path, signature):
    torch.manual_seed(0)
    network = build_network(CONFIG, signature.input_size, 3)
    path = tmp_path / "teacher.safetensors"
    save_model(TrainedModel(network, CONFIG, signature), path)
    return path


def test_a_teacher_hears_with_its_own_normalisation(tmp_path):
    path = teacher_file(tmp_path, SOUND)
    ours = replace(SOUND, statistics=Statistics(torch.full((4,), 5.0), torch.full((4,), 3.0)))
    (teacher,) = load_teachers([path], ours)
    frames, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    labels, num_labels = torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])
    heard = Batch((), ours.statistics.normalise(frames), lengths, labels, num_labels)
    with torch.no_grad():
        f, g, num_vectors = teacher.network(SOUND.statistics.normalise(frames), lengths, labels)
    expected = next_label_log_probs(f, g, labels, num_vectors, num_labels)
    torch.testing.assert_close(teacher.log_probs(heard), expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_other_inputs_is_refused(tmp_path):
    path = teacher_file(tmp_path, SOUND)
    with pytest.raises(TrainingError, match=r"it reads sound, and the network to be trained text"):
        load_teachers([path], TEXT)
    other = replace(SOUND, features=replace(FEATURES, shift=0.02))
    with pytest.raises(TrainingError, match=r"^train.teacher, .*: it has other features; set data"):
        load_teachers([path], other)
    path = teacher_file(tmp_path, TEXT)
    with pytest.raises(TrainingError, match=r"it reads text, and the network to be trained sound"):
        load_teachers([path], SOUND)


# --- Joint n-gram models ------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture
def toy(tmp_path):
    """Return the toy corpus, the file of a transducer for it, and that of its joint n-grams."""
    data = toy_recipe(tmp_path).data
    corpus, joint = read_corpus(data), tmp_path / "joint.safetensors"
    save_joint_ngram(learn_joint_ngram(data), joint)
    torch.manual_seed(0)
    network = build_network(CONFIG, len(corpus.signature.sources), len(corpus.signature.targets))
    teacher = TrainedModel(network.eval(), CONFIG, corpus.signature)
    save_model(teacher, tmp_path / "teacher.safetensors")
    return corpus, tmp_path / "teacher.safetensors", joint


def turned(path):
    """Write a joint n-gram model with its symbols in the opposite order; return its file."""
    model = load_joint_ngram(path)
    alphabets = model.signature.sources, model.signature.targets
    sources, targets = (Alphabet(one.symbols[::-1]) for one in alphabets)
    corpus = read_corpus(toy_recipe(path.parent).data)
    pairs = [
        tuple(
            np.array(new.encode(old.decode(ids.tolist())))
            for new, old, ids in zip(
                (sources, targets), alphabets, (one.frames, one.labels), strict=True
            )
        )
        for one in corpus.training
    ]
    ngram = type(model.ngram).learn(pairs, len(sources), len(targets))
    signature = replace(model.signature, sources=sources, targets=targets)
    save_joint_ngram(JointNGramModel(ngram, signature), path.parent / "turned.safetensors")
    return path.parent / "turned.safetensors"


def test_candidates_are_scored_by_the_mean_of_transducers_and_joint_models(toy):
    corpus, transducer, joint = toy
    examples = corpus.training[:6]
    [alone], ngram = load_teachers([transducer], corpus.signature), load_joint_ngram(joint).ngram
    for path in (joint, turned(joint)):  # it may have its symbols in another order
        teachers = load_teachers([transducer, path], corpus.signature)
        for example, found in zip(examples, find_candidates(teachers, examples, CPU), strict=True):
            batch = Batch.of([example])
            [outputs] = alone.outputs(batch, RANKED)
            assert set(found) == {tuple(example.labels.tolist()), *outputs}
            assert len(outputs) == RANKED  # more than a greedy search finds
            for labels, score in found.items():
                y = torch.tensor([labels], dtype=torch.int64)
                row, length = torch.tensor([0]), torch.tensor([len(labels)])
                log_likelihood = float(alone.log_likelihoods(batch, row, y, length))
                log_joint = ngram.log_joint(example.frames.numpy(), y[0].numpy())
                assert score == pytest.approx((log_likelihood + log_joint) / 2, abs=1e-4)


def test_the_first_transducer_finds_the_candidates_of_a_joint_model_and_others(toy, tmp_path):
    corpus, first, joint = toy
    torch.manual_seed(1)
    sizes = len(corpus.signature.sources), len(corpus.signature.targets)
    other = TrainedModel(build_network(CONFIG, *sizes).eval(), CONFIG, corpus.signature)
    save_model(other, tmp_path / "other.safetensors")
    paths = [first, tmp_path / "other.safetensors"]
    teachers = load_teachers([*paths, joint], corpus.signature)
    examples = corpus.training[:6]
    together = find_candidates(teachers, examples, CPU)
    alone = find_candidates(load_teachers([first, joint], corpus.signature), examples, CPU)
    turned_round = find_candidates([*teachers[1::-1], teachers[2]], examples, CPU)
    for found, of_first, of_other in zip(together, alone, turned_round, strict=True):
        assert found.keys() == of_first.keys()
        assert found != of_first  # the other one has scored them
        assert found.keys() != of_other.keys()


def test_a_teacher_that_is_named_twice_counts_twice_and_is_asked_once(toy, monkeypatch):
    corpus, transducer, joint = toy
    teachers = load_teachers([transducer, joint, joint], corpus.signature)
    asked, plain = [], JointNGramTeacher.log_likelihoods

    def counted(teacher, *arguments):
        asked.append(teacher)
        return plain(teacher, *arguments)

    monkeypatch.setattr(JointNGramTeacher, "log_likelihoods", counted)
    examples = corpus.training[:6]
    once = find_candidates(teachers[:2], examples, CPU)
    batches = len(asked)
    twice = find_candidates(teachers, examples, CPU)
    assert len(asked) == 2 * batches
    of_transducer = find_candidates([teachers[0], teachers[0], teachers[1]], examples, CPU)
    for one, two, other in zip(once, twice, of_transducer, strict=True):
        assert one.keys() == two.keys() == other.keys()
        for labels, mean in one.items():  # of the two
            assert two[labels] + other[labels] == pytest.approx(2 * mean, abs=1e-4)
            assert two[labels] != pytest.approx(mean, abs=1e-4)


def test_a_student_learns_from_a_transducer_and_a_joint_model(toy, tmp_path):
    _, transducer, joint = toy
    recipe = toy_recipe(tmp_path, teacher=(transducer, joint), distillation=0.5, max_epochs=1)
    recipe = replace(recipe, data=replace(recipe.data, cache=tmp_path / "cache"))
    fit(recipe, tmp_path / "student", validate=lambda model, examples: 0.0)
    assert (tmp_path / "student/model.safetensors").is_file()
    assert list((tmp_path / "cache").glob("candidates-*"))  # which the joint model has scored


def test_joint_models_alone_are_no_teachers(toy):
    corpus, _, joint = toy
    with pytest.raises(TrainingError, match=r"^train.teacher, .*joint.safetensors: it ranks the"):
        load_teachers([joint, joint], corpus.signature)


def test_a_joint_model_of_other_symbols_is_refused(toy):
    corpus, transducer, joint = toy
    ours = corpus.signature
    fewer = replace(ours, targets=Alphabet("ABC"))
    more = replace(ours, targets=Alphabet("ABCDE"))
    strange = replace(ours, sources=Alphabet("abcde"))
    for other, said in (
        (fewer, "it has a label 'D' that the training data do not have"),
        (more, "it has no label 'E'; give"),
        (strange, "it has no source symbol 'e'; give"),
        (SOUND, "it reads text, and the network to be trained does not; leave it out"),
    ):
        with pytest.raises(TrainingError, match=rf"^train.teacher, .*joint.safetensors: {said}"):
            load_teachers([joint, transducer], other)


def test_a_damaged_joint_model_is_an_error_of_training(toy):
    corpus, transducer, joint = toy
    model = load_joint_ngram(joint)
    model.ngram.automaton.suffixes[3] = -1
    save_joint_ngram(model, joint)
    for said in (r"is damaged \(suffixes has", "cannot be read"):
        with pytest.raises(TrainingError, match=rf"^train.teacher: .*joint.safetensors {said}"):
            load_teachers([transducer, joint], corpus.signature)
        joint.write_bytes(joint.read_bytes()[:-100])


def test_the_key_of_cached_candidates_depends_on_how_many_are_ranked(toy, monkeypatch):
    corpus, *paths = toy
    teachers, keys = load_teachers(paths, corpus.signature), set()
    for ranked in (RANKED, RANKED + 1):
        monkeypatch.setattr(module, "RANKED", ranked)
        keys.add(_key(teachers, corpus.training[:2]))
    assert len(keys) == 2


def test_the_key_of_cached_candidates_depends_on_the_joint_model(toy):
    corpus, transducer, joint = toy
    examples = corpus.training[:2]
    keys = set()
    for paths in ([transducer], [transducer, joint], [transducer, turned(joint)]):
        keys.add(_key(load_teachers(paths, corpus.signature), examples))
    teachers = load_teachers([transducer, joint], corpus.signature)
    keys.add(_key(teachers, examples))
    assert len(keys) == 3
    for table in (teachers[1].ngram.keys, *teachers[1].ngram.automaton):
        table[1] += 1
        keys.add(_key(teachers, examples))
    assert len(keys) == 9
