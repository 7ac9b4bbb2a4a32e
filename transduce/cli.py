"""The command line: one plain function a command."""

from __future__ import annotations

from pathlib import Path

import cyclopts

import transduce
from transduce import demo as demonstration

app = cyclopts.App(
    name="transduce",
    help="Sequence transduction with recurrent neural networks.",
    version=transduce.__version__,
)


@app.command
def demo(*, steps: int = 400, seed: int = 0, figure: Path | None = None) -> None:
    """Train a small transducer on generated pairs, in a minute, and show its output.

    Example: transduce demo --steps 200 --figure lattice.png

    Parameters
    ----------
    steps
        How many batches of 64 pairs to train on.
    seed
        Of the weights, the split and the batches; the same seed gives the same result.
    figure
        Where to draw the output lattice of the first held-out number (png, svg or pdf).
    """
    if figure is not None and not figure.absolute().parent.is_dir():
        raise SystemExit(f"transduce: --figure {figure}: there is no folder {figure.parent}")
    demonstration.run(steps, seed, figure)


def main() -> None:
    app()
