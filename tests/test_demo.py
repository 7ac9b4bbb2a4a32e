"""The demonstration: the command that it suggests."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ENVIRONMENT
from commands import transduce as command

import transduce
from transduce import demo


@pytest.mark.parametrize(
    "program, path, expected",
    [
        (".venv/bin/transduce", "", ".venv/bin/transduce"),  # as `make demo` calls it
        (".venv/bin/transduce", ".venv/bin", "transduce"),  # in an active environment
        ("my programs/transduce", "", "'my programs/transduce'"),
        ("-c", "", ".venv/bin/transduce"),
    ],
)
def test_the_suggested_command_is_the_one_that_was_run(
    tmp_path, monkeypatch, program, path, expected
):
    monkeypatch.chdir(tmp_path)
    for folder in (".venv/bin", "my programs"):
        os.makedirs(folder)
        (tmp_path / folder / "transduce").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [program, "demo"])
    monkeypatch.setattr(sys, "executable", ".venv/bin/python")
    monkeypatch.setenv("PATH", path)
    assert demo._this_command() == expected


def test_without_the_program_the_suggestion_is_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "demo"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert demo._this_command() == f"{tmp_path / 'python'} -m transduce"


def test_the_suggested_line_runs_as_printed(tmp_path, monkeypatch):
    folder = tmp_path / "my runs"
    transduce.load("english-pronouncer").save_pretrained(folder / "transducer")
    monkeypatch.setattr(sys, "argv", ["nowhere/transduce", "demo"])
    line = demo.next_command(Path("my runs"))
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [row.split("\t")[0] for row in done.stdout.splitlines()] == ["transducer"] * 3


def test_each_network_is_trained_with_the_seed_in_a_folder_of_its_own(tmp_path, monkeypatch):
    trained, loaded = [], []
    monkeypatch.setattr(
        demo, "fit", lambda recipe, folder, **_: trained.append((recipe.train.seed, folder))
    )
    monkeypatch.setattr(demo, "load_model", loaded.append)
    monkeypatch.setattr(demo, "read_splits", lambda _: SimpleNamespace(test=[]))
    for name in ("evaluate", "results_table", "pronunciations"):
        monkeypatch.setattr(demo, name, lambda *_: "")
    demo.run(tmp_path, 7)
    assert trained == [(7, tmp_path / name) for name in ("prediction", "ctc", "transducer")]
    assert loaded == [*(folder for _, folder in trained), tmp_path / "transducer"]


def test_a_figure_is_optional_and_its_folder_must_be_there(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "run", lambda *arguments: asked.append(arguments))
    for options in ((), ("--figure", "lattice.png")):
        assert command("demo", *options, folder=tmp_path).returncode == 0
    assert asked == [(Path("runs/demo"), 0, None), (Path("runs/demo"), 0, Path("lattice.png"))]
    done = command("demo", "--figure", "no/lattice.png", folder=tmp_path)
    assert done.returncode == 1 and len(asked) == 2
    assert done.stderr == "transduce: --figure no/lattice.png: there is no folder no; make it\n"
