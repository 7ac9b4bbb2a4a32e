"""The command that starts the explorer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from transduce.cli.runs import load_runs, own_pairs, test_pairs
from transduce.cli.terminal import user_errors


def explore(
    run: Path,
    /,
    *,
    data: Path | None = None,
    target: str = "text",
    host: str = "127.0.0.1",
    port: int = 8000,
    open_page: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Show a transducer in the browser: lattices, sensitivities, and the search frame by frame.

    Of a continuous transducer it shows when each symbol is said, and plays the sound.

    Example: transduce explore runs/demo/transducer --open

    The command needs a web server: pip install "transduce[web]".

    Parameters
    ----------
    run
        The folder of a transducer's run, its model.safetensors, or the name of a model that ships.
    data
        Examples to choose from: a manifest (.jsonl) or a file with a source, a tab and a target on
        each line (.tsv); by default the test set of the run, or its validation set if there is no
        test set.
    target
        The field of the manifest that holds the target.
    host
        The address to listen on; by default only this machine can connect.
    port
        The port to listen on; 0 chooses a free one.
    open_page
        Open the page in the browser.
    """
    for package in ("fastapi", "uvicorn", "websockets"):
        if find_spec(package) is None:
            raise SystemExit(
                f'transduce: explore needs {package}; install it with pip install "transduce[web]"'
            )
    from transduce.web.explorer import Explorer
    from transduce.web.server import serve
    from transduce.web.speech import SpeechExplorer

    with user_errors():
        model = load_runs([run], "cpu")
        pairs = own_pairs(run) if data is None else ()
        if data is not None:
            pairs, _ = test_pairs([run], model, data, target, None)
        kind = Explorer if model.signature.outputs is None else SpeechExplorer
        serve(kind(model, pairs, str(run)), host, port, open_page)
