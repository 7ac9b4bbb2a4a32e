"""Compiled kernels on disk: fresh, private, and harmless where nothing can be written."""

import ast
import fcntl
import multiprocessing
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest

from transduce.kernels.simd import cache as module
from transduce.kernels.simd.options import compiled

PACKAGE = Path(__file__).parent.parent / "transduce"
KERNEL = (
    "from transduce.lattice.constants import BY\n\ndef scaled(pair):\n    return pair[0] * BY\n"
)


class Values(NamedTuple):
    first: np.ndarray


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two files, one of which has a kernel; the home and temporary folders are new."""
    folder = tmp_path / "site" / "transduce"
    (folder / "lattice").mkdir(parents=True)
    (folder / "lattice" / "constants.py").write_text("BY = 2\n")
    (folder / "lattice" / "kernel.py").write_text(KERNEL)
    monkeypatch.setattr(module, "PACKAGE", folder)
    module._say_once.cache_clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(module, "_temporary_folder", lambda: str(tmp_path / "tmp"))
    return folder


def called(package, values=None, name="kernel"):
    """Call the kernel as a new process does; return what was compiled, and the result."""
    module.source_hash.cache_clear()
    module._source.cache_clear()
    file, names = package / "lattice" / f"{name}.py", {"__name__": __name__}
    exec((package / "lattice" / "constants.py").read_text(), names)
    code = file.read_text().replace("from transduce.lattice.constants import BY", "")
    exec(compile(code, str(file), "exec"), names)
    built = []
    with module.listening(built.append):
        result = compiled(names["scaled"])(values or Values(np.ones(1)))
    return built, float(result[0])


def entries(folder):
    return sorted(folder.rglob("*.kernel"))


def closed(folder):
    """Put a file in the place of a folder, so that nothing can be written there, even by root."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def test_a_kernel_is_compiled_once_and_then_read(package, capsys):
    assert called(package) == (["kernel.scaled"], 2.0)
    [entry] = entries(package)
    assert entry.parent.parent == package / "__pycache__" / "kernels"
    assert called(package) == ([], 2.0)
    assert called(package, Values(np.ones(1, np.float32))) == (["kernel.scaled"], 2.0)
    assert called(package) == ([], 2.0)
    assert capsys.readouterr() == ("", "")


def test_a_change_in_an_imported_file_compiles_the_kernel_again(package):
    called(package)
    before = entries(package)
    (package / "lattice" / "constants.py").write_text("BY = 3\n")
    assert called(package) == (["kernel.scaled"], 3.0)
    assert len(entries(package)) == 1 and entries(package) != before, "the old one was not deleted"


def test_an_entry_of_a_class_that_was_renamed_is_never_read(package, monkeypatch):
    called(package)
    monkeypatch.delitem(globals(), "Values")  # as if the module had another name for it now
    (package / "lattice" / "kernel.py").write_text(KERNEL + "# after the change\n")
    assert called(package, (np.ones(1),)) == (["kernel.scaled"], 2.0)


def test_the_folder_that_the_user_has_set_wins(package, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "chosen"))
    called(package)
    assert len(entries(tmp_path / "chosen")) == 1 and not entries(package)
    assert called(package) == ([], 2.0)


def test_the_users_own_folder_comes_after_the_packages(package, tmp_path, capsys):
    closed(package / "__pycache__")
    called(package)
    [entry] = entries(tmp_path / "home")
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert called(package) == ([], 2.0)
    assert capsys.readouterr().err == ""


def test_without_a_writable_package_or_home_a_private_temporary_folder_is_used(
    package, tmp_path, capsys
):
    closed(package / "__pycache__")
    closed(tmp_path / "home")
    assert called(package) == (["kernel.scaled"], 2.0)
    [entry] = entries(tmp_path / "tmp")
    (package / "lattice" / "other.py").write_text(KERNEL)
    assert called(package, name="other") == (["other.scaled"], 2.0)
    for folder in (entry.parent, entry.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"transduce: compiled kernels are kept in {entry.parent.parent}, because"
    )
    assert "set NUMBA_CACHE_DIR" in line
    assert called(package) == ([], 2.0)
    assert capsys.readouterr().err == ""


def test_a_user_without_a_home_leaves_no_folder_named_tilde(package, tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    closed(package / "__pycache__")
    called(package)
    assert len(entries(tmp_path / "tmp")) == 1
    assert not (tmp_path / "~").exists()


def test_where_nothing_can_be_written_kernels_are_compiled_for_the_process_alone(
    package, tmp_path, capsys
):
    for folder in (package / "__pycache__", tmp_path / "home"):
        closed(folder)
    (tmp_path / "tmp").rmdir()
    closed(tmp_path / "tmp")
    assert called(package) == (["kernel.scaled"], 2.0)
    [line] = capsys.readouterr().err.splitlines()
    assert "are not kept, and every process compiles them again" in line


@pytest.mark.parametrize("level", [0, 1], ids=["folder", "parent"])
def test_nothing_is_read_from_a_folder_that_others_can_write_into(package, tmp_path, level):
    called(package)
    [entry] = entries(package)
    entry.write_bytes(b"whatever others have written")
    entry.parents[level].chmod(0o777)
    assert called(package) == (["kernel.scaled"], 2.0)
    assert entry.read_bytes() == b"whatever others have written"
    assert len(entries(tmp_path / "home")) == 1
    assert called(package) == ([], 2.0)


def test_nothing_is_read_from_a_folder_of_another_user(package, tmp_path, monkeypatch):
    closed(package / "__pycache__")
    closed(tmp_path / "home")
    called(package)
    [entry] = entries(tmp_path / "tmp")
    content = entry.read_bytes()
    user, owner = os.geteuid() + 1, os.stat(PACKAGE).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if owner == 0:  # root's folders are trusted, and a test of root makes nothing else
        os.chown(entry.parent, user + 1, -1)
    assert called(package) == (["kernel.scaled"], 2.0)
    assert entry.read_bytes() == content


def test_a_damaged_entry_is_compiled_again(package):
    called(package)
    [entry] = entries(package)
    content = entry.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"\x80\x04."):
        entry.write_bytes(damaged)
        assert called(package) == (["kernel.scaled"], 2.0)
        assert called(package) == ([], 2.0)


def test_the_files_that_kernels_import_are_found_without_parsing_them():
    files = [file for file in PACKAGE.rglob("*.py") if "import compiled" in file.read_text()]
    files += [PACKAGE / "lstm" / "cpu.py", PACKAGE / "lattice" / "cpu" / "additive.py"]
    for file in set().union(*(module.sources(file) for file in files)):
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "transduce"
            ):
                assert node.module != "transduce", f"{file} imports from the whole package"
                folder = PACKAGE.parent.joinpath(*node.module.split("."))
                names = [alias.name for alias in node.names]
                assert not any((folder / f"{name}.py").exists() for name in names), file
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {a.name for a in node.names if a.name.startswith("transduce")}
        found = {
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in module._source(file)[1]
        }
        assert {name.removesuffix(".__init__") for name in found} == imported, file


def test_compiling_is_announced_once_and_only_on_a_terminal(package, capsys, monkeypatch):
    module._announce.cache_clear()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for _ in range(2):
        module._tell("kernel.scaled")
    assert capsys.readouterr().err == (
        "transduce: compiling kernels for this machine (once, about a minute) ...\n"
    )
    module._announce.cache_clear()
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    module._tell("kernel.scaled")
    assert capsys.readouterr().err == ""


def call_in_another_process(package, start, answers):
    """Call the kernel when `start` is set; send what was compiled."""
    start.wait()
    answers.put(called(package))


def test_of_two_processes_one_compiles_and_the_other_waits(package, monkeypatch):
    lower = numba.core.codegen.CPUCodeLibrary.finalize

    def slowly(library):
        time.sleep(0.3)  # so that the other process looks while this one compiles
        return lower(library)

    monkeypatch.setattr(numba.core.codegen.CPUCodeLibrary, "finalize", slowly)
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Event(), fork.Queue()
    processes = [
        fork.Process(target=call_in_another_process, args=(package, start, answers))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    start.set()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(found) == [([], 2.0), ([], 2.0), (["kernel.scaled"], 2.0)]
    assert len(entries(package)) == 1
    assert not list(package.rglob("*.lock"))


def hold_for_ever(path, held):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    held.set()
    time.sleep(600)


def test_a_process_that_never_ends_its_compilation_is_not_waited_for_for_ever(package, monkeypatch):
    called(package)
    [entry] = entries(package)
    entry.unlink()
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    lock = entry.with_name(f"{entry.name}.lock")
    holder = fork.Process(target=hold_for_ever, args=(lock, held))
    holder.start()
    try:
        assert held.wait(60)
        monkeypatch.setattr(module, "SECONDS_TO_WAIT", 0.2)
        start = time.monotonic()
        assert called(package) == (["kernel.scaled"], 2.0)
        assert time.monotonic() - start >= 0.2
    finally:
        holder.kill()
        holder.join()
    entry.unlink()
    monkeypatch.setattr(module, "SECONDS_TO_WAIT", 600.0)
    assert called(package) == (["kernel.scaled"], 2.0), "the lock of a dead process is waited for"


def test_a_compilation_that_fails_can_be_tried_again(package):
    with pytest.raises(numba.TypingError):
        called(package, Values(None))
    assert module._claims
    with pytest.raises(numba.TypingError):
        called(package, Values(None))
    assert called(package) == (["kernel.scaled"], 2.0)
    module._claims.clear()


def test_no_kernel_uses_numbas_own_cache():
    assert [file for file in PACKAGE.rglob("*.py") if "cache=True" in file.read_text()] == []
