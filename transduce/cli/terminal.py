"""How a command refuses, and how it shows that it is at work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar

from transduce.data.pairs import DataError
from transduce.model.checkpoint import CheckpointError
from transduce.settings import RecipeError


@contextmanager
def sentences() -> Iterator[None]:
    """What the user can mend is said in a sentence, and the exit code is 1; 130 after Ctrl-C."""
    try:
        yield
    except (DataError, RecipeError, CheckpointError, ValueError) as error:
        raise SystemExit(f"transduce: {error}") from None
    except BrokenPipeError:  # somebody has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # whatever it is, no path mends it
            raise
        raise SystemExit(
            f"transduce: {error.filename} cannot be read or written ({error.strerror}); "
            "check the path, its permissions and the room on its disk"
        ) from None
    except KeyboardInterrupt:
        print("transduce: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


@contextmanager
def working(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)
