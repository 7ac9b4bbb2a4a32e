"""Stop all processes of a training when one of them fails or is lost, and say which.

Without this, the others would wait for it in their next collective operation: Gloo raises an error
without the process's number, and NCCL waits for minutes. Each process keeps a connection to the
first one. The system closes it when a process ends, even by SIGKILL, and keep-alive packets notice
a machine or a network that is gone. The first process tells the others what happened.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, cast

from lightning_fabric import Fabric

from transduce.training.checks import SECONDS_TO_SPEAK, TrainingError, end_quietly

# A machine that does not answer for 10 + 4 x 5 seconds is lost: early news against false alarms.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
SECONDS_FOR_NEWS = 3.0  # from the error of a collective operation to the news of its cause
SECONDS_TO_LEAVE = 10.0  # from the news to the end of a process that waits in NCCL
SECONDS_TO_CONNECT = 60.0
STOPPED = "stopped by Ctrl-C"


@dataclass(frozen=True)
class End:
    """The end of a process before its time."""

    rank: int
    machine: int
    local_rank: int
    host: str
    error: str | None = None  # None: it was lost, without a word

    def sentence(self) -> str:
        """Return what happened, where, and what to do."""
        process = f"process {self.rank} on {self.host}"
        if self.error is not None:
            return f"{process} failed: {self.error}"
        return (
            f"process {self.rank} was lost on {self.host}: it was killed, ran out of memory, or "
            "its machine is gone, so all processes stop; go on with --resume"
        )


@contextmanager
def watch_peers(fabric: Fabric) -> Iterator[None]:
    """In the block, end all processes with one sentence if one of them fails or is lost.

    A process that is lost is noticed at once, a machine or a network after 30 seconds. A process
    that does not leave the block within 10 seconds of the news is ended.
    """
    if fabric.world_size == 1:
        yield
        return
    me = End(fabric.global_rank, fabric.node_rank, fabric.local_rank, socket.gethostname())
    peers = _Peers(me, _connect(fabric, me))
    try:
        yield
    except RuntimeError as error:
        # An operation fails a moment before the news that a peer is gone.
        if not peers.news.wait(SECONDS_FOR_NEWS):
            peers.leave(f"{type(error).__name__}: {error}")
            raise
        peers.stop()
    except KeyboardInterrupt:
        peers.leave(STOPPED)
        raise
    except (ValueError, OSError) as error:  # which the user can fix, and is told once a machine
        peers.leave(str(error))
        if me.local_rank != 0:
            end_quietly()
        raise
    except BaseException as error:
        peers.leave(str(error))
        raise
    else:
        peers.leave(None)
    finally:
        peers.close()


class _Peers:
    """The connections of a process to others: all of them in the first, one to it in the rest."""

    def __init__(self, me: End, connections: dict[socket.socket, End]) -> None:
        self.me, self.connections = me, connections
        self.end: End | None = None  # the first that was heard of
        self.news, self.left = threading.Event(), threading.Event()
        self.closing, self.waker = socket.socketpair()
        self.thread = threading.Thread(target=self._listen, name="peers", daemon=True)
        self.thread.start()

    def leave(self, error: str | None) -> None:
        """Tell the others that this process is done, or why it failed."""
        line = None if error is None else (error.splitlines() or [""])[0]
        self._tell(self.connections, {"done": True} if error is None else self._failed(line))
        self.left.set()

    def stop(self) -> NoReturn:
        """Raise the error of a process whose peer ended; one on each machine says the sentence."""
        self.left.set()
        if not self.says_it():
            end_quietly()
        raise TrainingError(self.ended().sentence()) from None

    def says_it(self) -> bool:
        """Return whether this process tells its machine of the end of another.

        It is the first process of its machine, which tells its own failure itself, or the second
        if the first was lost.
        """
        end = self.ended()
        first_was_lost = (end.machine, end.local_rank, end.error) == (self.me.machine, 0, None)
        return self.me.local_rank == (1 if first_was_lost else 0)

    def ended(self) -> End:
        """Return the end that was heard of."""
        assert self.end is not None
        return self.end

    def close(self) -> None:
        """Close the connections, when the thread no longer reads them."""
        self.waker.close()
        self.thread.join()
        for connection in (*self.connections, self.closing):
            connection.close()

    def _failed(self, error: str | None) -> dict[str, Any]:
        return asdict(replace(self.me, error=error))

    def _tell(self, connections: Iterable[socket.socket], message: dict[str, Any]) -> None:
        """Send a message to some of the others."""
        for connection in connections:
            with suppress(OSError):  # it is gone, or it has heard of another end
                connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """Wait for the end of another process; tell the others, and end this one too."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.closing, selectors.EVENT_READ)
            for peer in self.connections:
                selector.register(peer, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.closing:
                        return
                    connection = cast(socket.socket, key.fileobj)
                    message = _receive(connection)
                    if message is None or "done" not in message:
                        end = self.connections[connection] if message is None else End(**message)
                        self._hear(end, connection)
                        return
                    selector.unregister(connection)

    def _hear(self, end: End, source: socket.socket) -> None:
        """Pass on the news of a process's end; end this process if it does not leave by itself."""
        self.end = end
        if self.me.rank == 0:
            self._tell((other for other in self.connections if other is not source), asdict(end))
        self.news.set()
        if not self.left.wait(SECONDS_TO_LEAVE):
            if self.says_it():
                print(f"transduce: {end.sentence()}", file=sys.stderr, flush=True)
            else:
                time.sleep(SECONDS_TO_SPEAK)
            os._exit(1)


def _connect(fabric: Fabric, me: End) -> dict[socket.socket, End]:
    """Connect all processes with the first; return the connections, and who is at their ends."""
    address = os.environ["MASTER_ADDR"]
    deadline = time.monotonic() + SECONDS_TO_CONNECT
    if not fabric.is_global_zero:
        port, token, first = cast(tuple[int, str, End], fabric.broadcast(None))
        try:
            connection = socket.create_connection((address, port), SECONDS_TO_CONNECT)
        except OSError as error:
            raise TrainingError(
                f"process {me.rank} on {me.host} cannot reach process 0 at {address}, port {port} "
                f"({error.strerror or error}); let the machines reach each other's ports"
            ) from None
        connection.sendall(json.dumps({"token": token, "peer": asdict(me)}).encode() + b"\n")
        return {_kept_alive(connection): first}
    with _server(fabric.world_size) as server:
        token, connections = secrets.token_hex(16), dict[socket.socket, End]()
        fabric.broadcast((server.getsockname()[1], token, me))
        while len(connections) < fabric.world_size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                found = {0, *(peer.rank for peer in connections.values())}
                missing = sorted(set(range(fabric.world_size)) - found)
                raise TrainingError(
                    f"the processes {missing} cannot reach process 0 at {address}; let the "
                    "machines reach each other's ports"
                ) from None
            connection.settimeout(5.0)
            hello = _receive(connection)
            if hello is not None and hello.get("token") == token:
                connections[_kept_alive(connection)] = End(**hello["peer"])
            else:  # a stranger's
                connection.close()
    return connections


def _server(backlog: int) -> socket.socket:
    """Return a socket that listens to all addresses at a free port."""
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Let the system notice when the other machine is gone; let reads wait."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # macOS and Windows have their own names and defaults
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Read a message, a line of JSON; return None if the other process, or its network, is gone."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            byte = connection.recv(1)  # a message is short, and there are two in all
        except OSError:
            return None
        if not byte:
            return None
        line += byte
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
