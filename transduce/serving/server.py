"""The HTTP server: it finishes what is in progress before it stops."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from transduce.http.connections import TimedProtocol, listen
from transduce.http.sockets import StreamProtocol
from transduce.model.checkpoint import MODEL_FILE
from transduce.model.model import Model, load
from transduce.serving.api import create_app
from transduce.serving.limits import (
    MAX_MESSAGE_BYTES,
    Limits,
    error_content,
)
from transduce.serving.service import Service

CLOSING_SECONDS = 5  # for connections to close once all requests are done


def load_models(models: Collection[str]) -> dict[str, Model]:
    """Load models by their names or paths, or NAME=PATH; return them by their names.

    The name of a run is that of its folder, because clients must not see paths.
    """
    loaded = dict[str, Model]()
    for given in models:
        name, equals, path = given.partition("=")
        if not equals or Path(given).exists():
            path, file = given, Path(given)
            name = file.resolve().name if file.exists() else given
            if file.name == MODEL_FILE:
                name = file.resolve().parent.name
            name = name.removesuffix(".safetensors")
        if name in loaded:
            raise ValueError(f"two models are called {name}; give one as NAME={path}")
        loaded[name] = load(path)
        if not loaded[name].network.has_labels:
            raise ValueError(
                f"{name} is a continuous transducer, and the API has no speech; use transduce speak"
            )
    return loaded


class Protocol(TimedProtocol):
    """HTTP with time limits, and errors as OpenAI's clients read them."""

    def error_content(self, status: int, message: str) -> object:
        """Return the JSON values of an error response."""
        return error_content(status, message)


class ModelServer(uvicorn.Server):
    """A server that drains at the first signal and stops at the second."""

    def __init__(
        self, service: Service, host: str = "127.0.0.1", others: Collection[str] = ()
    ) -> None:
        self.service = service
        super().__init__(
            uvicorn.Config(
                create_app(service, host, others),
                http=Protocol,
                ws=StreamProtocol,
                ws_max_size=MAX_MESSAGE_BYTES,
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=service.limits.max_connections,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests, and stop when the others are done; stop now at the second signal."""
        if self.service.drains_since is not None:
            self.should_exit = self.force_exit = True
        self.service.drain()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server should stop."""
        if self.service.is_drained or self.service.batcher.has_failed:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    models: Mapping[str, Model],
    limits: Limits,
    key: str | None,
    host: str,
    port: int,
    others: Collection[str] = (),
) -> None:
    """Serve models until SIGTERM or Ctrl-C; then finish what is in progress."""
    service = Service(models, limits, key)
    listening, address = listen(host, port, "the server")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until uvicorn handles it
    service.batcher.start()
    print(f"The server of {', '.join(models)} is at {address} (press Ctrl-C to stop)", flush=True)
    server = ModelServer(service, host, others)
    server.run(sockets=[listening])
    at_once = server.force_exit or not service.batcher.is_ready.is_set()
    ended = service.batcher.close(0 if at_once else CLOSING_SECONDS)
    if service.batcher.has_failed:
        raise ValueError("a model does not work; the error is above")
    if not ended:  # the thread computes what nobody waits for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
