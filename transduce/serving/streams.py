"""Streams of sound through WebSockets: samples in, partial transcripts out.

Binary messages are samples of 16 bits, little-endian, one channel, at the model's rate; a sample
may be divided between two messages. Text messages are JSON: {"type": "finish"} ends the stream,
{"type": "next"} ends an utterance and begins another. Answers are JSON too: those of
`model.utterances`, and

    {"type": "final", "text", "duration", "segments", "phones"}
    {"type": "error", "error": {"message", ...}}, and the server closes the connection
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial as partial_of
from threading import Condition, Thread
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from transduce.audio.pcm import RawPcm
from transduce.model.model import Model
from transduce.model.stream import Endpoints, Stream
from transduce.model.utterances import Message, Utterances
from transduce.serving.formats import verbose
from transduce.serving.limits import Refusal, error_content
from transduce.serving.service import Service

BEAM_WIDTH = 4
POLL_SECONDS = 0.5  # between looks whether the server stops: a later end against fewer looks
# The codes with which WebSockets close.
NORMAL, POLICY, FAILED, STOPPING, BUSY = 1000, 1008, 1011, 1012, 1013
CODES = {429: BUSY, 500: FAILED, 503: STOPPING}

log = logging.getLogger("transduce.serving")


@dataclass(eq=False)
class Connection:
    """The utterances of one client, and the bytes that came."""

    utterances: Utterances
    pcm: RawPcm = field(default_factory=RawPcm)

    @property
    def stream(self) -> Stream:
        """The stream of the utterances."""
        return self.utterances.stream

    def finish(self) -> Message:
        """End the utterance, and begin with the next one; return the message of its transcript."""
        if not self.pcm.is_whole:
            raise Refusal(400, "the sound ends within a sample; send all bytes of it")
        whole = verbose(self.utterances.finish())
        return {"type": "final", **{key: whole[key] for key in FINAL}}


FINAL = ("text", "duration", "segments", "phones")


@dataclass(frozen=True, eq=False)
class Piece:
    """The next samples of a stream, or its end, and the future of the answer."""

    connection: Connection
    samples: np.ndarray | None  # None: the end
    answer: Future[Message | None] = field(default_factory=Future)


class StreamBatcher:
    """A thread that computes the pieces of many streams together.

    It is not the thread of the other requests, whose batches would delay live streams.
    """

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self.changed, self.is_closed = Condition(), False
        self.thread: Thread | None = None

    def submit(self, piece: Piece) -> None:
        """Queue a piece; a stream has at most one in the queue."""
        with self.changed:
            if self.thread is None:
                self.thread = Thread(target=self._run, name="streams", daemon=True)
                self.thread.start()
            self.pieces.append(piece)
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.pieces:
                    self.changed.wait()
                pieces = list(self.pieces)
                self.pieces.clear()
            pieces = [piece for piece in pieces if piece.answer.set_running_or_notify_cancel()]
            models = {id(piece.connection.stream.model) for piece in pieces}
            for model in models:
                self._compute([p for p in pieces if id(p.connection.stream.model) == model])

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """Compute pieces of one model; if they fail, compute each alone."""
        going = [(piece, piece.samples) for piece in pieces if piece.samples is not None]
        for piece in pieces:
            if piece.samples is None:
                _settle(piece, piece.connection.finish)
        try:
            partials = Stream.accept_many(
                [piece.connection.stream for piece, _ in going], [samples for _, samples in going]
            )
        except Exception as error:
            for piece, _ in going:
                if len(going) == 1:
                    _fail(piece, error)
                else:
                    self._compute([piece])
            return
        for (piece, _), partial in zip(going, partials, strict=True):
            _settle(piece, partial_of(piece.connection.utterances.partial, partial))


def _settle(piece: Piece, answer: Callable[[], Message | None]) -> None:
    try:
        piece.answer.set_result(answer())
    except Exception as error:
        _fail(piece, error)


def _fail(piece: Piece, error: Exception) -> None:
    if not isinstance(error, Refusal):
        log.error("a stream failed", exc_info=error)
    piece.answer.set_exception(error)


class StreamRoute:
    """The route /v1/stream."""

    def __init__(self, service: Service) -> None:
        self.service, self.batcher, self.num_streams = service, StreamBatcher(), 0

    async def __call__(self, socket: WebSocket) -> None:
        """Answer a WebSocket until one side ends it."""
        await socket.accept()
        metrics, is_counted = self.service.metrics, False
        try:
            self.service.begin_request()
            is_counted = True
            if self.num_streams >= self.service.limits.max_streams:
                raise self.service.busy()
            self.num_streams += 1
            metrics.streams.set(self.num_streams)
            try:
                await self._answer(socket, self._connection(socket.query_params))
            finally:
                self.num_streams -= 1
                metrics.streams.set(self.num_streams)
        except Refusal as refusal:
            await _refuse(socket, refusal)
        except WebSocketDisconnect:
            pass
        except Exception:
            log.exception("a stream failed")
            await _refuse(socket, Refusal(500, "the server failed; its operator can see why"))
        finally:
            if is_counted:
                self.service.end_request()

    def _connection(self, query: QueryParams) -> Connection:
        """Return the stream that a query asks for; raise a Refusal if it cannot be."""
        unknown = set(query) - {"model", "beam_width", "sample_rate"}
        if unknown:
            raise Refusal(400, f"there is no option {min(unknown)[:100]!r}; leave it out")
        model = self._model(query.get("model"))
        width, most = _number(query, "beam_width") or BEAM_WIDTH, self.service.limits.max_beam_width
        if width > most:
            raise Refusal(400, f"beam_width must be from 1 to {most}; correct it")
        rate = _number(query, "sample_rate")
        try:
            stream = model.stream(beam_width=width, endpoints=Endpoints(), sample_rate=rate)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        return Connection(Utterances(stream))

    def _model(self, name: str | None) -> Model:
        """Return a model of sound, by default the first that streams."""
        if name is None:
            streaming = self.service.streaming
            if not streaming:
                raise Refusal(400, "no model of this server can stream; see GET /v1/models")
            name = streaming[0]
        return self.service.sound_model(name)

    async def _answer(self, socket: WebSocket, connection: Connection) -> None:
        """Answer the messages of a stream."""
        limits, is_first = self.service.limits, True
        while True:
            message = await self._message(socket)
            if message is None:  # the server stops
                await self._send(socket, connection, None)
                await socket.close(STOPPING, "the server is stopping")
                return
            if "bytes" in message and message["bytes"] is not None:
                content = message["bytes"]
                if is_first and content[:4] == b"RIFF":
                    raise Refusal(400, "this is a WAV file; send its samples alone, 16 bits each")
                is_first = False
                await self._send(socket, connection, connection.pcm.accept(content))
                if connection.stream.seconds > limits.max_utterance_seconds:
                    raise Refusal(
                        400,
                        f"the utterance is longer than {limits.max_utterance_seconds:g} seconds; "
                        'send {"type": "next"} at an endpoint',
                    )
                continue
            kind = _kind(message.get("text") or "")
            await self._send(socket, connection, None)
            if kind == "finish":
                await socket.close(NORMAL)
                return

    async def _message(self, socket: WebSocket) -> Any:
        """Return the next message; None if the server stops.

        Raise a Refusal if none comes in time, WebSocketDisconnect if the client has gone.
        """
        coming = asyncio.ensure_future(socket.receive())
        end = time.monotonic() + self.service.limits.stream_idle_seconds
        try:
            while not coming.done():
                if self.service.drains_since is not None:
                    return None
                if time.monotonic() > end:
                    seconds = self.service.limits.stream_idle_seconds
                    raise Refusal(400, f"nothing came for {seconds:g} seconds; open a new stream")
                await asyncio.wait({coming}, timeout=POLL_SECONDS)
        finally:
            if not coming.done():
                coming.cancel()
        message = coming.result()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", NORMAL))
        return message

    async def _send(
        self, socket: WebSocket, connection: Connection, samples: np.ndarray | None
    ) -> None:
        """Compute a piece with those of other streams, and send the answer if there is one."""
        piece = Piece(connection, samples)
        self.batcher.submit(piece)
        answer = await asyncio.wrap_future(piece.answer)
        if answer is not None:
            await socket.send_text(json.dumps(answer))


def _number(query: QueryParams, name: str) -> int | None:
    """Return a positive number of a query; None if there is none."""
    value = query.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 9 and int(value) > 0):
        raise Refusal(400, f"{name} must be a whole number above 0; correct it")
    return int(value)


def _kind(text: str) -> str:
    """Return the type of a text message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    kind = message.get("type") if isinstance(message, dict) else None
    if kind not in ("finish", "next"):
        raise Refusal(400, 'a text message must be {"type": "finish"} or {"type": "next"}')
    return str(kind)


async def _refuse(socket: WebSocket, refusal: Refusal) -> None:
    """Send an error, and close the connection."""
    content = {"type": "error", **error_content(refusal.status, refusal.message)}
    with suppress(WebSocketDisconnect, RuntimeError):
        if socket.application_state == WebSocketState.CONNECTED:
            await socket.send_text(json.dumps(content))
            await socket.close(CODES.get(refusal.status, POLICY), refusal.message[:100])
