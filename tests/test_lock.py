"""The lock of a run's folder: one training at a time, also after a kill."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from rich.console import Console
from toys import toy_recipe

from transduce.training import lock as module
from transduce.training.fit import fit
from transduce.training.lock import LOCK_FILE, LockError, lock_folder
from transduce.training.progress import Progress

# The file is run alone, because importing the package takes seconds.
HOLD = """
import runpy, sys
from pathlib import Path
with runpy.run_path(sys.argv[1])["lock_folder"](Path(sys.argv[2])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(folder):
    command = [sys.executable, "-c", HOLD, module.__file__, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def files(folder):
    return {path.name for path in folder.iterdir()}


def train(recipe, folder, **options):
    return fit(recipe, folder, progress=Progress(Console(quiet=True)), **options)


def test_a_second_training_is_refused_until_the_first_is_killed(tmp_path):
    folder, recipe = tmp_path / "run", toy_recipe(tmp_path, max_epochs=1)
    for resume in (False, True):
        with held_by_another_process(folder) as process:
            with pytest.raises(LockError) as error:
                train(recipe, folder, resume=resume)
            who = f"process {process.pid} on {socket.gethostname()}, started at 20"
            assert str(error.value).startswith(who)
            assert str(error.value).endswith(
                f" trains in {folder}; wait until it ends, stop it, or choose another folder"
            )
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert LOCK_FILE in files(folder)
        train(recipe, folder, resume=resume)
        assert LOCK_FILE not in files(folder)


def test_a_training_that_refuses_leaves_the_other_ones_lock(tmp_path):
    with lock_folder(tmp_path / "run"):
        with pytest.raises(LockError, match=f"^process {os.getpid()} on "):
            train(toy_recipe(tmp_path), tmp_path / "run")
        assert files(tmp_path / "run") == {LOCK_FILE}
    assert not (tmp_path / "run").exists()


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path):
    recipe = toy_recipe(tmp_path)
    (tmp_path / "toy.tsv").write_text("no tab\n")
    with pytest.raises(ValueError, match="there is no tab"):
        train(recipe, tmp_path / "runs" / "run")
    assert files(tmp_path) == {"toy.tsv"}


def test_a_holder_that_has_written_nothing_yet_is_another_process(tmp_path):
    with lock_folder(tmp_path):
        (tmp_path / LOCK_FILE).write_text("")
        with pytest.raises(LockError, match=r"^another process trains in "), lock_folder(tmp_path):
            pass


def test_a_lock_that_its_holder_deletes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    original, calls = module.lock_descriptor, []

    def deleted_first(descriptor):
        if not calls:
            (tmp_path / LOCK_FILE).unlink()
        calls.append(descriptor)
        original(descriptor)

    monkeypatch.setattr(module, "lock_descriptor", deleted_first)
    with lock_folder(tmp_path) as lock:
        lock.check()
        with pytest.raises(LockError), lock_folder(tmp_path):
            pass
    assert len(calls) == 3


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "lock_descriptor", refuse)
    with pytest.warns(UserWarning, match="has no locks"), lock_folder(tmp_path / "run") as lock:
        lock.check()


class Interfering(Progress):
    """Does something to the folder after the first epoch."""

    def __init__(self, interfere):
        super().__init__(Console(quiet=True))
        self.interfere = interfere

    def end_epoch(self, *results):
        if self.epoch == 1:
            self.interfere()


def test_a_lock_that_is_deleted_ends_the_training(tmp_path):
    folder = tmp_path / "run"
    deleting = Interfering((folder / LOCK_FILE).unlink)
    with pytest.raises(LockError, match=r"^.*run\.lock was deleted or moved during the training"):
        fit(toy_recipe(tmp_path, max_epochs=2), folder, progress=deleting)


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_disappears_ends_the_training_and_is_not_made_again(tmp_path, moved):
    folder, recipe = tmp_path / "run", toy_recipe(tmp_path, max_epochs=2)

    def interfere():
        if moved:
            folder.rename(tmp_path / "elsewhere")
            return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    with pytest.raises(LockError, match=f"^{re.escape(str(folder))} was deleted or moved"):
        fit(recipe, folder, progress=Interfering(interfere))
    assert not folder.exists()
    if moved:  # the moved folder can be resumed
        assert train(recipe, tmp_path / "elsewhere", resume=True).status.epoch == 2
