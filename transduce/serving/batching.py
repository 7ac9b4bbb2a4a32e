"""Batches of requests from several clients: one thread computes them, in the order they came.

The thread takes the oldest job and those behind it for the same model with the same options, up to
a number of frames. Jobs that come while it computes form the next batch, so that batches grow with
the load; only an idle thread waits for a moment for more.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

import torch

from transduce.data.pairs import DataError
from transduce.decoding.options import SearchOptions
from transduce.model.model import SHORT, Model
from transduce.model.signature import Source
from transduce.model.stream import can_stream
from transduce.model.transcripts import Transcript
from transduce.serving.limits import Limits, Refusal
from transduce.serving.metrics import Metrics

MOST_RETRY_SECONDS = 30  # in a Retry-After header
Results = list[Transcript | DataError]

log = logging.getLogger("transduce.serving")


@dataclass(frozen=True, eq=False)
class Job:
    """Inputs of one request, and the future of their results."""

    model: str
    options: SearchOptions
    sources: Sequence[Source]
    num_frames: int
    results: Future[Results] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)

    def shares_batch(self, other: Job) -> bool:
        """Return whether two jobs can be computed in one batch."""
        return self.model == other.model and self.options == other.options


class Batcher:
    """A queue of jobs and the thread that computes them."""

    def __init__(self, models: Mapping[str, Model], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self.jobs: deque[Job] = deque()
        self.num_frames = 0  # of the jobs that wait
        self.done_frames, self.busy_seconds = 0, 0.0
        self.changed, self.is_closed = Condition(), False
        self.is_ready = Event()  # once every model has computed something
        self.has_failed = False  # before that
        self.thread = Thread(target=self._run, name="models", daemon=True)

    def start(self) -> None:
        """Start the thread, which compiles the kernels first."""
        self.thread.start()

    def close(self, seconds: float) -> bool:
        """Compute the jobs that wait, and end the thread; return whether it ended in time."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job; raise a Refusal if too many frames wait already."""
        with self.changed:
            waiting, most = self.num_frames, self.limits.max_queued_frames
            if waiting and waiting + job.num_frames > most:
                raise Refusal(
                    429,
                    "the server is busy; send the request again later",
                    Retry_After=str(self.retry_seconds()),
                )
            self.jobs.append(job)
            self._count(job.num_frames)
            self.changed.notify()

    def retry_seconds(self) -> int:
        """Return about how many seconds the waiting jobs will take."""
        if not self.done_frames:
            return 1
        expected = self.num_frames * self.busy_seconds / self.done_frames
        return min(MOST_RETRY_SECONDS, max(1, math.ceil(expected)))

    def _count(self, num_frames: int) -> None:
        self.num_frames += num_frames
        self.metrics.queued_frames.set(self.num_frames)

    def _run(self) -> None:
        try:
            for model in self.models.values():
                _warm_up(model)
        except Exception:
            log.exception("a model does not work")
            self.has_failed = True
            return
        self.is_ready.set()
        while batch := self._next_batch():
            running = [job for job in batch if job.results.set_running_or_notify_cancel()]
            if running:
                self._compute(running)

    def _next_batch(self) -> list[Job]:
        """Wait for jobs; return those of the next batch, or nothing after the last one."""
        with self.changed:
            while not self.jobs:
                if self.is_closed:
                    return []
                self.changed.wait()
            first = self.jobs[0]
            while (rest := first.since + self.limits.batch_wait - time.monotonic()) > 0:
                if self.is_closed or self.num_frames >= self.limits.max_batch_frames:
                    break
                self.changed.wait(rest)
            batch, others, num_frames = list[Job](), deque[Job](), 0
            for job in self.jobs:
                fits = num_frames + job.num_frames <= self.limits.max_batch_frames
                if job.shares_batch(first) and (fits or not batch):
                    batch.append(job)
                    num_frames += job.num_frames
                else:
                    others.append(job)
            self.jobs = others
            self._count(-num_frames)
            return batch

    def _compute(self, batch: Sequence[Job]) -> None:
        """Compute a batch; if it fails, compute each job alone, so that only the bad one fails."""
        begun = time.monotonic()
        try:
            results = self.results_of(batch)
        except Exception as error:
            if len(batch) == 1:
                log.exception("a request failed")
                batch[0].results.set_exception(error)
                return
            for job in batch:
                self._compute([job])
            return
        seconds, rest = time.monotonic() - begun, iter(results)
        num_frames = sum(job.num_frames for job in batch)
        self.done_frames += num_frames
        self.busy_seconds += seconds
        name = batch[0].model
        self.metrics.frames.labels(name).inc(num_frames)
        self.metrics.batch_inputs.labels(name).observe(len(results))
        self.metrics.batch_seconds.labels(name).observe(seconds)
        for job in batch:  # last, so that a client that is answered finds its request counted
            job.results.set_result([next(rest) for _ in job.sources])

    def results_of(self, batch: Sequence[Job]) -> Results:
        """Return the results of all inputs of a batch, in order."""
        sources = [source for job in batch for source in job.sources]
        first = batch[0]
        return list(self.models[first.model].transcribe(sources, first.options))


def _warm_up(model: Model) -> None:
    """Compute inputs in each way that requests ask for, which loads or compiles kernels."""
    options = [SearchOptions(1, with_timings=False), SearchOptions(2, with_timings=False)]
    if model.network.has_timings:
        options.append(SearchOptions(2))
    short, long = _example_of(model, 10), _example_of(model, 2 * SHORT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of outputs that nobody reads
        for one in options:
            for sources in ([short], [long, long]):
                for _ in model.transcribe(sources, one):
                    pass
        if model.signature.features is not None and can_stream(model):
            stream = model.stream(beam_width=2)
            assert isinstance(long, torch.Tensor)
            stream.accept(long)
            stream.finish()


def _example_of(model: Model, num_frames: int) -> Source:
    """Return an input of so many frames: noise, or a repeated symbol."""
    features, sources = model.signature.features, model.signature.sources
    if features is None:
        assert sources is not None
        return (sources.symbols[0],) * num_frames
    num_samples = num_frames * features.shift_samples + features.window_samples
    return 0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
