"""The progress of a run on consoles of different kinds."""

import io

import pytest
from rich.console import Console

from transduce.training import progress as module
from transduce.training.progress import Progress


def shown(terminal, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    file = io.StringIO()
    with Progress(Console(file=file, force_terminal=terminal, width=150)) as progress:
        progress.say("[bold] pairs")
        for epoch in (1, 2):
            progress.start_epoch(epoch, 2, 0)
            progress.step(8, 3.25)
            progress.step(8, 3.0)
            progress.end_epoch(3.0, 1.0, 2.5, 0.125, best=epoch == 1)
    return file.getvalue()


def test_without_a_terminal_there_are_lines_of_text(monkeypatch):
    lines = shown(False, monkeypatch).splitlines()
    assert lines[0] == "[bold] pairs"
    assert lines[1].startswith("epoch 1: 3.250 bits per label, ")
    assert "step 1 of 2" in lines[1] and "sequences/s" in lines[1]
    assert lines[3].startswith(
        "epoch 1: 3.000 bits per label in training, 2.500 in validation, error rate 12.50 %"
    )
    assert lines[3].endswith("the best so far") and not lines[6].endswith("the best so far")
    assert "error rate 12.50 %" in lines[4]
    assert lines[2].endswith("step 2 of 2, 0 s left")
    assert len(lines) == 7
    assert "\x1b" not in "".join(lines)


def test_the_time_left_does_not_count_a_first_step_that_compiles_kernels(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    clock = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: clock)
    file = io.StringIO()
    with Progress(Console(file=file, width=150)) as progress:
        progress.start_epoch(1, 100, 10)  # resumed after 10 steps
        for seconds in (60.0, 2.0, 2.0):
            clock += seconds
            progress.step(8, 3.0)
    ends = [line.split("step ")[1] for line in file.getvalue().splitlines()]
    assert ends == ["11 of 100", "12 of 100, 176 s left", "13 of 100, 174 s left"]


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    text = shown(True, monkeypatch)
    assert "\x1b" in text and "━" in text
    assert "3.000 bits per label" in text
    assert "2.500 in validation" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_slow_first_step_and_validation_say_that_kernels_are_compiled(monkeypatch, terminal):
    monkeypatch.setattr(module, "SECONDS_BEFORE_NOTE", 0.01)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150)
    with Progress(console) as progress:
        for epoch in (1, 2):
            progress.start_epoch(epoch, 1, 0)
            wait_for_note(progress)
            progress.step(8, 3.25)
            wait_for_note(progress)
            progress.end_epoch(3.0, 1.0, 2.5)
    for what in ("step", "validation"):
        said = f"the first {what} may compile kernels for this machine: about a minute, once"
        assert said in file.getvalue()
        assert terminal or file.getvalue().count(said) == 1


def wait_for_note(progress):
    progress.note.join()
    if progress.bar is not None:
        progress.bar.refresh()


def test_a_quick_first_step_says_nothing_of_kernels(monkeypatch):
    assert "kernels" not in shown(False, monkeypatch)


def test_a_quiet_console_shows_nothing():
    console = Console(quiet=True, file=io.StringIO(), force_terminal=True)
    with Progress(console) as progress:
        progress.start_epoch(1, 1, 0)
        progress.step(1, 1.0)
        progress.end_epoch(1.0, 1.0, 1.0, None, best=True)
    assert console.file.getvalue() == ""
