"""The demonstration: the command that it suggests."""

import os
import sys

import pytest

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
