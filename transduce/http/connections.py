"""Connections: the socket that a server listens on, and time limits for requests to arrive."""

from __future__ import annotations

import asyncio
import json
import socket
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# More seconds allow slower connections; fewer free the sockets of silent clients sooner.
HEAD_SECONDS = 10  # for the request line and the headers to arrive
BODY_SECONDS = 60  # for the body to arrive
READ_SECONDS = 60  # for the client to read a response that is complete


def listen(host: str, port: int, server: str) -> tuple[socket.socket, str]:
    """Return a socket that listens, and its address as a URL.

    Raise a ValueError that names the server if the port cannot be had; port 0 chooses a free one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{server} cannot listen on {host}, port {port} ({reason}); give another --port"
        ) from None
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}/"


class TimedProtocol(H11Protocol):
    """HTTP with limits on the time in which a request must arrive."""

    awaited: str | None = None  # the part of a request that has not arrived
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start to wait for the next request, and for the client to read the response."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(READ_SECONDS, self._drop_unread)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        if self.timer is not None:
            self.timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(400, "this is not an HTTP request; send one, as browsers do")

    def error_content(self, status: int, message: str) -> object:
        """Return the JSON values of an error response."""
        return {"message": message}

    def _watch(self) -> None:
        """Start the time limit of the part that the client sends now; bytes do not extend it."""
        limits = {
            h11.IDLE: ("the headers", HEAD_SECONDS),
            h11.SEND_BODY: ("the body", BODY_SECONDS),
        }
        awaited, seconds = limits.get(self.conn.their_state, (None, 0))
        if awaited == self.awaited:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.awaited = awaited
        self.timer = self.loop.call_later(seconds, self._give_up, seconds) if awaited else None

    def _give_up(self, seconds: float) -> None:
        """Close a connection whose request did not arrive in time."""
        sentence = f"{self.awaited} did not arrive within {seconds} seconds; send the request again"
        if self.awaited == "the headers" and not self.conn.trailing_data[0]:
            self.transport.close()  # the client has sent nothing
        else:
            self._refuse(408, sentence)

    def _drop_unread(self) -> None:
        """End the connection of a client that does not read, and free what it has not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error response, unless another response has begun, and close the connection."""
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(self.error_content(status, message)).encode()
            lines = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "Content-Type: application/json",
                f"Content-Length: {len(content)}",
                "Connection: close",
            )
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        self.transport.close()
