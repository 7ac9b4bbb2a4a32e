"""What a run says while it goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console


class Progress:
    """Shows a run on a console; `Progress(Console(quiet=True))` shows nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
