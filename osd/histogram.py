"""Histograms with fixed buckets, as Prometheus defines them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip # noqa: E501
"""Bounds of the time between two tokens. The time bounds are those of vLLM, with finer ones for small models."""

FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip # noqa: E501
"""Bounds of the time to the first token."""

LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip # noqa: E501
"""Bounds of the durations of requests and of their phases."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Bounds of numbers of tokens."""

ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Bounds of the accepted draft tokens of one sequence in one decoding step."""


@dataclass
class Histogram:
    """Histogram with fixed buckets.

    Attributes:
        bounds: ascending upper bounds of the buckets, inclusive.
        counts: the number of values in each bucket; the last one counts values above all bounds.
        sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        """Start with empty buckets."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value

    def copy(self) -> Histogram:
        """Return a copy that further values do not change."""
        return replace(self, counts=list(self.counts))
