"""Prometheus metrics of a tap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

Reason = Literal["policy", "share", "size", "status", "unfinished", "unreadable", "model", "form"]
"""Reason why an answer is not captured.

``policy``: settings or ``store`` forbid it. ``share``: it was not sampled. ``size``: it is too large. ``status``: it
is an error. ``unfinished``: it did not end. ``unreadable``: it is not in OpenAI's format. ``model``: it is from another
model. ``form``: it has other content than text and function calls, or its prompt cannot be reproduced.
"""

_ADDED = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class TapMetrics:
    """Metrics of a tap, in a separate ``registry``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("osd_tap_requests", "Answers by status.", ["status"], registry=registry)
        self.in_flight = 0
        running = Gauge("osd_tap_running", "Requests without a complete answer.", registry=registry)
        running.set_function(lambda: self.in_flight)
        self.errors = Counter(
            "osd_tap_upstream_errors",
            "Requests without an answer of the upstream (unreachable) or with an incomplete answer (broken).",
            ["kind"],
            registry=registry,
        )
        self.added = Histogram(
            "osd_tap_added_seconds",
            "Delay that the tap adds: from the request's headers until the request is sent to the upstream, and from "
            "the answer's headers until its first bytes are sent to the client.",
            buckets=_ADDED,
            registry=registry,
        )
        self.passed_over = Counter(
            "osd_tap_passed_over", "Answers that are not captured, by reason.", ["reason"], registry=registry
        )
        self.unread = Counter(
            "osd_tap_unread", "Answers that are not captured because the queue was full.", registry=registry
        )

    def answered(self) -> tuple[int, int]:
        """Return the number of answers, and the number of answers with a status of 500 or more."""
        statuses = {
            sample.labels["status"]: int(sample.value)
            for family in self.requests.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        return sum(statuses.values()), sum(count for status, count in statuses.items() if int(status) >= 500)

    def register_writer(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Export the counts ``written`` and ``dropped`` of a writer as ``osd_tap_captured`` and ``osd_tap_dropped``.

        ``counters`` returns the counts; each scrape calls it.
        """
        self.registry.register(_WriterCollector(counters))


class _WriterCollector(Collector):
    def __init__(self, counters: Callable[[], Mapping[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        counts = self._counters()
        captured = "Exchanges written to Redis."
        yield CounterMetricFamily("osd_tap_captured", captured, value=counts["written"])
        dropped = "Exchanges lost because the queue was full, or Redis was full or did not answer."
        yield CounterMetricFamily("osd_tap_dropped", dropped, value=counts["dropped"])
