"""Training: the paper's update, resuming, early stopping, and several processes."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from toys import toy_recipe

from transduce import greedy_search
from transduce.alphabet import Alphabet
from transduce.architectures import Transducer, build_network
from transduce.cli.train import train
from transduce.data.batches import Batch, Batches
from transduce.data.pairs import DataError
from transduce.model.checkpoint import load_model, save_model
from transduce.training import checks
from transduce.training import fit as training
from transduce.training.corpus import read_corpus
from transduce.training.fit import NonFiniteLoss, TrainingError, fit, learning_rate
from transduce.training.pretraining import copy_prediction, copy_transcription
from transduce.training.progress import Progress
from transduce.training.recipe import TrainConfig, read_recipe, recipe_toml
from transduce.training.teachers import (
    Teacher,
    candidate_targets,
    exact_targets,
    find_candidates,
    label_examples,
    load_teachers,
)

ROOT = Path(__file__).parent.parent


def quiet():
    return Progress(Console(quiet=True))


def run(recipe, folder, **options):
    return fit(recipe, folder, progress=quiet(), **options)


def weights_of(folder, file="last.safetensors"):
    return load_file(folder / file)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_the_papers_update_is_the_one_written_by_hand(tmp_path):
    """Train online with momentum 0.9; each step draws weight noise, which is removed after it."""
    recipe = toy_recipe(
        tmp_path,
        **{"optimiser": "sgd", "learning_rate": 1e-4, "weight_noise": 0.075},
        **{"max_sequences": 1, "max_epochs": 1},
    )
    corpus = read_corpus(recipe.data)
    run(recipe, tmp_path / "run", corpus=corpus)

    torch.manual_seed(0)
    network = build_network(recipe.network, 4, 4)
    weights = list(network.parameters())
    assert all(tensor.detach().abs().max() <= 0.1 for tensor in weights)
    clean = [tensor.detach().clone() for tensor in weights]
    delta = [torch.zeros_like(tensor) for tensor in weights]
    noises = []
    for step, (i,) in enumerate(Batches(corpus.training, 10**6, 0, max_sequences=1).epoch(0)):
        seed = training.step_seed(0, step, "noise")
        generator = torch.Generator().manual_seed(seed)
        for tensor, before in zip(weights, clean, strict=True):
            noise = torch.empty_like(before).normal_(0.0, 0.075, generator=generator)
            tensor.data = before + noise
        noises.append(noise.flatten()[0].item())
        (loss,) = network.losses(Batch.of([corpus.training[i]]))
        gradients = torch.autograd.grad(loss, weights)
        for n, gradient in enumerate(gradients):
            delta[n] = 0.9 * delta[n] - 1e-4 * gradient
            clean[n] = clean[n] + delta[n]
    assert len(noises) == 100 == len(set(noises))
    found = weights_of(tmp_path / "run")
    for (name, _), expected in zip(network.named_parameters(), clean, strict=True):
        torch.testing.assert_close(found[f"network.{name}"], expected, rtol=1e-5, atol=1e-7)
    moved = [
        (found[f"network.{name}"] - tensor).abs().max()
        for name, tensor in build_first(recipe).named_parameters()
    ]
    assert max(moved) > 1e-3


def test_a_step_descends_the_mean_of_its_sequences(tmp_path):
    """All sequences are in one step, so that the plain update is the learning rate times it."""
    settings = {"optimiser": "sgd", "learning_rate": 0.1, "max_sequences": 1000, "max_epochs": 1}
    recipe = toy_recipe(tmp_path, **settings, max_cells=10**6)
    corpus = read_corpus(recipe.data)
    run(recipe, tmp_path / "run", corpus=corpus)
    network = build_first(recipe)
    assert len(corpus.training) == 100
    loss = network.losses(Batch.of(corpus.training)).mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    found = weights_of(tmp_path / "run")
    for (name, first), gradient in zip(network.named_parameters(), gradients, strict=True):
        expected = first.detach() - 0.1 * gradient
        torch.testing.assert_close(found[f"network.{name}"], expected, rtol=1e-4, atol=1e-6)


def build_first(recipe):
    torch.manual_seed(recipe.train.seed)
    return build_network(recipe.network, 4, 4)


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_each_network_learns(tmp_path, kind):
    warm = {"max_epochs": 12, "warm_up": 10, "decay": "cosine", "clip": 5.0}
    recipe = toy_recipe(tmp_path, kind, **warm)
    model = run(recipe, tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    assert model.status.bits_per_label == min(m["bits_per_label"] for m in metrics)
    # A word's first letter is one of four, 2 bits; each of the others one of two, 1 bit.
    limit = {"transducer": 0.6, "ctc": 0.3, "prediction": 1.4}[kind]
    assert model.status.bits_per_label < limit
    if kind == "prediction":
        assert 0.4 < model.status.error_rate < 0.7
        assert metrics[0]["error_rate"] is not None
    if kind == "transducer":
        found = greedy_search(
            model.network, model.signature.example("abcd").frames[None], torch.tensor([4])
        )
        assert model.signature.text(found[0].labels) == "ABCD"


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_consistency_lowers_the_divergence_between_two_views(tmp_path, kind):
    """Outputs under dropout vary less, and the network still learns."""
    divergences = []
    for consistency in (0.0, 4.0):
        recipe = toy_recipe(tmp_path, kind, max_epochs=6, consistency=consistency)
        recipe = replace(recipe, network=replace(recipe.network, dropout=0.3))
        model = run(recipe, tmp_path / f"run-{consistency}")
        views = Batch.of(read_corpus(recipe.data).training).repeat(2)
        model.network.train()
        torch.manual_seed(0)
        with torch.no_grad():
            losses, _, divergence = model.network.consistency_losses(views)
        divergences.append(float(divergence.sum() / losses.sum()))
        assert model.status.bits_per_label < 2.0
    assert divergences[1] < 0.7 * divergences[0]


def teach(tmp_path, name="teacher", **network):
    """Train a teacher on the toy corpus; return its folder."""
    recipe = toy_recipe(tmp_path, max_epochs=8)
    recipe = replace(recipe, network=replace(recipe.network, **network))
    run(recipe, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("backwards", [False, True])
def test_a_student_of_another_architecture_learns_from_a_teacher_alone(tmp_path, backwards):
    """With all the weight on the teacher, the labels only say which prefixes to ask it about."""
    teacher = teach(tmp_path, backwards=backwards)
    recipe = toy_recipe(tmp_path, max_epochs=12, teacher=(teacher, teacher), distillation=1.0)
    forward = {"bidirectional": False, "hidden_size": 32, "backwards": backwards}
    recipe = replace(recipe, network=replace(recipe.network, **forward))
    model = run(recipe, tmp_path / "student")
    assert model.status.bits_per_label < 0.6
    # The training bits are those of the labels, not the distillation loss.
    last = metrics_of(tmp_path / "student")[-1]
    assert last["training_bits_per_label"] == pytest.approx(last["bits_per_label"], abs=0.3)
    assert f'teacher = ["{teacher}", "{teacher}"]' in (tmp_path / "student/config.toml").read_text()


def test_targets_are_the_labels_and_the_teachers_share(tmp_path):
    teacher = teach(tmp_path)
    recipe = toy_recipe(tmp_path)
    corpus = read_corpus(recipe.data)
    (example, *_) = corpus.training
    targets = [
        exact_targets(
            load_teachers([teacher], corpus.signature), [example], [share], torch.device("cpu")
        )[0]
        for share in (0.0, 0.25, 1.0)
    ]
    following = torch.tensor([*example.labels, 0])
    certain = torch.nn.functional.one_hot(following, 5).half()
    assert torch.equal(targets[0], certain)
    torch.testing.assert_close(targets[1], 0.75 * certain + 0.25 * targets[2])
    along = targets[2][torch.arange(len(following)), following].double().log().sum()
    loss = load_model(teacher).network.losses(Batch.of([example]))
    torch.testing.assert_close(-along.float(), loss[0], rtol=0.0, atol=0.01)


def test_without_the_teachers_share_distillation_changes_nothing(tmp_path):
    teacher = teach(tmp_path)
    run(toy_recipe(tmp_path), tmp_path / "plain")
    run(toy_recipe(tmp_path, teacher=(teacher,), distillation=0.0), tmp_path / "student")
    plain, student = metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "student")
    for one, other in zip(plain, student, strict=True):
        assert one["bits_per_label"] == pytest.approx(other["bits_per_label"], rel=1e-3)


def test_a_student_is_consistent_too(tmp_path):
    teacher = teach(tmp_path)
    recipe = toy_recipe(tmp_path, teacher=(teacher,), consistency=1.0, precision="bf16-mixed")
    recipe = replace(recipe, network=replace(recipe.network, dropout=0.2))
    assert run(recipe, tmp_path / "student").status.bits_per_label < 2.0


def test_a_teacher_may_have_its_symbols_in_another_order(tmp_path):
    teacher = load_model(teach(tmp_path))
    signature = teacher.signature
    turned = replace(
        signature,
        targets=Alphabet(signature.targets.symbols[::-1]),
        sources=Alphabet(signature.sources.symbols[::-1]),
    )
    network = build_network(teacher.config, 4, 4)
    with torch.no_grad():
        copy_prediction(teacher, network, turned)
        copy_transcription(teacher, network, turned)
    save_model(replace(teacher, network=network, signature=turned), tmp_path / "turned.safetensors")
    examples, cpu = read_corpus(toy_recipe(tmp_path).data).training, torch.device("cpu")
    shares = [1.0] * len(examples)
    one, other = (
        exact_targets(load_teachers([path], signature), examples, shares, cpu)
        for path in (tmp_path / "teacher", tmp_path / "turned.safetensors")
    )
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("backwards", [False, True])
def test_teachers_of_both_directions_give_what_follows_in_their_candidates(tmp_path, backwards):
    """The candidates are the target and the teachers' outputs, weighted by their likelihoods."""
    paths = [teach(tmp_path, "forwards"), teach(tmp_path, "backwards", backwards=True)]
    corpus, cpu = read_corpus(toy_recipe(tmp_path).data), torch.device("cpu")
    example = replace(corpus.training[0], labels=torch.tensor([3, 3, 1]))  # not what they find
    teachers = load_teachers(paths, corpus.signature)
    candidates = find_candidates(teachers, [example], cpu)
    [targets] = candidate_targets([example], candidates, [1.0], 5, backwards)
    weights = {}
    batch = Batch.of([example])
    for labels in {(3, 3, 1), *(teacher.outputs(batch, 1)[0][0] for teacher in teachers)}:
        one = Batch.of([replace(example, labels=torch.tensor(labels))])
        scores = [-load_model(path).network.losses(one)[0].item() for path in paths]
        weights[labels[:: -1 if backwards else 1]] = math.exp(sum(scores) / 2)
    read = (1, 3, 3) if backwards else (3, 3, 1)
    for u, row in enumerate(targets.tolist()):
        begin = {y: weight for y, weight in weights.items() if y[:u] == read[:u]}
        for k, value in enumerate(row):
            followed = [w for y, w in begin.items() if (*y, 0)[u] == k]
            assert value == pytest.approx(sum(followed) / sum(begin.values()), abs=1e-3)
    assert len(weights) > 1
    [half] = candidate_targets([example], candidates, [0.25], 5, backwards)
    certain = torch.nn.functional.one_hot(torch.tensor([*read, 0]), 5)
    torch.testing.assert_close(
        half.float(), 0.75 * certain + 0.25 * targets.float(), atol=1e-3, rtol=0
    )


def test_candidates_are_found_once_for_all_runs_that_share_a_cache(tmp_path, monkeypatch):
    paths = [teach(tmp_path, "forwards"), teach(tmp_path, "backwards", backwards=True)]
    corpus, cpu, cache = read_corpus(toy_recipe(tmp_path).data), torch.device("cpu"), tmp_path / "c"
    teachers, examples = load_teachers(paths, corpus.signature), corpus.training[:9]
    found = find_candidates(teachers, examples, cpu, cache)
    assert find_candidates(teachers, examples, cpu) == found
    [file] = cache.iterdir()
    monkeypatch.setattr(Teacher, "outputs", None)
    assert find_candidates(teachers, examples, cpu, cache) == found
    for others in ([*teachers[:1], *teachers[:1]], teachers[::-1]):
        with pytest.raises(TypeError):  # other teachers have other candidates
            find_candidates(others, examples, cpu, cache)
    with pytest.raises(TypeError):
        find_candidates(teachers, examples[1:], cpu, cache)
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:-100])
    assert find_candidates(teachers, examples, cpu, cache) == found


def test_teachers_without_finite_likelihoods_are_refused(tmp_path):
    paths = [teach(tmp_path, "forwards"), teach(tmp_path, "backwards", backwards=True)]
    corpus = read_corpus(toy_recipe(tmp_path).data)
    teachers = load_teachers(paths, corpus.signature)
    with torch.no_grad():
        teachers[1].network.transcription_network.output.bias[1] = -torch.inf
    name = corpus.training[0].pair.name
    with pytest.raises(TrainingError, match=f"likelihoods for {name} are not finite; check their"):
        find_candidates(teachers, corpus.training[:1], torch.device("cpu"))


def test_a_student_learns_from_inputs_that_teachers_of_both_directions_label(tmp_path):
    paths = (teach(tmp_path, "forwards"), teach(tmp_path, "backwards", backwards=True))
    (tmp_path / "more.txt").write_text("cabcab\nabdacd\n\ncabcab\ndacabc\n")
    recipe = toy_recipe(tmp_path, max_epochs=8, teacher=paths, distillation=0.5)
    known = read_corpus(recipe.data)
    word = "".join(known.validation[0].pair.source)  # is held out, and so left out
    with (tmp_path / "more.txt").open("a") as more:
        more.write(f"{word}\n")
    recipe = replace(recipe, data=replace(recipe.data, unlabelled=tmp_path / "more.txt"))
    corpus = read_corpus(recipe.data)
    assert [example.pair.name for example in corpus.unlabelled] == ["cabcab", "abdacd", "dacabc"]
    assert corpus.training[0].pair == known.training[0].pair
    lines = io.StringIO()
    fit(recipe, tmp_path / "student", progress=Progress(Console(file=lines, width=200)))
    assert "the teachers labelled 3 of 3 inputs without targets" in lines.getvalue()
    assert f"{len(corpus.training) + 3} training sequences" in lines.getvalue()
    teachers = load_teachers(paths, corpus.signature)
    candidates = find_candidates(teachers, corpus.unlabelled, torch.device("cpu"))
    labelled = label_examples(corpus.unlabelled, candidates)
    found = {one.pair.name: corpus.signature.text(one.labels.tolist()) for one, _ in labelled}
    assert found == {"cabcab": "CABCAB", "abdacd": "ABDACD", "dacabc": "DACABC"}


def test_inputs_without_targets_need_a_teacher(tmp_path):
    (tmp_path / "more.txt").write_text("abba\n")
    recipe = toy_recipe(tmp_path)
    recipe = replace(recipe, data=replace(recipe.data, unlabelled=tmp_path / "more.txt"))
    with pytest.raises(TrainingError, match=r"^data.unlabelled has no targets; name a train"):
        run(recipe, tmp_path / "run")
    (tmp_path / "more.txt").write_text("abba\nabxe\n")
    recipe = replace(recipe, train=replace(recipe.train, teacher=(teach(tmp_path),)))
    with pytest.raises(DataError, match=r"more.txt, line 2: .*'x'"):
        run(recipe, tmp_path / "run")


def test_a_teacher_that_does_not_fit_is_refused(tmp_path):
    teacher = teach(tmp_path)
    run(toy_recipe(tmp_path, "ctc", max_epochs=1), tmp_path / "ctc")

    def refused(match, folder="student", **settings):
        recipe = toy_recipe(tmp_path, teacher=(settings.pop("teacher", teacher),))
        recipe = replace(recipe, network=replace(recipe.network, **settings))
        with pytest.raises(TrainingError, match=match):
            run(recipe, tmp_path / folder)
        assert not (tmp_path / folder / "last.safetensors").exists()

    refused(r"^train.teacher is for a transducer, not ctc; leave it out", network="ctc")
    refused(r"^train.teacher, .*ctc: it is of the kind ctc; give", teacher=tmp_path / "ctc")
    refused(r"^train.teacher: .*nowhere", teacher=tmp_path / "nowhere")
    name = tmp_path / "english-pronouncer"  # resolved in the working folder as all paths are
    refused(r"^train.teacher, .*english-pronouncer: it has no source symbol .a.", teacher=name)
    (tmp_path / "toy.tsv").write_text((tmp_path / "toy.tsv").read_text() + "abe\tABE\n")
    refused(r"^train.teacher, .*: it has no source symbol 'e'; give")
    (tmp_path / "toy.tsv").write_text("".join(f"{'ab' * n}\t{'AB' * n}\n" for n in range(1, 30)))
    refused(r"^train.teacher, .*: it has a label 'C' that the training data do not have")


def test_consistency_without_dropout_or_masks_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="two draws of dropout or masks, and there are none"):
        run(toy_recipe(tmp_path, consistency=1.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_run_folder_has_config_model_card_state_and_metrics(tmp_path):
    recipe = toy_recipe(tmp_path)
    run(recipe, tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir() if "tfevents" not in path.name}
    kept = {"config.toml", "model.safetensors", "card.md", "last.safetensors", "metrics.jsonl"}
    assert files == kept
    assert read_recipe(tmp_path / "run" / "config.toml") == recipe
    metrics = metrics_of(tmp_path / "run")
    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    best = load_model(tmp_path / "run").status
    assert metrics[best.epoch - 1]["bits_per_label"] == best.bits_per_label


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    recipe = toy_recipe(tmp_path, weight_noise=0.05, max_epochs=2)
    recipe = replace(recipe, network=replace(recipe.network, num_layers=2, dropout=0.3))
    for folder in ("a", "b"):
        run(recipe, tmp_path / folder)
        torch.rand(3)  # other random draws make no difference
    assert_same(weights_of(tmp_path / "b"), weights_of(tmp_path / "a"))
    other = replace(recipe, train=replace(recipe.train, seed=1))
    run(other, tmp_path / "c")
    name = "network.prediction_network.output.weight"
    assert not torch.equal(weights_of(tmp_path / "c")[name], weights_of(tmp_path / "a")[name])


KILLED = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from transduce.model import checkpoint
from transduce.training.progress import Progress
from transduce.training.recipe import read_recipe
from transduce.training.fit import fit

folder, when, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

class Killed(Progress):
    steps_taken = 0
    def step(self, num_sequences, bits):
        Killed.steps_taken += 1
        if when == "in a step" and Killed.steps_taken == count:
            kill()

fsync, writes = os.fsync, []
def fsync_or_die(file):
    writes.append(file)
    if when == "in a write" and len(writes) == count:
        os.truncate(file, 100)  # half-written
        kill()
    fsync(file)
os.fsync = fsync_or_die
fit(read_recipe(folder / "recipe.toml"), folder / "run", progress=Killed(Console(quiet=True)))
"""


@pytest.fixture(scope="module", params=[False, True], ids=["labels", "teacher"])
def never_stopped(request, tmp_path_factory):
    """A recipe, without and with a teacher, and the folder of its run."""
    folder = tmp_path_factory.mktemp("never-stopped")
    regular = {"weight_noise": 0.05, "averaging": 0.9, "consistency": 1.0}
    regular |= {"teacher": (teach(folder),)} if request.param else {}
    recipe = toy_recipe(folder, save_every=5, warm_up=20, decay="cosine", **regular)
    recipe = replace(recipe, network=replace(recipe.network, num_layers=2, dropout=0.3))
    run(recipe, folder / "whole")
    return recipe, folder / "whole"


# An epoch has 13 steps, and every fifth step is saved. The eighth write is the state after the
# first epoch, when the model, its card and the metrics have been written.
@pytest.mark.parametrize("when, count", [("in a step", 23), ("in a write", 8)])
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_result_of_one_that_was_not_stopped(
    tmp_path, when, count, never_stopped
):
    recipe, whole = never_stopped
    (tmp_path / "recipe.toml").write_text(recipe_toml(recipe))
    command = [sys.executable, "-c", KILLED, str(tmp_path), when, str(count)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = training.read_tensors(tmp_path / "run" / "last.safetensors", training.STATE)[1]
    assert 0 < left["position"]["step"] < 39
    run(recipe, tmp_path / "run", resume=True)
    assert_same(weights_of(tmp_path / "run"), weights_of(whole))
    best = "model.safetensors"
    assert (tmp_path / "run" / best).read_bytes() == (whole / best).read_bytes()
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    cards = [(folder / "card.md").read_text() for folder in (tmp_path / "run", whole)]
    assert cards[0].replace("# run\n", "# whole\n") == cards[1]


class Stop(Exception):
    """Stands for a kill in a test's own process."""


def test_metrics_have_the_scheduled_learning_rate_when_the_epochs_end_is_resumed(
    tmp_path, monkeypatch
):
    """The epoch's last step is saved, and the run stops before the epoch's metrics are."""
    recipe = toy_recipe(tmp_path, save_every=13, warm_up=20, decay="cosine")
    run(recipe, tmp_path / "whole")

    def stop(run):
        raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(training._Run, "_validation_results", stop)
        run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run", resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_the_config_of_a_resumed_run_has_the_settings_that_it_ran_with(tmp_path):
    config = tmp_path / "run" / "config.toml"
    short, longer, shorter = (toy_recipe(tmp_path, max_epochs=n) for n in (2, 3, 1))
    run(short, tmp_path / "run")
    run(longer, tmp_path / "run", resume=True)
    assert read_recipe(config) == longer
    run(shorter, tmp_path / "run", resume=True)  # which has nothing left to do
    assert read_recipe(config) == longer


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_a_state_without_one_of_its_tensors_is_refused(tmp_path, optimiser):
    recipe = toy_recipe(tmp_path, optimiser=optimiser, max_epochs=1)
    run(recipe, tmp_path / "run")
    last = tmp_path / "run" / "last.safetensors"
    tensors, header = training.read_tensors(last, training.STATE)
    longer = replace(recipe, train=replace(recipe.train, max_epochs=2))

    def refused(tensors, header, said):
        training.write_tensors(last, tensors, header, training.STATE)
        before = [path.read_bytes() for path in sorted((tmp_path / "run").iterdir())]
        with pytest.raises(TrainingError) as error:
            run(longer, tmp_path / "run", resume=True)
        assert str(error.value).startswith(f"{last} {said}") and "\n" not in str(error.value)
        assert before == [path.read_bytes() for path in sorted((tmp_path / "run").iterdir())]

    one_of_each = {name.split(".")[0] + name.rpartition(".")[2]: name for name in tensors}
    assert any(name.startswith("optimiser.") for name in one_of_each.values())
    for name in one_of_each.values():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        refused(rest, header, f"has no tensor {name} of shape ")
        refused(rest | {name: torch.ones(3, 1, 2)}, header, f"has no tensor {name} of shape ")
    refused(tensors, {}, "has no position")
    refused(tensors, {"position": {"epoch": "one"}}, "has no position")


def test_the_momentum_of_sgd_is_resumed(tmp_path):
    settings = {"optimiser": "sgd", "learning_rate": 0.01}
    run(toy_recipe(tmp_path, max_epochs=1, **settings), tmp_path / "a")
    run(toy_recipe(tmp_path, max_epochs=2, **settings), tmp_path / "a", resume=True)
    run(toy_recipe(tmp_path, max_epochs=2, **settings), tmp_path / "b")
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))


def test_a_finished_run_is_not_changed_or_overwritten(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=1)
    run(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "last.safetensors").read_bytes()
    assert run(recipe, tmp_path / "run", resume=True).status.epoch == 1
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == before
    with pytest.raises(TrainingError, match="has a run in it; resume it"):
        run(recipe, tmp_path / "run")
    other = replace(recipe, train=replace(recipe.train, learning_rate=0.5))
    with pytest.raises(TrainingError, match=r"has train.learning_rate 0.02, not 0.5"):
        run(other, tmp_path / "run", resume=True)


def test_a_nan_loss_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    recipe = toy_recipe(tmp_path, save_every=1)
    corpus, original, calls = read_corpus(recipe.data), Transducer.losses, []

    def broken(network, batch, outputs=None):
        losses = original(network, batch)
        calls.append(batch)
        return losses * torch.tensor([1.0, math.nan, *[1.0] * 6]) if len(calls) == 4 else losses

    monkeypatch.setattr(Transducer, "losses", broken)
    with pytest.raises(NonFiniteLoss) as error:
        run(recipe, tmp_path / "run", corpus=corpus)
    [ids] = calls[-1].labels[1:2, : calls[-1].num_labels[1]].tolist()
    name = corpus.signature.text(ids).lower()
    assert str(error.value).startswith(
        f"the loss of {name} is not finite at step 4, in epoch 1; the last good state is in "
    )
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    run(recipe, tmp_path / "run", resume=True)
    run(recipe, tmp_path / "whole")
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    recipe = toy_recipe(tmp_path, optimiser="sgd", learning_rate=1e38, save_every=1)
    with pytest.raises(
        NonFiniteLoss, match=r"weight is not finite after step|loss of .* is not finite"
    ):
        run(recipe, tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in weights_of(tmp_path / "run").values())


def test_the_run_stops_after_patience_epochs_and_keeps_the_best_model(tmp_path):
    rates = [0.5, 0.3, 0.4, 0.35, 0.1]
    asked = []

    def validate(model, examples):
        asked.append((model.network.training, len(examples)))
        return rates[len(asked) - 1]

    recipe = toy_recipe(tmp_path, max_epochs=9, patience=2, stop_at="error_rate")
    model = run(recipe, tmp_path / "run", validate=validate)
    assert len(asked) == 4 and set(asked) == {(False, 20)}
    assert (model.status.epoch, model.status.error_rate) == (2, 0.3)
    with pytest.raises(TrainingError, match="stop_at is error_rate"):
        run(recipe, tmp_path / "other")


def test_validation_follows_validate_every_and_the_last_epoch(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=5, validate_every=2)
    run(recipe, tmp_path / "run")
    assert [m["epoch"] for m in metrics_of(tmp_path / "run")] == [2, 4, 5]
    often = replace(recipe, train=replace(recipe.train, validate_every=1))
    run(often, tmp_path / "often")  # validation does not change the weights
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "often"))


def test_the_averaged_weights_are_validated_and_kept(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=2, averaging=0.9)
    model = run(recipe, tmp_path / "run")
    last = weights_of(tmp_path / "run")
    assert model.status.epoch == 2
    for i, weights in enumerate(model.network.parameters()):
        assert torch.equal(weights, last[f"average.{i}"])
    plain = run(replace(recipe, train=replace(recipe.train, averaging=0.0)), tmp_path / "plain")
    other = weights_of(tmp_path / "plain")
    names = [name for name in last if name.startswith("network.")]
    # Averaging does not change the steps.
    assert all(torch.equal(last[name], other[name]) for name in names)
    assert model.status.bits_per_label != plain.status.bits_per_label


def test_a_run_begins_with_pretrained_networks(tmp_path):
    for kind in ("prediction", "ctc"):
        run(toy_recipe(tmp_path, kind, max_epochs=1), tmp_path / kind)
    recipe = toy_recipe(
        tmp_path,
        optimiser="sgd",
        learning_rate=1e-30,  # too small to change anything
        max_epochs=1,
        init_prediction=tmp_path / "prediction",
        init_transcription=tmp_path / "ctc",
    )
    found = run(recipe, tmp_path / "run").network
    prediction = load_model(tmp_path / "prediction").network
    assert torch.equal(found.prediction_network.output.weight[1:], prediction.output.weight)
    transcription = load_model(tmp_path / "ctc").network
    assert_same(found.transcription_network.state_dict(), transcription.state_dict())
    wrong = replace(recipe, train=replace(recipe.train, init_prediction=tmp_path / "ctc"))
    with pytest.raises(TrainingError, match=r"^train.init_prediction, .*ctc: CTC has no"):
        run(wrong, tmp_path / "wrong")
    other_direction = replace(recipe, network=replace(recipe.network, backwards=True))
    with pytest.raises(TrainingError, match=r"^train.init_transcription, .*ctc: it reads forwards"):
        run(other_direction, tmp_path / "other direction")


def test_memory_is_reported_before_the_first_step(tmp_path):
    file = io.StringIO()
    recipe = toy_recipe(tmp_path, max_epochs=1)
    fit(recipe, tmp_path / "run", progress=Progress(Console(file=file)))
    first, epoch = file.getvalue().splitlines()
    assert "100 training sequences" in first
    assert "the largest step has 8 sequences of up to 6 frames and 6 labels" in first
    assert first.endswith(" MB beside the weights")
    assert epoch.startswith("epoch 1: ")


def test_consistency_doubles_the_sequences_of_the_reported_step(tmp_path):
    file = io.StringIO()
    recipe = toy_recipe(tmp_path, max_epochs=1, consistency=1.0)
    recipe = replace(recipe, network=replace(recipe.network, dropout=0.1))
    fit(recipe, tmp_path / "run", progress=Progress(Console(file=file)))
    said = "the largest step has 8 sequences, each twice, of up to 6 frames and 6 labels"
    assert said in file.getvalue()


@pytest.mark.parametrize(
    "network, said",
    [
        ({"hidden_size": 1000}, r"training \d+,\d+,\d+ weights takes .* lower network.hidden_size"),
        (
            {},
            r"a step of 8 sequences of up to . frames .*; lower train.max_sequences 8 or train",
        ),
    ],
)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(
    tmp_path, monkeypatch, network, said
):
    sizes = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2_000_000}
    recipe = toy_recipe(tmp_path)
    recipe = replace(recipe, network=replace(recipe.network, **network))
    if not network:
        monkeypatch.setattr(training, "predicted_bytes", lambda *_: 10_000_000)
    monkeypatch.setattr(checks.os, "sysconf", sizes.get)
    with pytest.raises(TrainingError, match=said):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="device is cuda, but PyTorch finds no CUDA GPU"):
        run(toy_recipe(tmp_path, device="cuda"), tmp_path / "run")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TrainingError, match="devices is 3, but there are 2 GPUs"):
        run(toy_recipe(tmp_path, device="cuda", devices=3), tmp_path / "run")
    checks.check_devices(TrainConfig(device="cuda", devices=2))  # all of them
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("there_are", [0, 1, 2])
def test_processes_share_a_cpu_only_if_that_is_meant(monkeypatch, there_are):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_are > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there_are)
    gpus = "is 1 GPU" if there_are == 1 else f"are {there_are} GPUs"
    said = f"devices is 4, but there {gpus}; lower it, or set train.device to cpu for 4 processes"
    with pytest.raises(TrainingError, match=said):
        checks.check_devices(TrainConfig(devices=4))
    checks.check_devices(TrainConfig(devices=max(1, there_are)))
    checks.check_devices(TrainConfig(devices=4, device="cpu"))
    if there_are == 0:  # as on machines without GPUs, where torchrun started 4 processes
        checks.check_devices(TrainConfig(devices=4), is_launched=True)


def test_ctc_leaves_out_sequences_that_it_cannot_align_and_reports_it(tmp_path):
    (tmp_path / "toy.tsv").write_text("".join(f"{'ab' * n}c\t{'XY' * n}\n" for n in range(1, 9)))
    with (tmp_path / "toy.tsv").open("a") as file:
        file.write("a\tXX\nb\tXYX\n")
    recipe = toy_recipe(tmp_path, "ctc", max_epochs=1)
    recipe = replace(recipe, data=replace(recipe.data, num_validation=3))
    file = io.StringIO()
    fit(recipe, tmp_path / "run", progress=Progress(Console(file=file)))
    assert "CTC cannot align" in file.getvalue()


def test_the_learning_rate_warms_up_and_decays():
    config = TrainConfig(learning_rate=1.0, warm_up=4, decay="cosine")
    assert [learning_rate(config, step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    rates = [learning_rate(config, 9, passed) for passed in (0.0, 0.5, 1.0)]
    assert rates == pytest.approx([1, 0.5, 0])
    assert learning_rate(TrainConfig(), 0, 0.5) == learning_rate(TrainConfig(), 10**6, 1) == 1e-4


PROCESSES = """
import sys
from pathlib import Path
import torch
from rich.console import Console
from transduce.training.progress import Progress
from transduce.training.recipe import read_recipe
from transduce.training.fit import _Objective, fit

forward, world_sizes = _Objective.forward, []
def counted(self, *tensors, **candidates):
    world_sizes.append(torch.distributed.get_world_size())
    return forward(self, *tensors, **candidates)
_Objective.forward = counted
folder = Path(sys.argv[1])
fit(read_recipe(folder / "recipe.toml"), folder / "two", progress=Progress(Console(quiet=True)))
assert world_sizes == [2] * NUM_STEPS, world_sizes
"""


@pytest.mark.parametrize("minimum_risk", [0, 2])
@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(tmp_path, minimum_risk):
    """Some batches have one sequence, so that the second process has none."""
    settings = {"optimiser": "sgd", "learning_rate": 0.05, "weight_noise": 0.02, "max_sequences": 3}
    if minimum_risk:
        first = teach(tmp_path)
        settings |= {"init_transcription": first, "init_prediction": first}
        settings["minimum_risk"] = minimum_risk
    recipe = toy_recipe(tmp_path, max_epochs=1, **settings)
    run(recipe, tmp_path / "one")
    two = replace(recipe, train=replace(recipe.train, devices=2))
    (tmp_path / "recipe.toml").write_text(recipe_toml(two))
    corpus = read_corpus(recipe.data)
    num_steps = len(Batches(corpus.training, 10**6, 0, max_sequences=3).epoch(0))
    (tmp_path / "script.py").write_text(PROCESSES.replace("NUM_STEPS", str(num_steps)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "timeout": 120}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert found.keys() == expected.keys()
    for name in expected:  # the optimiser's momentum, a sum of gradients, is among them
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    ours, theirs = metrics_of(tmp_path / "one")[0], metrics_of(tmp_path / "two")[0]
    for name in ("bits_per_label", "training_bits_per_label"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5)


def test_initial_weights_have_the_recipes_range(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=1, learning_rate=1e-12, initial_range=0.03)
    narrow = run(recipe, tmp_path / "narrow").network
    wide = run(
        replace(recipe, train=replace(recipe.train, initial_range=0.1)), tmp_path / "wide"
    ).network
    for ours, theirs in zip(narrow.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours, 0.3 * theirs)
    largest = max(weights.detach().abs().max() for weights in narrow.parameters())
    assert 0.029 < largest < 0.03


def test_fit_does_not_change_the_switch_of_tf32(tmp_path):
    before, during = torch.backends.cuda.matmul.fp32_precision, []

    def validate(_model, _examples):
        during.append(torch.backends.cuda.matmul.fp32_precision)
        return 0.5

    for precision in ("tf32", "bf16-mixed", "32-true"):  # on the CPU the switch means nothing
        recipe = toy_recipe(tmp_path, precision=precision, max_epochs=1)
        run(recipe, tmp_path / precision, validate=validate)
    assert during == [before] * 3
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.fixture
def matmul_precision():
    """Yield torch.set_float32_matmul_precision; undo it after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_tf32_on_a_gpu_must_be_enabled_by_the_caller(matmul_precision):
    gpu = torch.device("cuda")
    matmul_precision("highest")
    with pytest.raises(TrainingError, match=r"precision is tf32, but PyTorch .* full float32"):
        checks.check_precision("tf32", gpu)
    checks.check_precision("32-true", gpu)
    checks.check_precision("bf16-mixed", gpu)
    checks.check_precision("tf32", torch.device("cpu"))
    matmul_precision("high")
    checks.check_precision("tf32", gpu)


def test_the_train_command_enables_tf32_where_the_recipe_asks_for_it(tmp_path, matmul_precision):
    for precision, expected in (("32-true", "highest"), ("tf32", "high")):
        matmul_precision("highest")
        recipe = toy_recipe(tmp_path, precision=precision, max_epochs=1)
        (tmp_path / "recipe.toml").write_text(recipe_toml(recipe))
        train(tmp_path / "recipe.toml", run=tmp_path / precision)
        assert torch.get_float32_matmul_precision() == expected


def test_mixed_precision_learns(tmp_path):
    recipe = toy_recipe(tmp_path, precision="bf16-mixed", max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = run(recipe, tmp_path / "run")
    assert model.status.bits_per_label < 2.5
    assert all(weights.dtype == torch.float32 for weights in model.network.parameters())


def test_equal_error_rates_are_decided_by_the_log_loss(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=3, patience=3, stop_at="error_rate")
    model = fit(recipe, tmp_path / "run", validate=lambda model, examples: 1.0)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    best = min(rows, key=lambda row: row["bits_per_label"])
    assert best["epoch"] > 1 and model.status.epoch == best["epoch"]


def test_resuming_a_finished_run_says_so(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=1)
    fit(recipe, tmp_path / "run")
    console = Console(file=io.StringIO(), width=200)
    fit(recipe, tmp_path / "run", resume=True, progress=Progress(console))
    assert "the run is finished after epoch 1; to go on, raise train.max_epochs" in (
        console.file.getvalue()
    )
