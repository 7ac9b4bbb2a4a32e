"""Sets of teachers, a model for each language. tests/test_teachers.py has the other teachers."""

import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import toy_recipe

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.data.batches import Batch
from transduce.data.dictionaries import DECOMPOSED
from transduce.data.pairs import Notation
from transduce.decoding.options import SearchOptions
from transduce.model.checkpoint import TrainedModel, load_model, save_model
from transduce.model.joint_ngram import load_joint_ngram, save_joint_ngram
from transduce.model.signature import Signature
from transduce.training import teachers as module
from transduce.training.checks import TrainingError
from transduce.training.corpus import DataConfig, read_corpus
from transduce.training.fit import fit
from transduce.training.joint_ngram import learn_joint_ngram
from transduce.training.teacher_models import LEAST_LOG_LIKELIHOOD, JointNGramTeacher, Teacher
from transduce.training.teachers import (
    RANKED,
    _key,
    candidate_targets,
    find_candidates,
    load_teachers,
    transducers,
)

CPU = torch.device("cpu")
# The phonemes of the letters of two languages, which share the letter c and a phoneme.
PHONEMES = {"dut": {"a": "A", "b": "B", "c": "C"}, "kor": {"c": "C", "d": "D", "e": "E"}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a corpus of two languages, and models of each and of both."""
    folder, draw = tmp_path_factory.mktemp("languages"), random.Random(0)
    for split in ("train", "dev", "test"):
        (folder / split).mkdir()
        for code, phonemes in PHONEMES.items():
            words = ["".join(phonemes)]
            words += ["".join(draw.choices([*phonemes], k=n % 4 + 1)) for n in range(11)]
            lines = (f"{word}\t{' '.join(phonemes[c] for c in word)}\n" for word in words)
            (folder / split / f"{code}_{split}.tsv").write_text("".join(lines))
    for code in PHONEMES:
        train(folder, f"own-{code}", code, backwards=code == "kor")
        joint = learn_joint_ngram(data_of(folder, code))
        save_joint_ngram(joint, folder / f"joint-{code}.safetensors")
    train(folder, "both")
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "folder"))


def data_of(folder, language="all"):
    return DataConfig("sigmorphon", folder, language=language, source_notation=DECOMPOSED)


def read(folder, language="all"):
    return read_corpus(data_of(folder, language))


def train(folder, name, language="all", backwards=False):
    """Train a small transducer for a few epochs."""
    recipe = toy_recipe(folder, max_epochs=12)
    network = replace(recipe.network, backwards=backwards)
    recipe = replace(recipe, data=data_of(folder, language), network=network)
    fit(recipe, folder / name, validate=lambda model, examples: 0.0)


def alone(example, signature, labels):
    """Return an example's input without its language, and labels of ours, for another signature."""
    frames = torch.tensor(signature.sources.encode(example.pair.source[4:]))
    y = torch.tensor(signature.targets.encode(labels), dtype=torch.int64)
    return Batch.of([replace(example, frames=frames, labels=y)])


def test_the_model_of_an_inputs_language_scores_the_candidates_and_finds_one(folder):
    corpus, decode = read(folder), read(folder).signature.targets.decode
    [teacher] = load_teachers([folder / "own-{}"], corpus.signature)
    examples = corpus.training[::-2]
    assert {example.pair.name[:4] for example in examples} == {"dut:", "kor:"}
    lengths = set()
    for example, found in zip(examples, find_candidates([teacher], examples, CPU), strict=True):
        model = load_model(folder / f"own-{example.pair.name[:3]}")
        empty = alone(example, model.signature, ())
        [[best]] = model.network.search(empty, SearchOptions(with_timings=False))
        output = tuple(model.signature.targets.decode(best.labels))
        lengths.add(len(output))
        written = {tuple(decode(labels)): value for labels, value in found.items()}
        assert written.keys() == {example.pair.target, output}
        for labels, log_likelihood in written.items():
            loss = model.network.losses(alone(example, model.signature, labels))
            assert log_likelihood == pytest.approx(-loss.item(), abs=1e-4)
    assert len(lengths) > 2


def test_a_set_counts_as_one_teacher(folder):
    corpus = read(folder)
    own, both, joint = (folder / f"{name}" for name in ("own-{}", "both", "joint-{}.safetensors"))
    teachers = load_teachers([own, both, own], corpus.signature)
    assert teachers[0] is teachers[2]
    assert transducers(teachers) == [teachers[1]]  # so that there are no exact targets
    each = [find_candidates([teacher], corpus.training, CPU) for teacher in teachers]
    together = find_candidates(teachers, corpus.training, CPU)
    for example, found, *others in zip(corpus.training, together, *each, strict=True):
        target = tuple(example.labels.tolist())
        assert found.keys() == set().union(*others)
        mean = sum(one[target] for one in others) / 3
        assert found[target] == pytest.approx(mean, abs=1e-4)
    ranking = load_teachers([own, joint], corpus.signature)  # the first one finds all
    more = find_candidates(ranking, corpus.training, CPU)
    assert {len(found) for found in more} <= {RANKED, RANKED + 1}


def test_a_set_of_joint_models_scores_outputs_of_transducers(folder):
    corpus, decode = read(folder), read(folder).signature.targets.decode
    joint = folder / "joint-{}.safetensors"
    both, teacher = load_teachers([folder / "both", joint], corpus.signature)
    candidates = find_candidates([both, teacher], corpus.training, CPU)
    for example, found in zip(corpus.training, candidates, strict=True):
        x = Batch.of([example])
        assert found.keys() == {tuple(example.labels.tolist()), *both.outputs(x, RANKED)[0]}
        model = load_joint_ngram(folder / f"joint-{example.pair.name[:3]}.safetensors")
        for labels, mean in found.items():
            y, size = torch.tensor([labels], dtype=torch.int64), torch.tensor([len(labels)])
            score = both.log_likelihoods(x, torch.tensor([0]), y, size).item()
            symbols, log_joint = decode(labels), LEAST_LOG_LIKELIHOOD
            if set(symbols) <= set(model.signature.targets.symbols):
                one = alone(example, model.signature, symbols)
                log_joint = model.ngram.log_joint(one.frames[0].numpy(), one.labels[0].numpy())
            assert mean == pytest.approx((score + log_joint) / 2, abs=1e-4)
    with pytest.raises(TrainingError, match=r"joint-{}.safetensors: it ranks the outputs of trans"):
        load_teachers([joint], corpus.signature)


def test_labels_that_a_model_lacks_lose(folder):
    corpus = read(folder)
    [teacher] = load_teachers([folder / "own-{}"], corpus.signature)
    strange = tuple(corpus.signature.targets.encode("ABDE"))  # of both languages
    examples = [replace(one, labels=torch.tensor(strange)) for one in corpus.training]
    candidates = find_candidates([teacher], examples, CPU)
    targets = candidate_targets(examples, candidates, [1.0] * len(examples), 6, False)
    for found, target in zip(candidates, targets, strict=True):
        assert found.pop(strange) == LEAST_LOG_LIKELIHOOD
        [(output, value)] = found.items()
        assert value > LEAST_LOG_LIKELIHOOD / 10
        assert target[0].tolist() == [float(k == (*output, 0)[0]) for k in range(6)]


def test_inputs_that_no_model_of_a_set_reads_are_refused_before_the_search(folder, monkeypatch):
    corpus = read(folder)
    monkeypatch.setattr(module, "load_by_length", None)
    [teacher] = load_teachers([folder / "own-{}"], corpus.signature)
    sources, known = corpus.signature.sources, corpus.training[0]
    for source, said in (
        ("rok:cd", "there is no model for the language with which the input 'rok:cd' begins; tr"),
        ("korcd", "there is no model for the language with which the input 'korcd' begins; train"),
        ("kor:", "there is no model for the language with which the input 'kor:' begins; train"),
        (
            "kor:cad",
            "the model for the language of the input 'kor:cad' does not know its letter 'a'",
        ),
    ):
        pair = replace(known.pair, name=source, source=tuple(source))
        strange = replace(known, pair=pair, frames=torch.tensor(sources.encode(source)))
        with pytest.raises(TrainingError, match=rf"^train.teacher, .*own-{{}}: {said}"):
            find_candidates([teacher], [known, strange], CPU)


def test_a_set_that_does_not_fit_is_refused(folder):
    ours = read(folder).signature
    fewer = replace(ours, targets=Alphabet("ABCD"))
    korean = read(folder, "kor").signature  # without prefixes
    (folder / "mixed-dut.safetensors").write_bytes(
        (folder / "own-dut/model.safetensors").read_bytes()
    )
    (folder / "mixed-kor.safetensors").write_bytes((folder / "joint-kor.safetensors").read_bytes())
    ctc = build_network(NetworkConfig("ctc"), len(korean.sources), len(korean.targets))
    save_model(TrainedModel(ctc, NetworkConfig("ctc"), korean), folder / "ctc-kor")
    (folder / "begun-kor").mkdir()
    none = r"there is no run for any; train one for each, and the network with data.language all"
    for name, signature, said in (
        ("other-{}", ours, rf", .*other-{{}}: {{}} stands for a language .*, and {none}"),
        ("own-{}", korean, rf", .*own-{{}}: {{}} stands for a language .*, and {none}"),
        ("own-{}", Signature(ours.targets, Notation("characters", None)), rf", .* and {none}"),
        ("own-{}", fewer, r", .*own-kor: it has a label 'E' that the training data do not have"),
        ("mixed-{}.safetensors", ours, r", .*: some are transducers and some joint n-gram models"),
        ("ctc-{}", ours, r", .*ctc-kor: it is of the kind ctc; give a transducer"),
        ("begun-{}", ours, r": there is no file .*begun-kor/model.safetensors; give the folder"),
    ):
        with pytest.raises(TrainingError, match=rf"^train.teacher{said}"):
            load_teachers([folder / name], signature)


def test_a_set_has_only_the_runs_whose_names_are_codes(folder):
    shutil.copytree(folder / "own-kor", folder / "own-kor-2")  # no input begins with kor-2:
    (folder / "own-").mkdir()
    ours = read(folder).signature
    [teacher] = load_teachers([folder / "own-{}"], ours)
    assert ["".join(ours.sources.decode(ids)) for ids in teacher.models] == ["dut:", "kor:"]
    inside = folder / "sets [1]/dut"  # the code may stand before the last part, in odd folders
    inside.parent.mkdir()
    (folder / "own-dut").rename(inside)
    [teacher] = load_teachers([folder / "sets [1]/{}/model.safetensors"], ours)
    assert ["".join(ours.sources.decode(ids)) for ids in teacher.models] == ["dut:"]


def test_the_key_of_cached_candidates_depends_on_each_model_of_a_set(folder):
    corpus = read(folder)
    paths = [folder / "own-{}", folder / "joint-{}.safetensors"]
    teachers, keys = load_teachers(paths, corpus.signature), set()
    prefixes, models = zip(*teachers[0].models.items(), strict=True)
    swapped = replace(teachers[0], models=dict(zip(prefixes[::-1], models, strict=True)))
    for one in (*[teachers[0]] * 2, swapped):
        keys.add(_key([one, teachers[1]], corpus.training))
    assert len(keys) == 2
    for model in (model for teacher in teachers for model in teacher.models.values()):
        if isinstance(model, Teacher):
            model.network.transcription_network.output.bias.data[1] += 1
        else:
            assert isinstance(model, JointNGramTeacher)
            model.ngram.automaton.log_probs[1] -= 1
        keys.add(_key(teachers, corpus.training))
    assert len(keys) == 6


def test_the_transducers_of_a_set_are_moved_to_the_device(folder, monkeypatch):
    corpus, moved = read(folder), []
    teachers = load_teachers([folder / "own-{}", folder / "both"], corpus.signature)
    networks = [*(one.network for one in teachers[0].models.values()), teachers[1].network]

    @contextmanager
    def on_device(transducers, device):
        moved.extend(one.network for one in transducers)
        yield

    monkeypatch.setattr(module, "_on_device", on_device)
    find_candidates(teachers, corpus.training[:1], CPU)
    assert moved == networks


def test_a_student_of_two_languages_learns_from_a_set_and_a_transducer(folder, tmp_path):
    teachers = (folder / "own-{}", folder / "both")
    recipe = toy_recipe(tmp_path, teacher=teachers, distillation=0.5, max_epochs=1)
    (folder / "words.txt").write_text("kor:dcec\ndut:baba\n")
    data = replace(data_of(folder), cache=folder / "cache", unlabelled=folder / "words.txt")
    fit(replace(recipe, data=data), folder / "student", validate=lambda model, examples: 0.0)
    assert (folder / "student/model.safetensors").is_file()
    assert len(list((folder / "cache").glob("candidates-*"))) == 2  # with and without targets
    assert "own-{}" in (folder / "student/config.toml").read_text()


def test_the_batches_of_a_set_have_one_language_each(folder, monkeypatch):
    corpus, languages = read(folder), []

    def load_by_length(examples, device):
        languages.append({example.pair.name[:3] for example in examples})
        yield from plain_load(examples, device)

    plain_load = module.load_by_length
    monkeypatch.setattr(module, "load_by_length", load_by_length)
    plain = load_teachers([folder / "both"], corpus.signature)
    with_set = load_teachers([folder / "both", folder / "own-{}"], corpus.signature)
    for teachers in (plain, with_set):
        assert all(find_candidates(teachers, corpus.training, CPU))
    assert languages == [{"dut", "kor"}, {"dut"}, {"kor"}]
