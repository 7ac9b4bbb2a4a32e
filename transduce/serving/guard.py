"""Check, limit and count every request; answer every error in one sentence.

The guard is middleware of the ASGI interface, for HTTP and WebSockets alike.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transduce.http.hosts import foreign_request
from transduce.serving.limits import (
    MAX_DROPPED_BYTES,
    MAX_JSON_BYTES,
    Refusal,
    error_content,
)
from transduce.serving.service import Service

OPEN = ("/health", "/ready")  # routes without a key
TRANSCRIPTIONS, PHONEMIZE, STREAM = "/v1/audio/transcriptions", "/v1/phonemize", "/v1/stream"
WORK = (TRANSCRIPTIONS, PHONEMIZE)  # routes that compute
ROUTES = (*OPEN, *WORK, STREAM, "/v1/models", "/metrics")  # named in metrics
LENGTH = re.compile(r"[0-9]{1,20}")
CLOSED_REQUEST = 499  # the status in metrics where the client went away
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
REFUSED_STREAM = 1008  # the code of a WebSocket that breaks the rules

log = logging.getLogger("transduce.serving")


def error_response(refusal: Refusal) -> Response:
    """Return the response of a refusal."""
    content = json.dumps(error_content(refusal.status, refusal.message))
    headers = {**HEADERS, **refusal.headers}
    return Response(content, refusal.status, headers, media_type="application/json")


class Guard:
    """Middleware that checks, limits and counts requests."""

    def __init__(
        self, app: ASGIApp, service: Service, host: str, others: Collection[str] = ()
    ) -> None:
        self.app, self.service, self.host, self.others = app, service, host, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "websocket":
            await self._stream(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, begun = scope["path"], time.monotonic()
        body = Body(receive, self.service, self._most_bytes(path))
        status = CLOSED_REQUEST
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
            await send(message)

        try:
            await self._answer(scope, body, watched)
        except ClientDisconnect:
            pass
        except Refusal as refusal:
            if not has_begun and await body.drop("expect" in Headers(scope=scope)):
                refusal.headers.setdefault("Connection", "close")
                await error_response(refusal)(scope, receive, watched)
        except Exception:
            log.exception("%s failed", path)
            if not has_begun:
                told = Refusal(500, "the server failed; its operator can see why")
                await error_response(told)(scope, receive, watched)
        finally:
            body.release()
            route = path if path in ROUTES else "other"
            self.service.metrics.requests.labels(route, str(status)).inc()
            if path in WORK:
                seconds = time.monotonic() - begun
                self.service.metrics.request_seconds.labels(route).observe(seconds)

    async def _answer(self, scope: Scope, body: Body, send: Send) -> None:
        """Pass a request on to the application; raise a Refusal if it breaks the rules."""
        self._check(scope)
        if scope["path"] not in WORK or scope["method"] != "POST":
            await self.app(scope, body.receive, send)
            return
        self.service.begin_request()
        try:
            body.claim(Headers(scope=scope).get("content-length"))
            await self.app(scope, body.receive, send)
        finally:
            self.service.end_request()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a WebSocket on, or refuse it with the status of the refusal before it opens."""
        status = "101"
        try:
            self._check(scope)
            await self.app(scope, receive, send)
        except Refusal as refusal:
            status = str(refusal.status)
            await receive()  # websocket.connect
            if "websocket.http.response" in scope.get("extensions", {}):
                await error_response(refusal)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": REFUSED_STREAM})
        finally:
            route = scope["path"] if scope["path"] in ROUTES else "other"
            self.service.metrics.requests.labels(route, status).inc()

    def _check(self, scope: Scope) -> None:
        """Raise a Refusal for requests of other sites and without the key."""
        headers, key = Headers(scope=scope), self.service.key
        sentence = foreign_request(
            headers.get("host", ""), headers.get("origin"), self.host, self.others
        )
        if sentence is not None:
            raise Refusal(403, sentence)
        if key is not None and scope["path"] not in OPEN:
            sent = headers.get("authorization", "").encode("latin-1")  # its own bytes
            # Of equal lengths, so that the time tells nothing of the key's.
            own = sha256(b"Bearer " + key.encode()).digest()
            if not compare_digest(sha256(sent).digest(), own):
                raise Refusal(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    WWW_Authenticate="Bearer",
                )

    def _most_bytes(self, path: str) -> int:
        return self.service.limits.max_bytes if path == TRANSCRIPTIONS else MAX_JSON_BYTES


class Body:
    """The body of a request, whose bytes are counted as they arrive."""

    def __init__(self, receive: Receive, service: Service, most: int) -> None:
        self._receive, self.service, self.most = receive, service, most
        self.num_bytes = self.held = 0
        self.is_whole = self.is_gone = False

    def claim(self, length: str | None) -> None:
        """Claim the bytes of a Content-Length header; raise a Refusal if they are too many."""
        if length is not None:
            if not LENGTH.fullmatch(length):
                raise Refusal(400, "the header Content-Length is not a number; correct it")
            self._check(int(length))
            self._hold(int(length))

    async def receive(self) -> Message:
        """Receive a message; raise a Refusal as soon as the body is too large."""
        message = await self._receive()
        if message["type"] == "http.request":
            self.num_bytes += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)
            self._check(self.num_bytes)
            self._hold(self.num_bytes)
        elif message["type"] == "http.disconnect":
            self.is_gone = True
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.most:
            raise Refusal(
                413,
                f"the request is larger than {self.most / 10**6:g} MB; send it in parts",
            )

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > self.held:
            self.service.hold(num_bytes - self.held)
            self.held = num_bytes

    def release(self) -> None:
        """Release the bytes that were claimed."""
        self.service.hold(-self.held)
        self.held = 0

    async def drop(self, client_waits: bool) -> bool:
        """Read and drop the rest of a refused body, within a limit; return False if nobody is left.

        A client that sends its whole body before it reads would see a reset connection otherwise.
        One that waits for `100 Continue` sends no body.
        """
        self.release()
        dropped = 0
        while not (client_waits or self.is_whole or self.is_gone) and dropped < MAX_DROPPED_BYTES:
            message = await self._receive()
            dropped += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)
            self.is_gone = message["type"] == "http.disconnect"
        return not self.is_gone
