"""The terminal: error messages, warnings, exit codes, progress bars."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

from transduce.settings import OptionError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of output that is not a file


@contextmanager
def user_errors() -> Iterator[None]:
    """Print errors that the user can fix as one sentence, and exit with 1; exit with 130 on Ctrl-C.

    Such errors are ValueErrors (of data, recipes and model files) and OSErrors that name a file. An
    error of an option exits with 2. Print warnings as one sentence too.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _Warnings()
            yield
    except ValueError as error:
        if not isinstance(error, OptionError):
            raise SystemExit(f"transduce: {error}") from None
        print(f"transduce: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of our output is gone, as in `transduce ... | head`
        _discard_output()
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            _discard_output()
            raise SystemExit(
                f"transduce: standard output cannot be written ({error.strerror}); free some space"
            ) from None
        if error.filename is None:  # not a fault of a file that the user could fix
            raise
        exists = isinstance(error, FileExistsError)
        reason = "it is a file, not a folder" if exists else error.strerror
        raise SystemExit(
            f"transduce: {error.filename} cannot be read or written ({reason}); "
            "check the path, its permissions and the free space on its disk"
        ) from None
    except KeyboardInterrupt:
        print("transduce: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def _discard_output() -> None:
    """Write what is left of the output nowhere, so that Python does not fail at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Warnings:
    """A printer of warnings that prints each kind once: those that differ in names and numbers."""

    def __init__(self) -> None:
        self.printed: set[str] = set()

    def __call__(self, message: Warning | str, *where: Any, **others: Any) -> None:
        """Print a warning as one sentence, unless one of its kind was printed before."""
        kind = re.sub(r"'.*?'|\d+", "", str(message))
        if kind not in self.printed:
            self.printed.add(kind)
            print(f"transduce: warning: {message}", file=sys.stderr)


@contextmanager
def progress_bar(
    title: str, total: int | None, *, while_printing: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error if that is a terminal; yield a function to advance it.

    With `while_printing`, the caller prints results meanwhile; then there is no bar if standard
    output is a terminal, because the results show the progress themselves.
    """
    console = Console(stderr=True)
    shown = console.is_terminal and not (while_printing and sys.stdout.isatty())
    # Rich would send standard output to the bar's console, which is standard error.
    with Bar(console=console, transient=True, disable=not shown, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)
