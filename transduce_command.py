"""The entry point of the command `transduce`, outside the package, whose import takes a second."""

import os
import signal


def main() -> None:
    """Import the package and run its command; exit with 130 on Ctrl-C, also during the import."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a process in the background may ignore it
        # An exception would show a traceback, or be swallowed by a package that is imported.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from transduce.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()
