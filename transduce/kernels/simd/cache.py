"""Keep compiled kernels on disk, so that a machine compiles them once.

Numba's own cache takes a kernel for fresh when a function that it calls has changed, unpickles an
entry before it looks at its age, mixes up entries that two processes write at once, and raises an
error where no folder can be written. Here a kernel's folder is named by a hash of its file and of
all files of this package that it imports, and each entry has a file of its own. Of processes
that need a kernel at the same time, one compiles it, and the others wait. An entry is code: it is
read only from a folder into which no other user can write.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from transduce.files import write_by_rename

PACKAGE = Path(__file__).parents[2]
# A process waits so long for another one to compile a kernel, and then compiles it itself: longer
# than any kernel takes, but not for ever, should the other have been stopped in the middle.
SECONDS_TO_WAIT = 60.0


class KernelCache(FunctionCache):
    """The cache of one compiled function, in place of Numba's; it touches no disk until used."""

    def __init__(self, function: Any) -> None:
        self._py_func = function
        self._file = Path(function.__code__.co_filename)

    @property
    def cache_path(self) -> str:
        """Return the first folder that is looked at."""
        return str(next(_folders(self._file)))

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compiled function for a signature; None if it must be compiled."""
        target_context.refresh()
        name = self._entry(signature, target_context.codegen())
        found = self._read(name, target_context)
        if found is None:
            _claim(self._file, name)
            found = self._read(name, target_context)  # another process may have compiled it
            if found is None:
                _tell(f"{self._file.stem}.{self._py_func.__qualname__}")
            else:
                _release(name)
        return found

    def _read(self, name: str, target_context: Any) -> Any:
        """Return the compiled function of an entry; None without a good one."""
        for folder in _folders(self._file):
            # Any error may come of a damaged file; the function is then compiled again.
            with suppress(Exception):
                if (folder / name).is_file() and _is_private(folder):
                    content = pickle.loads((folder / name).read_bytes())
                    return CompileResult._rebuild(target_context, *content)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write a compiled function into the first folder that can be written."""
        name = self._entry(signature, result.codegen)
        try:
            self._save(name, result)
        finally:
            _release(name)

    def _save(self, name: str, result: Any) -> None:
        if result.lifted or result.library.has_dynamic_globals:
            return  # it holds addresses of this process
        content = dumps(result._reduce())
        *lasting, temporary = _folders(self._file)
        if any(_write(folder, name, content) for folder in lasting):
            return
        kept = _write(temporary, name, content)
        _say_once(
            f"compiled kernels are kept in {temporary.parent}"
            if kept
            else "compiled kernels are not kept, and every process compiles them again",
            lasting[0].parent,
        )

    def flush(self) -> None:
        """Delete the entries of the function's file."""
        for folder in _folders(self._file):
            shutil.rmtree(folder, ignore_errors=True)

    def _entry(self, signature: Any, codegen: Any) -> str:
        """Return the name of the file for a signature on this machine."""
        key = hashlib.sha256(repr(self._index_key(signature, codegen)).encode()).hexdigest()[:32]
        return f"{self._py_func.__name__}-{self._py_func.__code__.co_firstlineno}-{key}.kernel"


# --- One process compiles -----------------------------------------------------------------------

_claims: dict[str, tuple[Path, int]] = {}  # locked files of the entries that this process compiles


def _claim(file: Path, name: str) -> None:
    """Lock the right to compile an entry; wait for a process that has it.

    The system releases the lock when a process ends. Where files cannot be locked, each compiles.
    """
    folder = next(filter(_is_ready, _folders(file)), None)
    if sys.platform == "win32" or folder is None or name in _claims:
        return
    import fcntl

    path, deadline = folder / f"{name}.lock", time.monotonic() + SECONDS_TO_WAIT
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # such as of a file system without locks
                break
            else:
                _claims[name] = (path, descriptor)
                return
        os.close(descriptor)


def _release(name: str) -> None:
    """Unlock an entry, if this process has locked it."""
    if name in _claims:
        path, descriptor = _claims.pop(name)
        # One that waits for the deleted file, and one that makes a new one, both find the entry.
        path.unlink(missing_ok=True)
        os.close(descriptor)


# --- Folders ------------------------------------------------------------------------------------


def _folders(file: Path) -> Iterator[Path]:
    """Yield the folders for the kernels of a file, best first; the last is a temporary one."""
    name = f"{_stem(file)}{source_hash(file)}"
    here = hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:8]  # other installations differ
    if chosen := _chosen_folder():
        yield Path(chosen).absolute() / f"transduce-{here}" / name
    else:
        yield PACKAGE / "__pycache__" / "kernels" / name
        home = Path(AppDirs(appname="transduce", appauthor=False).user_cache_dir)
        if home.is_absolute():  # "~" stays as it is for a user without a home
            yield home / f"kernels-{here}" / name
    user = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(_temporary_folder()) / f"transduce-{user}-{here}" / name


def kernel_folder() -> Path:
    """Return the folder that has the kernels of this installation."""
    file = Path(__file__).with_name("products.py")
    folders = list(_folders(file))
    return next((folder for folder in folders if folder.is_dir()), folders[-1]).parent


def _stem(file: Path) -> str:
    """Return the beginning of a folder's name, which older versions of the file share."""
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    return f"{module}-{sys.implementation.cache_tag}-"


def _chosen_folder() -> str:
    """Return the folder of NUMBA_CACHE_DIR; empty without one."""
    return str(getattr(numba.config, "CACHE_DIR", ""))


@cache
def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written
        return "/nonexistent"


def _is_ready(folder: Path) -> bool:
    """Make a folder if it is not there; return whether it is there and private."""
    try:
        if not folder.is_dir():
            _make(folder)
        return _is_private(folder)
    except OSError:
        return False


def _write(folder: Path, name: str, content: bytes) -> bool:
    """Write an entry; return whether the folder is there, private and writable."""
    if not _is_ready(folder):
        return False
    try:
        write_by_rename(folder / name, content)
    except OSError:
        return False
    return True


def _make(folder: Path) -> None:
    """Make a folder that only this user can write; delete those of older versions of the file."""
    # Others may read what an administrator compiled beside the code.
    mode = 0o755 if PACKAGE in folder.parents or _chosen_folder() else 0o700
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (folder.parent, folder):
        part.mkdir(mode=mode, exist_ok=True)
    if _is_private(folder):
        stem = folder.name.removesuffix(folder.name.rpartition("-")[2])
        for old in folder.parent.glob(f"{stem}*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Return whether none but this user, root and the code's owner can write into a folder."""
    if not hasattr(os, "geteuid"):
        return True
    owners = (os.geteuid(), 0, PACKAGE.stat().st_uid)
    for part in (folder, folder.parent):
        status = part.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
            return False
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


# --- Sources ------------------------------------------------------------------------------------


@cache
def source_hash(file: Path) -> str:
    """Hash a file, all files of this package that it imports, and the compiler's version."""
    versions = (numba.__version__, np.__version__)
    contents = [_source(path)[0] for path in sorted(sources(file))]
    digest = hashlib.sha256(repr(versions).encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def sources(file: Path) -> set[Path]:
    """Return a file and the files of this package that it imports, and those that these import."""
    found, waiting = set[Path](), [file]
    while waiting:
        if (path := waiting.pop()) not in found:
            found.add(path)
            waiting += _source(path)[1]
    return found


@cache
def _source(file: Path) -> tuple[bytes, list[Path]]:
    """Return the content of a file, and the files of this package that it names in imports."""
    content = file.read_bytes()
    paths = []
    for name in re.findall(rb"^\s*(?:from|import) transduce\.([\w.]+)", content, re.MULTILINE):
        path = PACKAGE.joinpath(*name.decode().split("."))
        paths.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    return content, paths


# --- Messages -----------------------------------------------------------------------------------


@cache
def _say_once(what: str, folder: Path) -> None:
    """Print on standard error where compiled kernels are kept, as `folder` is not writable."""
    print(
        f"transduce: {what}, because {folder} cannot be written; set NUMBA_CACHE_DIR to a "
        "folder that stays",
        file=sys.stderr,
    )


@cache
def _announce() -> None:
    """Print once, on a terminal, that compiling takes a while."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(
            "transduce: compiling kernels for this machine (once, about a minute) ...",
            file=sys.stderr,
        )


_listeners: list[Callable[[str], None]] = []  # the last is told of each function


def _tell(name: str) -> None:
    _listeners[-1](name) if _listeners else _announce()


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the name of each function that must be compiled, instead of printing."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
