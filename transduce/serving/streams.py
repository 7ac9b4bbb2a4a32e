"""Streams of sound through WebSockets: samples in, partial transcripts out.

Binary messages are samples of 16 bits, little-endian, one channel, at the model's rate; a sample
may be divided between two messages. Text messages are JSON: {"type": "finish"} ends the stream,
{"type": "next"} ends an utterance and begins another. Answers are JSON too:

    {"type": "partial", "stable": [phone, ...], "unstable": [phone, ...], "endpoint": bool}
    {"type": "final", "text", "duration", "segments", "phones"}
    {"type": "error", "error": {"message", ...}}, and the server closes the connection

`stable` has the phones that have become final since the last message: clients append them.
`unstable` has those after them, which may still change.
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

from transduce.model.model import Model
from transduce.model.stream import Endpoints, Partial, Stream
from transduce.model.transcripts import Transcript
from transduce.serving.formats import verbose
from transduce.serving.limits import Refusal, error_content
from transduce.serving.service import Service

BEAM_WIDTH = 4
POLL_SECONDS = 0.5  # between looks whether the server stops: a later end against fewer looks
# The codes with which WebSockets close.
NORMAL, POLICY, FAILED, STOPPING, BUSY = 1000, 1008, 1011, 1012, 1013
CODES = {429: BUSY, 500: FAILED, 503: STOPPING}

log = logging.getLogger("transduce.serving")
Answer = dict[str, Any]


@dataclass(eq=False)
class Utterances:
    """The utterances of one connection: a stream, and what was sent of it."""

    stream: Stream
    num_sent: int = 0  # stable labels
    odd: bytes = b""  # half of a sample
    last: Answer = field(default_factory=dict)

    def samples(self, content: bytes) -> np.ndarray:
        """Return the samples of a message, which may begin and end within one."""
        content = self.odd + content
        whole = len(content) // 2 * 2
        self.odd = content[whole:]
        return np.frombuffer(content[:whole], dtype="<i2").astype(np.int16)

    def partial(self, partial: Partial) -> Answer | None:
        """Return the message of a partial transcript; None if it says nothing new."""
        new = list[Answer]()
        if partial.num_stable > self.num_sent:
            new = _phones(partial.stable, self.num_sent)
            self.num_sent = partial.num_stable
        unstable = {"unstable": _phones(partial.unstable), "endpoint": partial.is_endpoint}
        if not new and unstable == self.last:
            return None
        self.last = unstable
        return {"type": "partial", "stable": new, **unstable}

    def finish(self) -> Answer:
        """End the utterance, and begin with the next one; return the message of its transcript."""
        if self.odd:
            raise Refusal(400, "the sound ends within a sample; send all bytes of it")
        transcript = self.stream.finish()
        self.stream.reset()
        self.num_sent, self.last = 0, {}
        whole = verbose(transcript)
        return {"type": "final", **{key: whole[key] for key in FINAL}}


FINAL = ("text", "duration", "segments", "phones")


def _phones(transcript: Transcript, first: int = 0) -> list[Answer]:
    """Return the labels from the first on: the middles of their vectors, and their confidence.

    Their intervals are known only when the next label is.
    """
    best, step = transcript.hypotheses[0], transcript.seconds_per_vector
    assert step is not None
    return [
        {
            "symbol": symbol,
            "peak": round(transcript.offset + (timing.frame + 0.5) * step, 3),
            "confidence": round(timing.confidence, 4),
        }
        for symbol, timing in zip(
            transcript.alphabet.decode(best.labels[first:]), best.timings[first:], strict=True
        )
    ]


@dataclass(frozen=True, eq=False)
class Piece:
    """The next samples of a stream, or its end, and the future of the answer."""

    utterances: Utterances
    samples: np.ndarray | None  # None: the end
    answer: Future[Answer | None] = field(default_factory=Future)


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
            models = {id(piece.utterances.stream.model) for piece in pieces}
            for model in models:
                self._compute([p for p in pieces if id(p.utterances.stream.model) == model])

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """Compute pieces of one model; if they fail, compute each alone."""
        going = [(piece, piece.samples) for piece in pieces if piece.samples is not None]
        for piece in pieces:
            if piece.samples is None:
                _settle(piece, piece.utterances.finish)
        try:
            partials = Stream.accept_many(
                [piece.utterances.stream for piece, _ in going], [samples for _, samples in going]
            )
        except Exception as error:
            for piece, _ in going:
                if len(going) == 1:
                    _fail(piece, error)
                else:
                    self._compute([piece])
            return
        for (piece, _), partial in zip(going, partials, strict=True):
            _settle(piece, partial_of(piece.utterances.partial, partial))


def _settle(piece: Piece, answer: Callable[[], Answer | None]) -> None:
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
                await self._answer(socket, self._utterances(socket.query_params))
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

    def _utterances(self, query: QueryParams) -> Utterances:
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
        return Utterances(stream)

    def _model(self, name: str | None) -> Model:
        """Return a model of sound, by default the first that streams."""
        if name is None:
            streaming = self.service.streaming
            if not streaming:
                raise Refusal(400, "no model of this server can stream; see GET /v1/models")
            name = streaming[0]
        return self.service.sound_model(name)

    async def _answer(self, socket: WebSocket, utterances: Utterances) -> None:
        """Answer the messages of a stream."""
        limits, is_first = self.service.limits, True
        while True:
            message = await self._message(socket)
            if message is None:  # the server stops
                await self._send(socket, utterances, None)
                await socket.close(STOPPING, "the server is stopping")
                return
            if "bytes" in message and message["bytes"] is not None:
                content = message["bytes"]
                if is_first and content[:4] == b"RIFF":
                    raise Refusal(400, "this is a WAV file; send its samples alone, 16 bits each")
                is_first = False
                await self._send(socket, utterances, utterances.samples(content))
                if utterances.stream.seconds > limits.max_utterance_seconds:
                    raise Refusal(
                        400,
                        f"the utterance is longer than {limits.max_utterance_seconds:g} seconds; "
                        'send {"type": "next"} at an endpoint',
                    )
                continue
            kind = _kind(message.get("text") or "")
            await self._send(socket, utterances, None)
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
        self, socket: WebSocket, utterances: Utterances, samples: np.ndarray | None
    ) -> None:
        """Compute a piece with those of other streams, and send the answer if there is one."""
        piece = Piece(utterances, samples)
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
