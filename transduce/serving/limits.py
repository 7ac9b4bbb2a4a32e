"""The limits of the server, and the refusals of requests that exceed them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_JSON_BYTES = 1_000_000  # in a body of JSON
MAX_MESSAGE_BYTES = 1_000_000  # in a message of a stream: 31 seconds of 16,000 samples
MAX_FIELD_BYTES = 65_536  # in a field of a form other than the file
MAX_FIELDS = 32  # of a form
MAX_N_BEST = 20  # pronunciations of a line
# A client that sends its whole body before it reads can read the refusal of a body that exceeds the
# limit by so much; the server reads and drops as much.
MAX_DROPPED_BYTES = 100_000_000
# Sounds decoded at once: more use more cores, fewer less memory; a sound at the highest sample rate
# takes 200 MB for a moment.
MAX_DECODERS = 4


@dataclass(frozen=True)
class Limits:
    """The limits that an operator can set. A frame is 10 ms of sound or a letter."""

    max_bytes: int = 25_000_000
    """The largest body of a request with sound."""
    max_seconds: float = 120.0
    """The longest sound in a request."""
    max_words: int = 1000
    """The most words in a request to phonemize."""
    max_beam_width: int = 100
    """The widest beam that a request may ask for."""
    max_requests: int = 256
    """The most requests that are read, wait or are computed; further ones get status 429."""
    max_queued_frames: int = 200_000
    """The most frames that wait to be computed; what exceeds them gets status 429."""
    max_held_bytes: int = 500_000_000
    """The most bytes in the bodies of all requests together; what exceeds them gets status 429."""
    max_batch_frames: int = 4096
    """The most frames in a batch of several requests: throughput against waiting."""
    batch_wait: float = 0.005
    """The seconds that a request waits for others to share its batch, unless the model is busy."""
    timeout: float = 60.0
    """The seconds in which a request that has arrived must be answered."""
    drain_seconds: float = 30.0
    """The seconds that requests have to finish after SIGTERM."""
    max_streams: int = 64
    """The most streams at once."""
    max_utterance_seconds: float = 600.0
    """The longest utterance of a stream."""
    stream_idle_seconds: float = 30.0
    """The seconds after which a stream without messages ends."""
    max_connections: int = 900
    """The most open connections; further ones get status 503."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or (value == 0 and name == "batch_wait")):
                raise ValueError(f"{name} must be more than 0, not {value}")


class Refusal(Exception):
    """An error response: its status, a sentence for the user, and further headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_content(status: int, message: str) -> dict[str, object]:
    """Return the JSON values of an error response, in the form that OpenAI's clients read."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
