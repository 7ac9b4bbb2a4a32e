"""The command line: each command is a function."""

import sys
from collections.abc import Callable

import cyclopts
from rich.console import Console
from rich.text import Text

import transduce
from transduce.cli.align import align
from transduce.cli.evaluate import evaluate
from transduce.cli.explore import explore
from transduce.cli.export import export
from transduce.cli.inspect import inspect
from transduce.cli.listen import listen
from transduce.cli.plot import plot
from transduce.cli.serve import serve
from transduce.cli.speak import speak
from transduce.cli.terminal import user_errors
from transduce.cli.train import demo, graphones, recipes, table, train
from transduce.cli.transcribe import phonemize, recognize, transcribe
from transduce.cli.warm_up import warm_up

__all__ = [
    "align",
    "app",
    "demo",
    "evaluate",
    "explore",
    "export",
    "graphones",
    "inspect",
    "listen",
    "main",
    "phonemize",
    "plot",
    "recipes",
    "recognize",
    "serve",
    "speak",
    "table",
    "train",
    "transcribe",
    "warm_up",
]


def _sentence(error: cyclopts.CycloptsError) -> Text:
    """Write an error of the options as all other errors are."""
    return Text(f"transduce: {error}")


app = cyclopts.App(
    name="transduce",
    help="Sequence transduction with recurrent neural networks.",
    version=transduce.__version__,
    error_formatter=_sentence,
    error_console=Console(stderr=True, soft_wrap=True),
)
# --help lists the commands in this order, which is also that of the README.
COMMANDS: list[Callable[..., None]] = [
    *(demo, phonemize, recognize, align, listen, serve, export, speak),
    *(inspect, recipes, train, graphones, evaluate, transcribe, table),
    *(plot, explore, warm_up),
]
for place, command in enumerate(COMMANDS):
    app.command(command, sort_key=place)


def main() -> None:
    """Run the command that the arguments of the process name."""
    with user_errors():
        try:
            app()
        finally:
            sys.stdout.flush()
