"""Live sound from a pipe or the microphone, read ahead so that no sample is lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any

from transduce.audio.pcm import SAMPLE_BYTES

MOST_BYTES = 20_000_000  # that wait: ten minutes of 16,000 samples a second
READ_BYTES = 1 << 16  # of one read
POLL_SECONDS = 0.1  # between looks whether the listener stops
# A source that is so many seconds ahead of the clock is a file, which can wait.
AHEAD_SECONDS = 1.0


class LiveSound:
    """Bytes of sound that wait for their listener, in order."""

    def __init__(self) -> None:
        self.num_lost = 0  # bytes for which there was no room
        self.is_stopped = False
        self._parts: deque[bytes] = deque()
        self._waiting = self._received = 0  # bytes
        self._begun: float | None = None
        self._is_over, self._error = False, ""
        self._changed = Condition()

    def put(self, content: bytes) -> None:
        """Add bytes; wait until there is room for them."""
        with self._changed:
            while self._waiting >= MOST_BYTES:
                self._changed.wait()
            self._add(content)

    def offer(self, content: bytes) -> None:
        """Add bytes; lose them if there is no room."""
        with self._changed:
            if self._waiting >= MOST_BYTES:
                self.num_lost += len(content)
            else:
                self._add(content)

    def _add(self, content: bytes) -> None:
        if self.is_stopped:
            return
        self._begun = self._begun or time.monotonic()
        self._parts.append(content)
        self._waiting += len(content)
        self._received += len(content)
        self._changed.notify_all()

    def end(self, error: str = "") -> None:
        """Say that no more bytes come; `error` is the sentence why, unless that is as it should."""
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Take the bytes that have come as the last ones; a signal handler may call this."""
        self.is_stopped = True

    def take(self) -> bytes | None:
        """Wait for bytes, and return the next ones; None after the last.

        Raise a ValueError after the last if the source failed.
        """
        with self._changed:
            while not self._parts and not self._is_over and not self.is_stopped:
                self._changed.wait(POLL_SECONDS)
            if not self._parts:
                if self._error and not self.is_stopped:
                    raise ValueError(self._error)
                return None
            content = self._parts.popleft()
            self._waiting -= len(content)
            self._changed.notify_all()
            return content

    def lag(self, sample_rate: int) -> float:
        """Return the seconds of sound that wait; 0 if they come from a file, which can wait."""
        rate = SAMPLE_BYTES * sample_rate
        return 0.0 if self.is_file(sample_rate) else self._waiting / rate

    def is_file(self, sample_rate: int) -> bool:
        """Return whether the sound comes faster than it is heard, as that of a file does."""
        seconds = self._received / (SAMPLE_BYTES * sample_rate)
        begun = self._begun
        return begun is not None and seconds > time.monotonic() - begun + AHEAD_SECONDS


def read_ahead(read: Callable[[int], bytes], name: str) -> LiveSound:
    """Start a thread that reads a file to its end; `name` is that of the file in errors."""
    sound = LiveSound()

    def run() -> None:
        try:
            while content := read(READ_BYTES):
                sound.put(content)
        except OSError as error:
            sound.end(f"{name} cannot be read ({error.strerror}); pipe sound into it")
        else:
            sound.end()

    # It may wait in a read for ever, and must not keep the process from ending.
    Thread(target=run, name="sound", daemon=True).start()
    return sound


@contextmanager
def microphone(sample_rate: int) -> Iterator[LiveSound]:
    """Record from the default microphone, 16 bits and one channel, until the end of the block."""
    try:
        import sounddevice
    except ImportError:
        raise ValueError(
            "the microphone needs sounddevice; install it with "
            'pip install "transduce[microphone]", or pipe sound to `transduce listen -`'
        ) from None
    except OSError:  # the package is there, and its library is not
        raise ValueError(
            "the microphone needs PortAudio; install it (on Debian, apt install libportaudio2), or "
            "pipe sound to `transduce listen -`"
        ) from None
    sound = LiveSound()

    def received(content: Any, frames: int, clock: Any, status: Any) -> None:
        if status.input_overflow:
            sound.num_lost += SAMPLE_BYTES  # at least one sample; PortAudio does not say how many
        sound.offer(bytes(content))

    try:
        stream = sounddevice.RawInputStream(
            samplerate=sample_rate,
            channels=1,
            dtype="int16",
            callback=received,
            # It is called once more when the device goes away.
            finished_callback=lambda: sound.end("the microphone has ended; connect it again"),
        )
        stream.start()
    except (sounddevice.PortAudioError, ValueError) as error:
        reason = str(error.args[0] if error.args else error).rstrip(".")
        raise ValueError(
            f"there is no microphone that records {sample_rate} samples a second ({reason}); "
            "connect one, or pipe sound to `transduce listen -`"
        ) from None
    try:
        yield sound
    finally:
        stream.close()
