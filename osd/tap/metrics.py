"""What a tap counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

Reason = Literal["policy", "share", "size", "status", "unfinished", "unreadable", "model", "form"]
"""Why an answer is not captured, though nothing is wrong with the tap.

Settings or ``store`` do not allow it; it was not drawn; it is too large; it is an error; it did not end; it is not what
OpenAI's API says; another model gave it; or it is more than text and calls of functions.
"""

_ADDED = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class TapMetrics:
    """The counters of one tap, in a ``registry`` of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("osd_tap_requests", "Answers by their status.", ["status"], registry=registry)
        self.in_flight = 0
        running = Gauge("osd_tap_running", "Requests that have no whole answer yet.", registry=registry)
        running.set_function(lambda: self.in_flight)
        self.errors = Counter(
            "osd_tap_upstream_errors",
            "Requests that the upstream gave no answer (unreachable), or not all of it (broken).",
            ["kind"],
            registry=registry,
        )
        self.added = Histogram(
            "osd_tap_added_seconds",
            "From a request's head until it is sent to the upstream, and from the answer's head until its first bytes "
            "are sent to the client.",
            buckets=_ADDED,
            registry=registry,
        )
        self.passed_over = Counter(
            "osd_tap_passed_over", "Answers that are not captured, by reason.", ["reason"], registry=registry
        )
        self.unread = Counter(
            "osd_tap_unread", "Answers that are not captured because too many waited to be read.", registry=registry
        )

    def answered(self) -> tuple[int, int]:
        """Answers so far, and those of them with a status of 500 or more."""
        statuses = {
            sample.labels["status"]: int(sample.value)
            for family in self.requests.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        return sum(statuses.values()), sum(count for status, count in statuses.items() if int(status) >= 500)

    def tell_written(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Tell of what a writer has ``written`` to Redis and ``dropped``, too."""
        self.registry.register(_Written(counters))


class _Written(Collector):
    def __init__(self, counters: Callable[[], Mapping[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        counts = self._counters()
        captured = "Exchanges that were written to Redis."
        yield CounterMetricFamily("osd_tap_captured", captured, value=counts["written"])
        dropped = "Exchanges that were not: the queue was full, or Redis gone or full."
        yield CounterMetricFamily("osd_tap_dropped", dropped, value=counts["dropped"])
