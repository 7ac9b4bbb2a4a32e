"""The terminal: error messages, exit codes, progress bars."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that the user can mend into one sentence and exit code 1; Ctrl-C exits with 130.

    Errors of data, recipes and model files are ValueErrors.
    """
    try:
        yield
    except ValueError as error:
        raise SystemExit(f"transduce: {error}") from None
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # no path would mend it
            raise
        raise SystemExit(
            f"transduce: {error.filename} cannot be read or written ({error.strerror}); "
            "check the path, its permissions and the room on its disk"
        ) from None
    except KeyboardInterrupt:
        print("transduce: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal; yield what advances it."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)
