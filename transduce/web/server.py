"""The HTTP server of the explorer: the page, and the answers to its requests (see `explorer`).

    GET  /                  the page, and the files beside it
    GET  /api/model         a description of the model
    GET  /api/examples      ?search=WORDS&first=N: examples, each with its index
    POST /api/example       {"index"}: opens an example
    POST /api/text          {"text"}: opens a typed text
    POST /api/sound         ?name=NAME, the file as the body: opens a sound
    WS   /api/recording     the microphone's samples -> partial transcripts (see `microphone`)
    POST /api/lattice       {"input", "target": [symbol, ...]} -> packed, see `wire`
    POST /api/sensitivity   {"view", "t", "u"} -> packed
    POST /api/search        {"input", "beam_width"}: begins Algorithm 1, frame by frame
    POST /api/steps         {"search"}: its next frames
    POST /api/alignment     {"input", "text"}: when each word and phone of the text is said
    GET  /api/sound/INPUT   WAV, from memory

A continuous transducer (see `speech`) has, in the place of the requests from sound to alignment:

    POST /api/speech        {"input", "generation": {"temperature", "durations", "seed"} or null}:
                            the lattice of generated speech, or of the recording -> packed
    POST /api/node          {"view", "t", "u"} -> packed
    GET  /api/sound/VIEW    WAV, from memory

A request that opens an input returns the input's name, which further requests use. The response to
a failed request is {"message": a sentence}. Pages of other sites get no answers: the Host header,
and the Origin header if there is one, must name this server. The server opens no path that the
browser sends, and reads no body larger than its limit. A request must arrive in time (see
`http.connections`); until it has arrived it holds no thread.
"""

from __future__ import annotations

import json
import os
import re
import sys
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from transduce.decoding.generation import GenerationOptions
from transduce.http.connections import TimedProtocol, listen
from transduce.http.hosts import foreign_request
from transduce.http.sockets import StreamProtocol
from transduce.web.explorer import MAX_BYTES, Explorer, Gone
from transduce.web.microphone import MAX_MESSAGE_BYTES, REFUSED, hear
from transduce.web.speech import SpeechExplorer

# More seconds let more answers arrive after Ctrl-C; fewer end the command sooner.
GRACE_SECONDS = 1
MAX_JSON_BYTES = 1_000_000  # in a body other than sound
# A client that sends its whole body before it reads can read the refusal of a body up to this size;
# the server reads and drops as much.
MAX_DROPPED_BYTES = 5 * MAX_BYTES
LENGTH = re.compile(r"[0-9]{1,20}")

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


class StepsQuery(BaseModel):
    search: str


class AlignmentQuery(BaseModel):
    input: str
    text: str


class GenerationQuery(BaseModel):
    temperature: float
    durations: Literal["median", "drawn"]
    seed: int


class SpeechQuery(BaseModel):
    input: str
    generation: GenerationQuery | None  # None: the recording


class NodeQuery(BaseModel):
    view: str
    t: int
    u: int


def create_app(explorer: Explorer | SpeechExplorer, host: str = "127.0.0.1") -> FastAPI:
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
            response = refusal(request, host)
            if response is None:
                response = await call_next(request)
            else:
                await drop_body(request)
        except ClientDisconnect:
            response = error_response(400, "the connection closed before the body arrived")
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
        if first["type"] == "json_invalid":
            return error_response(422, "the body is not JSON; send an object")
        where = ".".join(map(str, first["loc"][1:])) or "the body"
        return error_response(422, f"{where} cannot be read: {first['msg'].lower()}")

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code not in (404, 405):
            return error_response(error.status_code, "the body cannot be read; send it again")
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

    if isinstance(explorer, SpeechExplorer):
        add_speech_requests(app, explorer)
    else:
        add_label_requests(app, explorer, host)

    @app.get("/api/sound/{name}")
    def sound(name: str) -> Response:
        return Response(explorer.wav(name), media_type="audio/wav")

    @app.get("/{name}")
    def page(name: str) -> Response:
        if name not in pages:
            raise HTTPException(404)
        path = pages[name]
        return Response(path.read_bytes(), media_type=KINDS[path.suffix])

    @app.get("/")
    def index() -> Response:
        return page("index.html")

    return app


def add_label_requests(app: FastAPI, explorer: Explorer, host: str) -> None:
    """Let an application answer what only a transducer with labels can."""

    @app.post("/api/sound")
    async def open_sound(request: Request, name: str = "the file") -> Response:
        content = await request.body()
        opened = await run_in_threadpool(explorer.open_sound, content, name[:100])
        return JSONResponse(opened)

    @app.websocket("/api/recording")
    async def record(socket: WebSocket) -> None:
        headers = socket.headers
        if foreign_request(headers.get("host", ""), headers.get("origin"), host) is not None:
            await socket.close(REFUSED)  # before it is accepted: status 403
        else:
            await hear(socket, explorer)

    @app.post("/api/lattice")
    def lattice(query: LatticeQuery) -> Response:
        return Response(explorer.lattice(query.input, tuple(query.target)), media_type=PACKED)

    @app.post("/api/sensitivity")
    def sensitivity(query: SensitivityQuery) -> Response:
        return Response(explorer.sensitivity(query.view, query.t, query.u), media_type=PACKED)

    @app.post("/api/search")
    def search(query: SearchQuery) -> Response:
        return JSONResponse(explorer.search(query.input, query.beam_width))

    @app.post("/api/steps")
    def steps(query: StepsQuery) -> Response:
        return JSONResponse(explorer.steps(query.search))

    @app.post("/api/alignment")
    def align(query: AlignmentQuery) -> Response:
        return JSONResponse(explorer.align(query.input, query.text))


def add_speech_requests(app: FastAPI, explorer: SpeechExplorer) -> None:
    """Let an application answer what only a continuous transducer can."""

    @app.post("/api/speech")
    def speech(query: SpeechQuery) -> Response:
        asked = query.generation
        options = None if asked is None else GenerationOptions(**asked.model_dump())
        return Response(explorer.speech(query.input, options), media_type=PACKED)

    @app.post("/api/node")
    def node(query: NodeQuery) -> Response:
        return Response(explorer.node(query.view, query.t, query.u), media_type=PACKED)


def error_response(status: int, message: str) -> Response:
    """Return a response with a message for the user."""
    content = json.dumps({"message": message})  # in ASCII, which every string has
    return Response(content, status, media_type="application/json")


def refusal(request: Request, host: str) -> Response | None:
    """Return the response to a request from another site or of too large a size; else None."""
    headers = request.headers
    sentence = foreign_request(headers.get("host", ""), headers.get("origin"), host)
    if sentence is not None:
        return error_response(403, sentence)
    if request.method == "POST":
        length = request.headers.get("content-length", "")
        if not LENGTH.fullmatch(length):
            return error_response(411, "the request has no Content-Length header; send one")
        largest = MAX_BYTES if request.url.path == "/api/sound" else MAX_JSON_BYTES
        if int(length) > largest:
            return error_response(
                413, f"the request is larger than {largest // 10**6} MB; send a shorter part"
            )
    return None


async def drop_body(request: Request) -> None:
    """Read and drop the body of a refused request, within the limit.

    A client that sends its whole body before it reads would see a reset connection otherwise. One
    that waits for `100 Continue` sends no body.
    """
    if "expect" in request.headers:
        return
    dropped = 0
    async for part in request.stream():
        dropped += len(part)
        if dropped > MAX_DROPPED_BYTES:
            return


class ExplorerServer(uvicorn.Server):
    """The HTTP server, which ends soon after the first Ctrl-C."""

    def __init__(self, explorer: Explorer | SpeechExplorer, host: str = "127.0.0.1") -> None:
        app = create_app(explorer, host)
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                ws=StreamProtocol,
                ws_max_size=MAX_MESSAGE_BYTES,
                lifespan="off",
                log_level="error",
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End when all answers are sent, or after GRACE_SECONDS, whichever is first.

        Threads that compute an answer cannot be interrupted, so the process ends without them.
        """
        super().handle_exit(sig, frame)
        end = Timer(GRACE_SECONDS, os._exit, [0])
        end.daemon = True
        end.start()


def serve(explorer: Explorer | SpeechExplorer, host: str, port: int, open_page: bool) -> None:
    """Serve the explorer until Ctrl-C."""
    listening, address = listen(host, port, "the explorer")
    print(f"The explorer of {explorer.name} is at {address} (press Ctrl-C to stop)", flush=True)
    if open_page:
        Timer(0.5, webbrowser.open, [address]).start()
    with suppress(KeyboardInterrupt):  # the usual way to stop
        ExplorerServer(explorer, host).run(sockets=[listening])
