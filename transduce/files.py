"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_by_rename(path: Path, content: bytes) -> None:
    """The file is what it was, or what it is to be, whenever one looks.

    An OSError names the file, and leaves nothing beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        error.filename, error.filename2 = str(path), None  # a full disk names none
        raise
