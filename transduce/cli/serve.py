"""The command that serves models over HTTP."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated

from cyclopts import Parameter

from transduce.cli.terminal import user_errors
from transduce.model.model import model_names
from transduce.serving.limits import Limits

KEY = "TRANSDUCE_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "websockets")


def serve(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed_host: tuple[str, ...] = (),
    limits: Annotated[Limits | None, Parameter(name="*")] = None,
) -> None:
    """Serve models over HTTP, as OpenAI's clients call them.

    Example: transduce serve english-phone-recogniser english-pronouncer --port 8000

    The command needs a web server: pip install "transduce[serve]". If the environment has
    TRANSDUCE_API_KEY, clients must send that key. SIGTERM or Ctrl-C stops the server when all
    requests in progress are answered.

    Parameters
    ----------
    models
        Names of models that ship, folders of runs, .safetensors files, or NAME=PATH to choose the
        name that clients use; by default all models that ship.
    host
        The address to listen on; by default only this machine can connect.
    port
        The port to listen on; 0 chooses a free one.
    allowed_host
        A further name that clients call the server by, such as that of a proxy before it.
    limits
        The limits of the server.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            raise SystemExit(
                f'transduce: serve needs {package}; install it with pip install "transduce[serve]"'
            )
    from transduce.serving import server

    with user_errors():
        key = os.environ.get(KEY)
        if key is not None and not key.strip():
            raise ValueError(f"{KEY} is empty; set it to a key, or unset it")
        loaded = server.load_models(models or model_names())
        others = [name.lower() for name in allowed_host]
        server.serve(loaded, limits or Limits(), key, host, port, others)
