"""WebSockets that end if their client does not read."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

# More seconds allow clients that read in bursts; fewer free their connections sooner.
SLOW_READER_SECONDS = 10  # for the client of a stream to read what waits for it


class StreamProtocol(WebSocketsSansIOProtocol):
    """WebSockets that close if the client does not read.

    About 64 KB wait for a client; then it has SLOW_READER_SECONDS to read them.
    """

    slow: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start to wait for the client to read."""
        super().pause_writing()
        self.slow = self.loop.call_later(SLOW_READER_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        """Stop waiting."""
        super().resume_writing()
        if self.slow is not None:
            self.slow.cancel()

    def _give_up(self) -> None:
        """Close the connection with a reason; drop what is unread if nobody reads that either."""
        if not self.transport.is_closing():
            self.conn.fail(1008, "the client reads its results too slowly")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()
        self.loop.call_later(SLOW_READER_SECONDS, self.transport.abort)
