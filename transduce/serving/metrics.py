"""Metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INPUTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "transduce_requests", "Requests by route and status.", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "transduce_request_seconds", "Seconds from a request's headers to its response.",
            ["route"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.in_progress = Gauge(
            "transduce_requests_in_progress", "Requests that are read, wait or are computed.",
            registry=registry,
        )  # fmt: skip
        self.held_bytes = Gauge(
            "transduce_held_bytes", "Bytes in the bodies of requests in progress.",
            registry=registry,
        )  # fmt: skip
        self.queued_frames = Gauge(
            "transduce_queued_frames", "Frames that wait to be computed.", registry=registry
        )
        self.frames = Counter(
            "transduce_frames", "Frames computed: 10 ms of sound, or letters.", ["model"],
            registry=registry,
        )  # fmt: skip
        self.batch_inputs = Histogram(
            "transduce_batch_inputs", "Sounds or words in a batch.", ["model"], buckets=INPUTS,
            registry=registry,
        )  # fmt: skip
        self.batch_seconds = Histogram(
            "transduce_batch_seconds", "Seconds to compute a batch.", ["model"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.streams = Gauge("transduce_streams", "Streams at once.", registry=registry)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """Write all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
