"""The models of a server and the state that its requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from transduce.arpabet import has_stress
from transduce.decoding.options import SearchOptions
from transduce.http.sounds import decode_sound
from transduce.model.model import Model
from transduce.model.signature import Source
from transduce.model.stream import can_stream
from transduce.serving.batching import Batcher, Job, Results
from transduce.serving.limits import MAX_DECODERS, Limits, Refusal
from transduce.serving.metrics import Metrics


class Service:
    """Trained models by name, a queue of jobs for them, and the requests in progress."""

    def __init__(
        self, models: Mapping[str, Model], limits: Limits | None = None, key: str | None = None
    ) -> None:
        for name, model in models.items():
            signature = model.signature
            if signature.sources is None and signature.features is None:
                raise ValueError(f"{name} reads neither sound nor text; give a model that does")
        self.models, self.limits = dict(models), limits or Limits()
        self.key = key  # which clients must send; None: anyone may use the server
        self.metrics = Metrics()
        self.batcher = Batcher(self.models, self.limits, self.metrics)
        self.in_progress = self.held_bytes = 0
        self.streaming = [
            name
            for name, model in self.models.items()
            if model.signature.features is not None and can_stream(model)
        ]
        self.drains_since: float | None = None  # time.monotonic() of the signal to stop
        self.decoders = ThreadPoolExecutor(MAX_DECODERS, "decoders")

    # --- Models ---------------------------------------------------------------------------------

    def sound_model(self, name: str) -> Model:
        """Return a model of sound by its name; raise a Refusal if there is none."""
        model = self.model(name)
        if model.signature.features is None:
            raise Refusal(400, f"{name} does not take sound; see GET /v1/models")
        return model

    def text_model(self, name: str | None, *, stress: bool = False) -> tuple[str, Model]:
        """Return a model of text, by default the first one, with its name.

        With `stress`, it must write stress digits.
        """
        if name is None:
            texts = [n for n, model in self.models.items() if model.signature.sources is not None]
            if not texts:
                raise Refusal(400, "no model of this server reads text; see GET /v1/models")
            name = next((n for n in texts if stress and self._has_stress(n)), texts[0])
        model = self.model(name)
        if model.signature.sources is None:
            raise Refusal(400, f"{name} does not read text; see GET /v1/models")
        if stress and not self._has_stress(name):
            raise Refusal(400, f"{name} writes no stress digits; leave stress out")
        return name, model

    def _has_stress(self, name: str) -> bool:
        return has_stress(self.models[name].signature.targets.symbols)

    def model(self, name: str) -> Model:
        """Return a model by its name; raise a Refusal if there is none."""
        if name not in self.models:
            there_are = ", ".join(self.models)
            raise Refusal(404, f"there is no model {name[:100]!r}; there are {there_are}")
        return self.models[name]

    # --- Requests -------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """Count a request; raise a Refusal if the server stops, is not ready, or has too many."""
        if self.drains_since is not None:
            raise Refusal(503, "the server is stopping; send the request to another one")
        if not self.batcher.is_ready.is_set():
            raise Refusal(
                503, "the server is loading its models; send the request later", Retry_After="1"
            )
        if self.in_progress >= self.limits.max_requests:
            raise self.busy()
        self.in_progress += 1
        self.metrics.in_progress.set(self.in_progress)

    def end_request(self) -> None:
        """Count a request as done."""
        self.in_progress -= 1
        self.metrics.in_progress.set(self.in_progress)

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a body, or release them; raise a Refusal if there are too many."""
        if num_bytes > 0 and self.held_bytes + num_bytes > self.limits.max_held_bytes:
            raise self.busy()
        self.held_bytes += num_bytes
        self.metrics.held_bytes.set(self.held_bytes)

    def busy(self) -> Refusal:
        """Return the refusal of a request that may be sent again later."""
        seconds = str(self.batcher.retry_seconds())
        return Refusal(429, "the server is busy; send the request again later", Retry_After=seconds)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.drains_since is None:
            self.drains_since = time.monotonic()

    @property
    def is_drained(self) -> bool:
        """Whether the server stops and all requests are done, or their time is over."""
        if self.drains_since is None:
            return False
        late = time.monotonic() - self.drains_since > self.limits.drain_seconds
        return self.in_progress == 0 or late

    # --- Answers --------------------------------------------------------------------------------

    async def decode(self, content: bytes, name: str, sample_rate: int) -> Tensor:
        """Decode a sound file to samples [N]; raise a Refusal if it cannot be."""
        decoding = partial(
            decode_sound,
            content,
            name,
            sample_rate,
            max_bytes=self.limits.max_bytes,
            max_seconds=self.limits.max_seconds,
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self.decoders, decoding)
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    async def results(
        self,
        request: Request,
        name: str,
        options: SearchOptions,
        sources: Sequence[Source],
        num_frames: int,
    ) -> Results:
        """Compute the results of inputs in a batch with those of other requests.

        If the client goes away or the time is over, the job leaves the queue.
        """
        job = Job(name, options, sources, num_frames)
        self.batcher.submit(job)
        found = asyncio.wrap_future(job.results)
        gone = asyncio.ensure_future(_disconnection(request))
        either: set[asyncio.Future[Any]] = {found, gone}
        try:
            done, _ = await asyncio.wait(
                either, timeout=self.limits.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if found in done:
                return found.result()
        finally:
            gone.cancel()
            found.cancel()  # which a batch that is being computed ignores
        if gone in done:
            raise ClientDisconnect
        raise Refusal(
            503,
            f"the answer took longer than {self.limits.timeout:g} seconds; send less, or later",
            Retry_After=str(self.batcher.retry_seconds()),
        )


async def _disconnection(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
