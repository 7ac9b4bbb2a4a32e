"""Run commands in tests, and train small runs for them."""

import io
import os
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from transduce import cli

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PATH": "/usr/bin:/bin",
    "TERM": "xterm",
    "OMP_WAIT_POLICY": "passive",  # as in conftest.py
}
MAIN = "from transduce.cli import main; main()"
WORDS = ["ab", "ba", "aab", "bba", "abab", "a", "b", "bb", "aa", "abb", "baa", "bab"]
# A network that learns a dozen pairs by heart.
SMALL = """
[network]
network = "NETWORK"
hidden_size = 16
prediction_size = 16

[train]
optimiser = "adamw"
learning_rate = 0.02
weight_noise = 0.0
max_sequences = 12
max_epochs = 40
"""
RECIPE = f"""
[data]
corpus = "tsv"
training = "pairs.tsv"
validation = "pairs.tsv"
test = "pairs.tsv"
target_notation = {{ split = "spaces" }}
{SMALL}"""


class Done(NamedTuple):
    """The exit code and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def transduce(*arguments, folder, text=""):
    """Run a command in this process, which is faster than starting Python."""
    before, code = Path.cwd(), 0
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), replaced_input(text):
            cli.app([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):  # as the interpreter does
            err.write(code + "\n")
            code = 1
    finally:
        os.chdir(before)
    return Done(code, out.getvalue(), err.getvalue())


@contextmanager
def replaced_input(text):
    stream = io.TextIOWrapper(io.BytesIO(text)) if isinstance(text, bytes) else io.StringIO(text)
    before, sys.stdin = sys.stdin, stream
    try:
        yield
    finally:
        sys.stdin = before


def in_a_new_process(*arguments, folder, text=None, code=MAIN):
    """Run a command in a process of its own, to its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, env=ENVIRONMENT
    )


def started(*arguments, folder, **streams):
    """Start a command in a process of its own; by default its streams are pipes of text."""
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MAIN}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options = pipes | {"text": True} | streams
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, **options)


def train_small_runs(folder, *networks, epochs=40):
    """Train networks on a few pairs, whose letters become capitals, doubled; one run for each.

    After 40 epochs they know the pairs by heart.
    """
    lines = [f"{word}\t{' '.join(2 * c.upper() for c in word)}" for word in WORDS]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    for network in networks:
        (folder / f"{network}.toml").write_text(RECIPE.replace("NETWORK", network))
        settings = ("--train.max_epochs", epochs)
        done = transduce("train", f"{network}.toml", *settings, folder=folder)
        assert done.returncode == 0, done.stderr
