"""The HTTP server of the explorer: the page, and the answers to its requests (see `explorer`).

    GET  /                  the page, and the files beside it
    GET  /api/model         a description of the model
    GET  /api/examples      ?search=WORDS&first=N: examples, each with its index
    POST /api/example       {"index"}: opens an example
    POST /api/text          {"text"}: opens a typed text
    POST /api/sound         ?name=NAME, the file as the body: opens a sound
    POST /api/lattice       {"input", "target": [symbol, ...]} -> packed, see `wire`
    POST /api/sensitivity   {"view", "t", "u"} -> packed
    POST /api/search        {"input", "beam_width"}: Algorithm 1, frame by frame
    GET  /api/sound/INPUT   WAV, from memory

A request that opens an input returns the input's name, which further requests use. The response to
a failed request is {"message": a sentence}. Pages of other sites get no answers: the Host header,
and the Origin header if there is one, must name this server. The server opens no path that the
browser sends, and reads no body larger than the limit for sound.
"""

from __future__ import annotations

import socket
import sys
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Timer
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from transduce.web.explorer import Explorer, Gone
from transduce.web.sounds import MAX_BYTES

FOLDER = Path(__file__).parent
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
PACKED = "application/octet-stream"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob:; media-src blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class ExampleQuery(BaseModel):
    index: int


class TextQuery(BaseModel):
    text: str


class LatticeQuery(BaseModel):
    input: str
    target: list[str]


class SensitivityQuery(BaseModel):
    view: str
    t: int
    u: int


class SearchQuery(BaseModel):
    input: str
    beam_width: int


def create_app(explorer: Explorer, host: str = "127.0.0.1") -> FastAPI:
    """Return the application of the server, which answers for `host` and for localhost.

    Its functions are not coroutines, so they run in threads: while the model computes one request,
    the server answers others.
    """
    app = FastAPI(openapi_url=None)
    pages = {path.name: path for path in FOLDER.iterdir() if path.suffix in KINDS}

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            response = refusal(request, host) or await call_next(request)
        except Exception as error:
            print(f"transduce: {request.url.path}: {error!r}", file=sys.stderr)
            response = error_response(500, "the server failed; its terminal shows the error")
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(ValueError)
    def user_error(request: Request, error: Exception) -> Response:
        return error_response(410 if isinstance(error, Gone) else 400, str(error))

    @app.exception_handler(RequestValidationError)
    def bad_request(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "the body"
        return error_response(422, f"{where} cannot be read: {first['msg'].lower()}")

    @app.exception_handler(HTTPException)
    def not_found(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, f"there is nothing at {request.url.path}")

    @app.get("/api/model")
    def model() -> Response:
        return JSONResponse(explorer.description())

    @app.get("/api/examples")
    def examples(search: str = "", first: int = 0) -> Response:
        return JSONResponse(explorer.examples(search, first))

    @app.post("/api/example")
    def open_example(query: ExampleQuery) -> Response:
        return JSONResponse(explorer.open_example(query.index))

    @app.post("/api/text")
    def open_text(query: TextQuery) -> Response:
        return JSONResponse(explorer.open_text(query.text))

    @app.post("/api/sound")
    async def open_sound(request: Request, name: str = "the file") -> Response:
        content = await request.body()
        opened = await run_in_threadpool(explorer.open_sound, content, name[:100])
        return JSONResponse(opened)

    @app.post("/api/lattice")
    def lattice(query: LatticeQuery) -> Response:
        return Response(explorer.lattice(query.input, tuple(query.target)), media_type=PACKED)

    @app.post("/api/sensitivity")
    def sensitivity(query: SensitivityQuery) -> Response:
        return Response(explorer.sensitivity(query.view, query.t, query.u), media_type=PACKED)

    @app.post("/api/search")
    def search(query: SearchQuery) -> Response:
        return JSONResponse(explorer.search(query.input, query.beam_width))

    @app.get("/api/sound/{name}")
    def sound(name: str) -> Response:
        return Response(explorer.wav(name), media_type="audio/wav")

    @app.get("/{name}")
    def page(name: str) -> Response:
        if name not in pages:
            raise HTTPException(404)
        return FileResponse(pages[name], media_type=KINDS[pages[name].suffix])

    @app.get("/")
    def index() -> Response:
        return page("index.html")

    return app


def error_response(status: int, message: str) -> Response:
    """Return a response with a message for the user."""
    return JSONResponse({"message": message}, status)


def refusal(request: Request, host: str) -> Response | None:
    """Return the response to a request from another site or of too large a size; else None."""
    asked = request.headers.get("host", "")
    if not names_this_server(asked, host):
        return error_response(403, f"this server is not {asked!r}; use its own address")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != asked:
        return error_response(403, f"pages of {origin} may not use this server; open its own page")
    if request.method == "POST":
        length = request.headers.get("content-length", "")
        if not length.isdigit():
            return error_response(411, "the request has no Content-Length header; send one")
        if int(length) > MAX_BYTES:
            return error_response(
                413, f"the request is larger than {MAX_BYTES // 10**6} MB; send a shorter part"
            )
    return None


def names_this_server(asked: str, host: str) -> bool:
    """Return whether a Host header names this server, which guards against DNS rebinding.

    A server that listens on all addresses has the name of the machine and any IP address.
    """
    try:
        name = urlsplit(f"//{asked}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", "127.0.0.1", "::1", host.lower()):
        return True
    return host in ("0.0.0.0", "::") and (name == socket.gethostname().lower() or _is_address(name))


def _is_address(name: str) -> bool:
    """Return whether a name is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def serve(explorer: Explorer, host: str, port: int, open_page: bool) -> None:
    """Serve the explorer until Ctrl-C."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"the explorer cannot listen on {host}, port {port} ({reason}); give another --port"
        ) from None
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    print(f"The explorer of {explorer.name} is at {address} (press Ctrl-C to stop)", flush=True)
    if open_page:
        Timer(0.5, webbrowser.open, [address]).start()
    config = uvicorn.Config(create_app(explorer, host), log_level="warning")
    with suppress(KeyboardInterrupt):  # the usual way to stop
        uvicorn.Server(config).run(sockets=[listening])
