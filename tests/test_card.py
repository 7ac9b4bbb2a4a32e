"""The card of a run: what it says is what was trained, and the code that trained it."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
from rich.console import Console
from toys import sound_recipe, toy_recipe

import transduce
from transduce.model.checkpoint import load_model
from transduce.model.evaluate import validation_error
from transduce.training import card as module
from transduce.training.card import code_version
from transduce.training.fit import fit
from transduce.training.progress import Progress


def train(recipe, folder, **options):
    return fit(recipe, folder, progress=Progress(Console(quiet=True)), **options)


def points_of(folder):
    """Return the first paragraph of a card, and its points by their headings."""
    title, _, text = (folder / "card.md").read_text().partition("\n\n")
    assert title == f"# {folder.name}"
    about, _, points = text.partition("\n\n")
    found = dict(re.findall(r"^- \*\*(.*?)\*\*: (.*)\.$", points, re.M))
    assert len(found) == len(points.splitlines())
    return about, found


def test_a_card_has_the_data_the_settings_and_the_results_of_the_model_beside_it(tmp_path):
    recipe = toy_recipe(tmp_path, stop_at="error_rate", learning_rate=0.03, max_epochs=4)
    recipe = replace(recipe, network=replace(recipe.network, num_layers=2, pooling=2))
    train(recipe, tmp_path / "letters", validate=validation_error)
    about, points = points_of(tmp_path / "letters")
    model = load_model(tmp_path / "letters")
    count = sum(weights.numel() for weights in model.network.parameters())
    assert about == (
        "An additive transducer (RNN-T; Graves, 2012): 2 bidirectional layers of 24 peephole LSTM "
        "units, every 2 frames averaged after the first layer, a prediction network (predictor) of "
        f"1 layer of 24 units; {count:,} weights. It has 4 source symbols and 4 labels."
    )
    lines = (tmp_path / "toy.tsv").read_text().splitlines()
    labels = sum(len(line.split("\t")[1]) for line in lines)
    data = re.fullmatch(
        r"tsv: (\d+) training sequences of (\d+) labels and (\d+) validation sequences of (\d+) "
        "labels",
        points["Data"],
    )
    training, its_labels, validation, others = map(int, data.groups())
    assert (training, validation, its_labels + others) == (100, 20, labels)
    assert "chosen by the error rate on the validation set" in points["Protocol"]
    metrics = (tmp_path / "letters" / "metrics.jsonl").read_text().splitlines()
    best = json.loads(metrics[model.status.epoch - 1])
    assert points["Accuracy"] == (
        f"{best['error_rate']:.2%} errors and {best['bits_per_label']:.4f} bits per label on the "
        f"validation set; {best['training_bits_per_label']:.4f} bits per label on the training "
        "set, with its noise and dropout"
    )
    start, _, settings = points["Training"].partition("settings that differ from the paper's: ")
    assert start == f"epoch {best['epoch']} of at most 4, step {best['step']}, on cpu; "
    listed = dict(re.findall(r"`([\w.]+) = (.*?)`", settings))
    assert listed["train.learning_rate"] == "0.03"
    assert listed["network.pooling"] == "2"
    assert listed["data.training"] == str(tmp_path / "toy.tsv")
    assert "train.momentum" not in listed, "it has the default"
    assert code_version() in points["Code"]


def test_a_card_of_sound_has_its_hours_and_its_frames(tmp_path):
    recipe = sound_recipe(tmp_path, "ctc", max_epochs=1)
    recipe = replace(recipe, network=replace(recipe.network, bidirectional=False, lookahead=3))
    train(recipe, tmp_path / "sounds")
    about, points = points_of(tmp_path / "sounds")
    assert about.startswith(
        "A CTC network (Graves et al., 2006): 1 forward layer of 24 peephole LSTM units that see 3 "
        "frames ahead; "
    )
    assert about.endswith(
        "It has 10 numbers (log_mel) every 10 ms of sound at 8 kHz, and 3 labels."
    )
    assert "by the log-loss on" in points["Protocol"]
    assert points["Accuracy"].startswith(
        f"{load_model(tmp_path / 'sounds').status.bits_per_label:.4f}"
    )
    hours = [float(number) for number in re.findall(r"\(([\d.]+) hours\)", points["Data"])]
    assert len(hours) == 2
    manifest = (tmp_path / "sounds.jsonl").read_text().splitlines()
    said = sum(json.loads(line)["duration"] for line in manifest) / 3600
    assert sum(hours) == pytest.approx(said, abs=0.01)


def test_a_card_of_a_prediction_network_has_its_labels_alone(tmp_path):
    recipe = toy_recipe(tmp_path, "prediction", max_epochs=1)
    recipe = replace(recipe, network=replace(recipe.network, embedding_size=5))
    train(recipe, tmp_path / "labels")
    about, points = points_of(tmp_path / "labels")
    assert (
        ": a prediction network (predictor) of 1 layer of 24 units, embeddings of size 5; " in about
    )
    assert about.endswith(" It has 4 labels.")
    assert " errors and " in points["Accuracy"]


def test_a_worse_epoch_leaves_the_card_of_the_best(tmp_path):
    recipe = toy_recipe(tmp_path, max_epochs=1)
    train(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "card.md").read_bytes()
    longer = replace(recipe, train=replace(recipe.train, max_epochs=2, stop_at="error_rate"))
    rates = iter([0.5, 0.6])
    train(longer, tmp_path / "other", validate=lambda *_: next(rates))
    assert "50.00% errors" in (tmp_path / "other" / "card.md").read_text()
    train(recipe, tmp_path / "run", resume=True)  # which has nothing left to do
    assert (tmp_path / "run" / "card.md").read_bytes() == before


# --- The commit ---------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package of one file; `code_version` looks there."""
    package = tmp_path / "repository" / "transduce"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(module, "PACKAGE", package)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    code_version.cache_clear()
    yield package
    code_version.cache_clear()


def git(folder, *arguments):
    identity = ["-c", "user.name=A Person", "-c", "user.email=person@example.org"]
    command = ["git", "-C", folder, *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version_now():
    code_version.cache_clear()
    return code_version()


def test_the_version_in_a_checkout_has_the_commit_and_says_if_files_differ_from_it(checkout):
    alone = f"transduce {transduce.__version__}"
    assert version_now() == alone
    git(checkout, "init")
    (checkout / "other.py").write_text("")
    git(checkout, "add", "other.py")
    git(checkout, "commit", "-m", "of another project")
    assert version_now() == alone, "the package is not in the repository"
    git(checkout, "add", "__init__.py")
    git(checkout, "commit", "-m", "of this one")
    commit = git(checkout, "rev-parse", "HEAD")
    assert version_now() == f"{alone} at commit {commit[:12]}"
    git(checkout, "tag", "v1")
    assert version_now() == f"{alone} at commit {commit[:12]}"
    (checkout / "__init__.py").write_text("1\n")
    assert version_now() == f"{alone} at commit {commit[:12]} with uncommitted changes"


def test_without_git_the_version_has_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert version_now() == f"transduce {transduce.__version__}"
