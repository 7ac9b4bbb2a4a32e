"""Training on two machines: the same result as on one, and an end when a process is lost."""

import re
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from machines import TwoMachines, finished, free_port
from rich.console import Console
from safetensors.torch import load_file
from toys import toy_recipe

from transduce.training.fit import fit
from transduce.training.peers import KEEP_ALIVE
from transduce.training.progress import Progress
from transduce.training.recipe import recipe_toml

# Sums of gradients in another order differ in the last bits: 1.5e-6 after two epochs was measured.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines():
    """Two machines, and a corpus and recipe that they share."""
    with TwoMachines() as two:
        yield two


def write_recipe(folder, **settings):
    """Write a recipe of steepest descent with weight noise and momentum; return it."""
    settings = {"optimiser": "sgd", "learning_rate": 0.05, "weight_noise": 0.02} | settings
    recipe = toy_recipe(folder, **({"max_sequences": 3, "max_epochs": 2} | settings))
    (folder / "recipe.toml").write_text(recipe_toml(recipe))
    return recipe


def train_alone(recipe, folder, **options):
    fit(recipe, folder, progress=Progress(Console(quiet=True)), **options)
    return load_file(folder / "last.safetensors")


def state(folder):
    return load_file(folder / "last.safetensors")


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **ROUNDING)


def sentences(text):
    """Return what our command says on standard error, without Lightning's lines."""
    return [line for line in text.splitlines() if line.startswith("transduce: ")]


def succeeded(processes):
    for code, _, errors in finished(processes):
        assert code == 0, errors[-3000:]


def test_torchrun_on_two_machines_takes_the_steps_of_one_process(tmp_path, machines):
    """The command as the guide has it; a second machine without the folder of the run."""
    recipe = write_recipe(tmp_path)
    endpoint = f"{machines.machines[0].address}:{free_port()}"
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "7"]
    train = ["-m", "transduce", "train", tmp_path / "recipe.toml", "--run-folder"]
    started = [
        machine.start(
            [
                *(sys.executable, "-m", *torchrun, "--local-addr", machine.address),
                *("--rdzv-conf", f"is_host={i == 0}"),  # a namespace has no name of its own
                *(*train, tmp_path / f"run-{i}"),
            ]
        )
        for i, machine in enumerate(machines.machines)
    ]
    succeeded(started)
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("run-")]
    assert len(folders) == 1, "the second machine wrote a folder"
    assert_close(state(folders[0]), train_alone(recipe, tmp_path / "alone"))


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory, machines):
    """Train on two machines, of which the second comes late; return the state and the results."""
    folder = tmp_path_factory.mktemp("unstopped")
    write_recipe(folder)
    train = ["train", folder / "recipe.toml", "--run", folder / "run"]
    results = finished(machines.srun(train, {0: {"note_after": 0.2}}, delays=(0.0, 4.0)))
    return state(folder / "run"), results


def test_a_process_waits_for_one_that_comes_late_and_says_so(machines, unstopped):
    (code, _, errors), (other, _, _) = unstopped[1]
    assert (code, other) == (0, 0)
    address = machines.machines[0].address
    (sentence,) = sentences(errors)
    assert sentence.startswith(f"transduce: waiting for the others of 2 processes at {address}:")


@pytest.mark.parametrize("lost", [0, 1])
def test_all_stop_when_a_process_is_lost_and_resume_ends_as_if_nothing_had_happened(
    tmp_path, machines, lost, unstopped
):
    write_recipe(tmp_path, save_every=10)
    train = ["train", tmp_path / "recipe.toml", "--run", tmp_path / "run"]
    results = finished(machines.srun(train, {lost: {"kill_at": 50}}))
    ended = time.time()
    code, output, _ = results[lost]
    assert code == -signal.SIGKILL
    code, _, errors = results[1 - lost]
    assert code == 1
    (sentence,) = sentences(errors)
    assert re.match(rf"transduce: process {lost} was lost on \S+: it was killed, ", sentence)
    assert "Traceback" not in errors
    assert ended - float(output.split("killed at ")[1].split()[0]) < 15
    succeeded(machines.srun([*train, "--resume"]))
    found, (whole, _) = state(tmp_path / "run"), unstopped
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_all_stop_when_the_network_is_cut(tmp_path, machines):
    """Nothing tells the processes; they wait in Gloo until keep-alive packets stay unanswered.

    By default that takes 30 seconds, here 6.
    """
    assert KEEP_ALIVE == {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    if not machines.namespaces:
        pytest.skip("the system allows no network namespaces")
    write_recipe(tmp_path, max_epochs=1000, patience=1000)
    train = ["train", tmp_path / "recipe.toml", "--run", tmp_path / "run"]
    sooner = {"keep_alive": {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}}
    started = machines.srun(train, {0: sooner, 1: sooner})
    while all(process.poll() is None for process in started):
        if (tmp_path / "run" / "metrics.jsonl").exists():
            break
        time.sleep(0.1)
    start = time.monotonic()
    try:
        machines.cut()
        results = finished(started)
    finally:
        machines.mend()
    assert 4 < time.monotonic() - start < 30
    for rank, (code, _, errors) in enumerate(results):
        assert code == 1
        (sentence,) = sentences(errors)
        assert re.match(rf"transduce: process {1 - rank} was lost on ", sentence)


def test_a_run_goes_on_with_another_number_of_machines(tmp_path, machines):
    recipe = write_recipe(tmp_path, max_epochs=3)
    whole = train_alone(recipe, tmp_path / "alone")
    train = ["train", tmp_path / "recipe.toml", "--run", tmp_path / "run"]
    succeeded(machines.srun([*train, "--train.max_epochs", "1"]))
    for epochs in (2, 3):
        longer = replace(recipe, train=replace(recipe.train, max_epochs=epochs))
        if epochs == 2:
            train_alone(longer, tmp_path / "run", resume=True)
        else:
            succeeded(machines.srun([*train, "--resume", "--train.max_epochs", "3"]))
    assert_close(state(tmp_path / "run"), whole)


def test_a_student_learns_from_a_teacher_on_two_machines(tmp_path, machines):
    train_alone(toy_recipe(tmp_path, max_epochs=2), tmp_path / "teacher")
    recipe = write_recipe(tmp_path, max_epochs=1, teacher=(tmp_path / "teacher",))
    train = ["train", tmp_path / "recipe.toml", "--run", tmp_path / "run"]
    succeeded(machines.srun(train))
    assert_close(state(tmp_path / "run"), train_alone(recipe, tmp_path / "alone"))


def test_an_error_on_one_machine_ends_both_with_its_sentence(tmp_path, machines):
    write_recipe(tmp_path)
    train = ["train", tmp_path / "recipe.toml", "--run", tmp_path / "run"]
    elsewhere = {"arguments": ["--data.training", str(tmp_path / "nowhere.tsv")]}
    (code, _, errors), (other, _, its_errors) = finished(machines.srun(train, {1: elsewhere}))
    assert (code, other) == (1, 1)
    (its_own,), (sentence,) = sentences(its_errors), sentences(errors)
    assert "nowhere.tsv" in its_own
    assert re.match(r"transduce: process 1 on \S+ failed: .*nowhere.tsv", sentence)
    assert "Traceback" not in errors + its_errors
