"""The progress of a run on consoles of different kinds."""

import io

from rich.console import Console

from transduce.training import progress as module
from transduce.training.progress import Progress


def shown(terminal, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    file = io.StringIO()
    with Progress(Console(file=file, force_terminal=terminal, width=150)) as progress:
        progress.say("[3] pairs")
        for epoch in (1, 2):
            progress.start_epoch(epoch, 2, 0)
            progress.step(8, 3.25)
            progress.step(8, 3.0)
            progress.end_epoch(3.0, 1.0, 2.5, 0.125, best=epoch == 1)
    return file.getvalue()


def test_without_a_terminal_there_are_lines_of_text(monkeypatch):
    lines = shown(False, monkeypatch).splitlines()
    assert lines[0] == "[3] pairs"
    assert lines[1].startswith("epoch 1: 3.250 bits per label, ")
    assert "step 1 of 2" in lines[1] and "sequences/s" in lines[1] and lines[1].endswith(" s left")
    assert lines[3].startswith(
        "epoch 1: 3.000 bits per label in training, 2.500 in validation, error rate 12.50 %"
    )
    assert lines[3].endswith("the best so far") and not lines[6].endswith("the best so far")
    assert "error rate 12.50 %" in lines[4]
    assert len(lines) == 7
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    text = shown(True, monkeypatch)
    assert "\x1b" in text and "━" in text
    assert "3.000 bits per label" in text
    assert "2.500 in validation" in text


def test_a_quiet_console_shows_nothing():
    console = Console(quiet=True, file=io.StringIO(), force_terminal=True)
    with Progress(console) as progress:
        progress.start_epoch(1, 1, 0)
        progress.step(1, 1.0)
        progress.end_epoch(1.0, 1.0, 1.0, None, best=True)
    assert console.file.getvalue() == ""
