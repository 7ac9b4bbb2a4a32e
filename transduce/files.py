"""Write files atomically."""

from __future__ import annotations

import os
import secrets
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
