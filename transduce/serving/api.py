"""The routes of the server.

    POST /v1/audio/transcriptions  a form with file, model, response_format: a transcript
    POST /v1/phonemize             {"input": line or [line, ...], "lookup", "stress", "ipa"}:
                                   pronunciations
    WS   /v1/stream                samples in, partial transcripts out (see `streams`)
    GET  /v1/models                the models
    GET  /health                   200 while the process lives
    GET  /ready                    200 once models are loaded, until the server stops
    GET  /metrics                  for Prometheus

The first and /v1/models are OpenAI's. The response to a failed request is {"error": {"message": a
sentence, "type", "param", "code"}}.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from transduce.data.dictionaries import installed_dictionary
from transduce.data.pairs import DataError
from transduce.decoding.options import SearchOptions, widened
from transduce.model.formats import subrip, webvtt
from transduce.model.lines import Line, Pronouncer, Pronunciation
from transduce.model.model import Model
from transduce.serving.formats import cues, pronunciation, verbose
from transduce.serving.guard import (
    HEADERS,
    PHONEMIZE,
    STREAM,
    TRANSCRIPTIONS,
    Guard,
    error_response,
)
from transduce.serving.limits import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    MAX_N_BEST,
    Refusal,
    error_content,
)
from transduce.serving.service import Service
from transduce.serving.streams import StreamRoute

BEAM_WIDTH = 10  # for sound, unless the request says otherwise; that of `transduce recognize`
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
WITHOUT_TIMES = ("json", "text")
JSON = "application/json"


class PhonemizeQuery(BaseModel):
    """The body of a request to phonemize."""

    model_config = ConfigDict(extra="forbid")
    input: str | list[str]
    model: str | None = None
    beam_width: int = 1
    n_best: int = 1
    lookup: bool = False  # words that CMUdict has
    stress: bool = False  # needs a model with stress digits
    ipa: bool = False


def create_app(service: Service, host: str = "127.0.0.1", others: Collection[str] = ()) -> FastAPI:
    """Return the application, which answers for `host`, localhost and `others`.

    Its functions raise a Refusal to the guard, which answers with it.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(Guard, service=service, host=host, others=others)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        sentence = f"there is nothing at {request.method} {request.url.path[:100]}"
        return error_response(Refusal(error.status_code, f"{sentence}; see the documentation"))

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if service.drains_since is not None:
            raise Refusal(503, "the server is stopping; use another one")
        if not service.batcher.is_ready.is_set():
            raise Refusal(503, "the server is loading its models; ask again")
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers=HEADERS, media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        described = [_description(service, name) for name in service.models]
        return _json({"object": "list", "data": described})

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        return _json(_description(service, name))

    @app.post(TRANSCRIPTIONS)
    async def transcriptions(request: Request) -> Response:
        return await _transcription(service, request)

    @app.post(PHONEMIZE)
    async def phonemize(request: Request) -> Response:
        return await _pronunciations(service, request)

    route = StreamRoute(service)

    @app.websocket(STREAM)
    async def stream(socket: WebSocket) -> None:
        await route(socket)

    return app


def _json(content: object) -> Response:
    return Response(json.dumps(content), headers=HEADERS, media_type=JSON)


def _description(service: Service, name: str) -> dict[str, Any]:
    """Return what clients can know of a model."""
    features = service.model(name).signature.features
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "transduce",
        "reads": "text" if features is None else "sound",
        "sample_rate": None if features is None else features.sample_rate,
        "streams": name in service.streaming,
    }


# --- Sound --------------------------------------------------------------------------------------


class FormInMemory(MultiPartParser):
    """A parser of forms that writes no temporary files; the guard limits their size."""

    spool_max_size = 0  # no limit


async def _transcription(service: Service, request: Request) -> Response:
    """Answer a request with a sound."""
    name, content, fields = await _form(request)
    limits, form = service.limits, fields.get("response_format", "json")
    if "model" not in fields:
        raise Refusal(400, "the form has no field model; see GET /v1/models")
    model = service.sound_model(fields["model"])
    if form not in FORMATS:
        raise Refusal(
            400, f"response_format {form[:100]!r} is unknown; give one of {', '.join(FORMATS)}"
        )
    timed = form not in WITHOUT_TIMES
    if timed and not model.network.has_timings:
        raise Refusal(400, f"{fields['model']} has no timings; give response_format json or text")
    if fields.get("stream", "false").lower() not in ("false", "0"):
        raise Refusal(400, "transcripts are not streamed here; leave the field stream out")
    width = fields.get("beam_width", str(BEAM_WIDTH))
    if not width.isdecimal() or not 1 <= int(width[:9]) <= limits.max_beam_width:
        raise Refusal(400, f"beam_width must be from 1 to {limits.max_beam_width}; correct it")
    features = model.signature.features
    assert features is not None
    wave = await service.decode(content, name, features.sample_rate)
    if len(wave) < features.window_samples:
        window = f"one window of {round(1000 * features.window)} ms"
        raise Refusal(400, f"the file {name} is shorter than {window}; send a longer one")
    options = SearchOptions(int(width), with_timings=timed)
    num_frames = len(wave) // features.shift_samples + 1
    [result] = await service.results(request, fields["model"], options, [wave], num_frames)
    if isinstance(result, DataError):
        raise Refusal(400, f"the file {name}: {result}")
    if form == "json":
        return _json({"text": str(result)})
    if form == "verbose_json":
        return _json(verbose(result))
    writers = {"srt": subrip, "vtt": webvtt}
    text = f"{result}\n" if form == "text" else writers[form](cues(result))
    return Response(text, headers=HEADERS, media_type="text/plain")


async def _form(request: Request) -> tuple[str, bytes, Mapping[str, str]]:
    """Return the file of a form, its name for messages, and the other fields."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(
            415, "the body is not a form; send multipart/form-data with the fields file and model"
        )
    parser = FormInMemory(
        request.headers,
        request.stream(),
        max_files=1,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError, KeyError):
        raise Refusal(
            400, "the form cannot be read; send multipart/form-data with one file and short fields"
        ) from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refusal(400, "the form has no file in its field file; send one")
        name, content = (file.filename or "file")[:100], await file.read()
    finally:
        await form.close()
    if not content:
        raise Refusal(400, f"the file {name} is empty; send a sound")
    return name, content, {k: v for k, v in form.items() if isinstance(v, str)}


# --- Text ---------------------------------------------------------------------------------------


async def _pronunciations(service: Service, request: Request) -> Response:
    """Answer a request with a line or lines of text."""
    query = await _query(request)
    name, model = service.text_model(query.model, stress=query.stress)
    limits, inputs = service.limits, query.input
    given = [inputs] if isinstance(inputs, str) else inputs
    if not 1 <= query.beam_width <= limits.max_beam_width:
        raise Refusal(400, f"beam_width must be from 1 to {limits.max_beam_width}; correct it")
    if not 1 <= query.n_best <= MAX_N_BEST:
        raise Refusal(400, f"n_best must be from 1 to {MAX_N_BEST}; correct it")
    pronouncer, lines = await run_in_threadpool(_lines, model, query, given, limits.max_words)
    width = widened(query.beam_width, query.n_best)
    options = SearchOptions(width, n_best=query.n_best, with_timings=False)
    sources = [source for line in lines for source in line.sources]
    num_frames = sum(map(len, sources))
    found = await service.results(request, name, options, sources, num_frames) if sources else []
    results = list(pronouncer.join(lines, found, options))
    if isinstance(inputs, str) and isinstance(results[0][1], DataError):
        raise Refusal(400, str(results[0][1]))
    return _json({"model": name, "results": [_result(*result) for result in results]})


def _result(line: str, result: Pronunciation | DataError) -> dict[str, Any]:
    """Return the pronunciations of a line, or the error in its place."""
    if isinstance(result, DataError):
        return {"input": line, **error_content(400, str(result))}
    return pronunciation(line, result)


def _lines(
    model: Model, query: PhonemizeQuery, given: list[str], most: int
) -> tuple[Pronouncer, list[Line]]:
    """Read the lines of a query; raise a Refusal if there are too many words.

    Raise one also if the model cannot do what the query asks for.
    """
    try:
        dictionary = installed_dictionary() if query.lookup else None
        pronouncer = Pronouncer(model, dictionary=dictionary, ipa=query.ipa)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    count = max(len(given), sum(len(line.split()) for line in given))
    lines = [pronouncer.read(line) for line in given] if count <= most else []
    if max(count, sum(len(line.words) for line in lines)) > most:
        raise Refusal(413, f"there are more than {most} words; send them in several requests")
    return pronouncer, lines


async def _query(request: Request) -> PhonemizeQuery:
    """Read the body of a request to phonemize."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
        raise Refusal(415, f"the body is not JSON; send it with Content-Type: {JSON}")
    body = await request.body()
    try:
        return PhonemizeQuery.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
    if first["type"] == "json_invalid":
        raise Refusal(400, "the body is not JSON; send an object")
    if not first["loc"]:
        raise Refusal(400, "the body is not an object; send one with the field input")
    where, what = str(first["loc"][0])[:100], first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        raise Refusal(400, f"the field {where} is missing; add it")
    if first["type"] == "extra_forbidden":
        raise Refusal(400, f"there is no field {where}; leave it out")
    raise Refusal(400, f"the field {where} cannot be read ({what}); correct it")
