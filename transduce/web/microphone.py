"""The WebSocket of the page's microphone: samples in, partial transcripts out.

Binary messages are samples of 16 bits, little-endian, one channel, at the model's rate. Answers are
JSON: those of `model.utterances`, and

    {"type": "begin", "input"}: first of all, the name to ask for the lattice so far with
    {"type": "error", "message": a sentence}, and the server closes the connection
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from transduce.web.explorer import Explorer

MAX_MESSAGE_BYTES = 1_000_000
IDLE_SECONDS = 30  # without a message, after which a recording ends
REFUSED, FAILED = 1008, 1011  # codes with which WebSockets close


async def hear(socket: WebSocket, explorer: Explorer) -> None:
    """Answer the messages of a recording until the page ends it."""
    await socket.accept()
    name: str | None = None
    try:
        name, recording = await run_in_threadpool(explorer.begin_recording)
        await _send(socket, {"type": "begin", "input": name})
        while True:
            message = await asyncio.wait_for(socket.receive(), IDLE_SECONDS)
            if message["type"] == "websocket.disconnect":
                return
            content = message.get("bytes")
            if content is None:
                raise ValueError("a recording is binary messages of samples; send those")
            answer = await run_in_threadpool(recording.accept, content)
            if answer is not None:
                await _send(socket, answer)
    except WebSocketDisconnect:
        pass
    except TimeoutError:
        await _refuse(socket, f"nothing came for {IDLE_SECONDS} seconds; record again")
    except ValueError as error:
        await _refuse(socket, str(error))
    except Exception as error:
        print(f"transduce: /api/recording: {error!r}", file=sys.stderr)
        await _refuse(socket, "the server failed; its terminal shows the error", FAILED)
    finally:
        if name is not None:
            explorer.end_recording(name)


async def _send(socket: WebSocket, message: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(message))


async def _refuse(socket: WebSocket, message: str, code: int = REFUSED) -> None:
    """Send an error, and close the connection."""
    with suppress(WebSocketDisconnect, RuntimeError):  # the page may have gone
        await _send(socket, {"type": "error", "message": message})
        await socket.close(code)
