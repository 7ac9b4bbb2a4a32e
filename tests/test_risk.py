"""Minimum-risk training: the gradient, the candidates, and runs that lower the expected errors."""

import io
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lattices import alignments, path_score
from rapidfuzz.distance import Levenshtein
from rich.console import Console
from test_training import KILLED, assert_same, metrics_of, run, weights_of
from toys import sound_recipe, toy_recipe

from transduce import Transducer
from transduce.data.batches import Batch, Example
from transduce.data.pairs import Origin, Pair
from transduce.decoding.options import SearchOptions
from transduce.lattice import reference
from transduce.model.checkpoint import load_model
from transduce.training import fit as training
from transduce.training.corpus import read_corpus
from transduce.training.fit import TrainingError, fit
from transduce.training.progress import Progress
from transduce.training.recipe import recipe_toml
from transduce.training.risk import (
    LIKELIHOOD,
    CandidateErrors,
    candidate_losses,
    expected_errors,
    find_candidate_errors,
    risk_losses,
)

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def test_the_gradient_is_that_of_the_derivation():
    """The derivative of R by ln Pr(y|x) is q(y) (e(y) - R), and 0 in padding."""
    draw = torch.Generator().manual_seed(0)
    losses = 3 * torch.randn(4, 5, generator=draw, dtype=torch.float64)
    errors = torch.randint(0, 4, (4, 5), generator=draw).double()
    losses[1, 3:], errors[1, 3:] = torch.inf, 0.0
    losses.requires_grad_()
    risks = expected_errors(losses, errors)
    (gradient,) = torch.autograd.grad(risks.sum(), losses)
    for b in range(4):
        likelihoods = (-losses[b]).exp().tolist()
        q = [likelihood / sum(likelihoods) for likelihood in likelihoods]
        risk = sum(share * e for share, e in zip(q, errors[b].tolist(), strict=True))
        assert risks[b].item() == pytest.approx(risk, rel=1e-12)
        expected = [share * (e - risk) for share, e in zip(q, errors[b].tolist(), strict=True)]
        assert (-gradient[b]).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-14)
    assert gradient[1, 3:].eq(0).all()


TOY = [{(1, 2): 0, (2,): 1, (2, 2, 1): 2}, {(): 0, (1,): 1}, {(2, 1, 1): 0}]


def toy_lattices(backwards):
    """Return a float64 transducer, three inputs of 3, 2 and 1 frames, and their candidates."""
    torch.manual_seed(1)
    network = Transducer(2, 2, hidden_size=3, backwards=backwards).double()
    for weights in network.parameters():
        weights.data.mul_(10)  # otherwise all candidates have nearly the same gradient
    frames, lengths = torch.randn(3, 3, 2, dtype=torch.float64), torch.tensor([3, 2, 1])
    batch = Batch((), frames, lengths, torch.zeros(3, 0).long(), torch.zeros(3).long())
    return network, batch, CandidateErrors(TOY).rows([0, 1, 2])


def enumerated_objective(network, batch):
    """Return the summed objective from sums over all alignments of every candidate."""
    total = 0.0
    for x, length, candidates in zip(batch.frames, batch.num_frames, TOY, strict=True):
        likelihoods = []
        for labels in candidates:
            read = x[:length], torch.tensor(labels, dtype=torch.int64)
            read = [part.flip(0) if network.backwards else part for part in read]
            f, g, _ = network(read[0][None], length[None], read[1][None])
            arrows = reference.transitions(
                reference.output_distribution(f[0], g[0]), read[1], null=0
            )
            paths = [path_score(times, *arrows) for times in alignments(int(length), len(labels))]
            likelihoods.append(torch.stack(paths).exp().sum())
        mass = torch.stack(likelihoods).sum()
        for likelihood, errors in zip(likelihoods, candidates.values(), strict=True):
            total = total + likelihood / mass * errors
        total = total - LIKELIHOOD * likelihoods[0].log()
    return total


@pytest.mark.parametrize("backwards", [False, True])
def test_value_and_gradient_agree_with_sums_over_all_alignments(backwards):
    network, batch, rows = toy_lattices(backwards)
    _, objective = risk_losses(network, batch, rows)
    expected = enumerated_objective(network, batch)
    assert objective.sum().item() == pytest.approx(expected.item(), rel=1e-10)
    weights = list(network.parameters())
    found = torch.autograd.grad(objective.sum(), weights)
    for one, other in zip(found, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_the_gradient_agrees_with_finite_differences():
    network, batch, rows = toy_lattices(False)

    def objective():
        return risk_losses(network, batch, rows)[1].sum()

    weights = list(network.parameters())
    gradients = torch.autograd.grad(objective(), weights)
    for tensor, gradient in zip(weights, gradients, strict=True):
        direction, step = torch.randn_like(tensor), 1e-5
        with torch.no_grad():
            tensor.add_(step * direction)
            above = objective().item()
            tensor.sub_(2 * step * direction)
            below = objective().item()
            tensor.add_(step * direction)
        slope = (gradient * direction).sum().item()
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_losses_of_candidates_are_those_of_the_network_one_by_one():
    network, batch, _ = toy_lattices(True)
    rows = CandidateErrors(TOY).rows([2, 0])  # of the examples 2 and 0, which are inputs 0 and 1
    two = Batch((), *(t[[2, 0]] for t in batch.tensors))
    losses = candidate_losses(network, two, rows)
    assert torch.equal(risk_losses(network, two, rows)[0], losses[:, 0])  # the metric
    assert losses.isinf().tolist() == [[False, True, True], [False] * 3]
    for b, example in enumerate((2, 0)):
        for place, labels in enumerate(TOY[example]):
            alone = Batch(
                *((), two.frames[b : b + 1], two.num_frames[b : b + 1]),
                *(torch.tensor([labels], dtype=torch.int64), torch.tensor([len(labels)])),
            )
            torch.testing.assert_close(losses[b, place], network.losses(alone)[0])
    assert rows.errors.tolist() == [[0, 0, 0], [0, 1, 2]]


def example_of(source, labels):
    pair = Pair(source, tuple(source), (), Origin(Path("a.tsv"), 1))
    frames = torch.tensor(["_ab".index(symbol) for symbol in source])
    return Example(pair, frames, torch.tensor(labels))


def listed(rows, b):
    """Return the label errors of the candidates of an input."""
    mine = [row for row, i in enumerate(rows.inputs.tolist()) if i == b]
    labels = [tuple(rows.labels[row, : rows.num_labels[row]].tolist()) for row in mine]
    assert [rows.places[row].item() for row in mine] == list(range(len(mine)))
    return dict(zip(labels, rows.errors[b, : len(mine)].tolist(), strict=True))


def test_all_targets_of_a_source_are_candidates_and_errors_are_from_the_nearest():
    torch.manual_seed(0)
    network = Transducer(2, 3, hidden_size=4)
    examples = [
        example_of("ab", [1, 2, 3]),
        example_of("b", [3, 3]),
        example_of("ab", [3, 3]),
        example_of("ab", [1, 2, 3]),  # twice in the data
    ]
    rows = find_candidate_errors(network, examples, 4, CPU).rows(range(4))
    first, other, third, again = (listed(rows, b) for b in range(4))
    assert [next(iter(found)) for found in (first, other, third)] == [(1, 2, 3), (3, 3), (3, 3)]
    assert first == third == again and first[(3, 3)] == first[(1, 2, 3)] == 0
    found = network.search(
        Batch.of(examples[:1]), SearchOptions(beam_width=4, n_best=4, with_timings=False)
    )
    outputs = {hypothesis.labels for hypothesis in found[0]}
    assert len(outputs) == 4 and first.keys() == {(1, 2, 3), (3, 3)} | outputs
    for labels, errors in first.items():
        distances = [Levenshtein.distance(labels, target) for target in ((1, 2, 3), (3, 3))]
        assert errors == min(distances)
    # Of another source, that target is no longer correct.
    assert (1, 2, 3) not in other or other[(1, 2, 3)] == 2
    assert all(e == Levenshtein.distance(labels, (3, 3)) for labels, e in other.items())


def write_ambiguous(path, count=150):
    """Write words in capitals, where each letter is X instead with probability 0.4.

    No word comes twice, and so no letter tells which it is.
    """
    draw, words = random.Random(0), set()
    while len(words) < count:
        words.add("".join(draw.choice("abcdef") for _ in range(draw.randint(3, 5))))
    lines = [
        f"{word}\t{''.join('X' if draw.random() < 0.4 else c.upper() for c in word)}\n"
        for word in sorted(words)
    ]
    path.write_text("".join(lines))


def phases(tmp_path):
    """Train on the ambiguous map until it stops; return the recipe of a last phase."""
    write_ambiguous(tmp_path / "toy.tsv")
    recipe = toy_recipe(tmp_path, max_epochs=60, patience=3)
    small = {"hidden_size": 8, "prediction_size": 8}
    recipe = replace(recipe, network=replace(recipe.network, **small))
    run(recipe, tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}
    return replace(recipe, train=replace(recipe.train, max_epochs=5, patience=20, **last))


def test_expected_errors_fall_where_training_by_log_loss_had_stopped(tmp_path):
    recipe = phases(tmp_path)
    stopped = metrics_of(tmp_path / "first")
    assert len(stopped) < 60
    examples = read_corpus(recipe.data).training
    network = load_model(tmp_path / "first").network
    rows = find_candidate_errors(network, examples, 4, CPU).rows(range(len(examples)))

    def risk(name, file="last.safetensors"):
        weights = weights_of(tmp_path / name, file)
        network.load_state_dict({one: weights[f"network.{one}"] for one in network.state_dict()})
        with torch.no_grad():
            losses = candidate_losses(network, Batch.of(examples), rows)
        return expected_errors(losses, rows.errors).mean().item()

    run(recipe, tmp_path / "plain")
    run(replace(recipe, train=replace(recipe.train, minimum_risk=4)), tmp_path / "risk")
    # 1.27 errors in a word before, 1.17 with more of the log-loss, 0.88 by minimum risk.
    assert risk("risk") < 0.8 * risk("first", "model.safetensors")
    assert risk("risk") < 0.8 * risk("plain")
    # The metric is still the log-loss of the targets.
    for metrics in metrics_of(tmp_path / "risk"):
        assert metrics["training_bits_per_label"] > 0.9 * stopped[-1]["training_bits_per_label"]


@pytest.mark.parametrize("backwards", [False, True])
def test_the_same_seed_gives_the_same_weights(tmp_path, backwards):
    recipe = toy_recipe(tmp_path, max_epochs=1, precision="bf16-mixed")
    recipe = replace(recipe, network=replace(recipe.network, backwards=backwards, dropout=0.2))
    run(recipe, tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}
    recipe = replace(recipe, train=replace(recipe.train, minimum_risk=3, **last))
    for name in ("a", "b"):
        run(recipe, tmp_path / name)
        torch.rand(3)  # other random draws make no difference
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    start = load_model(tmp_path / "first").network.state_dict()["prediction_network.output.weight"]
    moved = weights_of(tmp_path / "a")["network.prediction_network.output.weight"] - start
    assert moved.abs().max() > 1e-3


# An epoch has 13 steps, and every fifth step is saved.
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_result_of_one_that_was_not_stopped(tmp_path):
    run(toy_recipe(tmp_path, max_epochs=2), tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}
    recipe = toy_recipe(tmp_path, save_every=5, averaging=0.9, minimum_risk=3, **last)
    (tmp_path / "recipe.toml").write_text(recipe_toml(recipe))
    command = [sys.executable, "-c", KILLED, str(tmp_path), "in a step", "23"]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = training.read_tensors(tmp_path / "run" / "last.safetensors", training.STATE)[1]
    assert left["position"]["step"] == 20
    run(recipe, tmp_path / "run", resume=True)
    run(recipe, tmp_path / "whole")
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))
    best = "model.safetensors"
    assert (tmp_path / "run" / best).read_bytes() == (tmp_path / "whole" / best).read_bytes()
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_the_candidates_are_reported_and_count_as_memory(tmp_path):
    first = toy_recipe(tmp_path, max_epochs=1)
    run(first, tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}
    said = []
    for name, settings in (("plain", {}), ("risk", {"minimum_risk": 3})):
        file = io.StringIO()
        recipe = toy_recipe(tmp_path, max_epochs=1, **last, **settings)
        fit(recipe, tmp_path / name, progress=Progress(Console(file=file, width=300)))
        said.append(file.getvalue())
    megabytes = [float(text.split("about ")[1].split(" MB")[0]) for text in said]
    assert megabytes[0] < megabytes[1] < 4 * megabytes[0]
    assert "8 sequences of up to 6 frames and 6 labels with 4 candidates each, and" in said[1]
    assert "found the candidates of 100 sequences in 0 s" in said[1]
    assert "candidates" not in said[0]


def test_settings_that_do_not_go_with_it_are_refused(tmp_path):
    run(toy_recipe(tmp_path, max_epochs=1), tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}

    def refused(match, kind="transducer", make=toy_recipe, **settings):
        recipe = make(tmp_path, kind, **({"minimum_risk": 4} | last | settings))
        recipe = replace(recipe, network=replace(recipe.network, dropout=0.1))
        with pytest.raises(TrainingError, match=match):
            run(recipe, tmp_path / "refused")
        assert not (tmp_path / "refused" / "last.safetensors").exists()

    refused(r"^train.minimum_risk is for a transducer, not ctc; leave it out$", "ctc")
    together = r"^train.minimum_risk and train.{} do not go together; leave one of them out$"
    refused(together.format("consistency"), consistency=1.0)
    refused(together.format("teacher"), teacher=(tmp_path / "first",))
    for name in last:
        refused(rf"knows nothing without train.{name}; name a trained", **{name: None})
    with pytest.raises(ValueError, match=r"minimum_risk must be at least 0, not -1"):
        toy_recipe(tmp_path, minimum_risk=-1)


def test_sounds_that_are_read_in_every_epoch_are_refused(tmp_path):
    run(sound_recipe(tmp_path, max_epochs=1), tmp_path / "first")
    last = {"init_transcription": tmp_path / "first", "init_prediction": tmp_path / "first"}
    recipe = sound_recipe(tmp_path, max_epochs=1, minimum_risk=2, **last)
    run(recipe, tmp_path / "in memory")
    unread = replace(recipe, data=replace(recipe.data, memory=0))
    with pytest.raises(TrainingError, match=r"^train.minimum_risk keeps its candidates in memory"):
        run(unread, tmp_path / "unread")
