"""Keep a second training out of a run's folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_FILE = "run.lock"
# What `lock_descriptor` raises if another process has the lock.
IS_LOCKED = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


class LockError(ValueError):
    """The error of a folder that another training uses, or that is gone: one sentence."""


class FolderLock:
    """The lock of a run's folder, on the open file `descriptor`."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self.descriptor = folder, descriptor

    def check(self) -> None:
        """Raise LockError if the folder, or the lock in it, was deleted or moved."""
        path = self.folder / LOCK_FILE
        if not _is_at(path, self.descriptor):
            missing = path if self.folder.exists() else self.folder
            raise LockError(
                f"{missing} was deleted or moved during the training, which ends here; train "
                "again, or, if the folder is elsewhere, resume the run there"
            )


@contextmanager
def lock_folder(folder: Path) -> Iterator[FolderLock]:
    """Create a run's folder, and lock it; raise LockError if another training has locked it.

    The system releases the lock when the process ends, even by SIGKILL. On exit, delete the lock's
    file, and the folders that were created here if nothing else is in them.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    descriptor = _locked_file(path)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder).encode())
        yield FolderLock(folder, descriptor)
    finally:
        ours = _is_at(path, descriptor)
        if sys.platform == "win32":  # which does not delete open files
            os.close(descriptor)
        if ours:
            with suppress(OSError):
                path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)
        for empty in created:
            with suppress(OSError):
                empty.rmdir()


def _locked_file(path: Path) -> int:
    """Open and lock the file; return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_descriptor(descriptor)
        except OSError as error:
            if error.errno in IS_LOCKED:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise LockError(
                    f"{holder} trains in {path.parent}; wait until it ends, stop it, or choose "
                    "another folder"
                ) from None
            warnings.warn(
                f"the file system of {path} has no locks ({error.strerror}); start no second "
                "training in the folder",
                stacklevel=2,
            )
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder deleted it after we opened it


def _holder(descriptor: int) -> str:
    """Describe the process that holds the lock, from the content of the file."""
    try:
        holder = json.loads(os.read(descriptor, 1000))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']}, started at {since},"
    except (OSError, ValueError, KeyError, TypeError):  # not written yet
        return "another process"


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    def lock_descriptor(descriptor: int) -> None:
        """Lock an open file; raise OSError if another process has locked it."""
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # beyond the content, which others read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def lock_descriptor(descriptor: int) -> None:
        """Lock an open file; raise OSError if another process has locked it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
