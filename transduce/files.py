"""Write files and folders atomically."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_by_rename(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file beside `path`, then rename it to `path`.

    Readers see the old content or the new one, never a part. Several processes may write the same
    path: each has a temporary file of its own, and the last rename wins. A write that fails leaves
    no temporary file behind; its OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{secrets.token_hex(8)}.unfinished")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # The error names the temporary file, or, on a full disk, none.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_folder_by_rename(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a temporary folder beside `folder`, then rename it to `folder`.

    Readers see all the files or no folder. A folder that exists with files in it is left as it is.
    A write that fails leaves nothing behind; its OSError names `folder`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{secrets.token_hex(8)}.unfinished")
    try:
        temporary.mkdir()
        for name, content in files.items():
            write_by_rename(temporary / name, content)
        os.rename(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise
