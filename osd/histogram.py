"""How many of some figures lie in each of a few fixed buckets, as Prometheus' histograms say it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip # noqa: E501
"""Between two tokens. These and the next two are vLLM's, and finer at their lower ends: small models take less."""

FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip # noqa: E501
"""Until a first token."""

LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip # noqa: E501
"""Of a request and of its parts."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Draft tokens of one sequence that a round accepted."""

REQUEST_HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token": FIRST_SECONDS,
    "inter_token": SHORT_SECONDS,
    "time_per_token": SHORT_SECONDS,
    "queue_time": LONG_SECONDS,
    "prefill_time": LONG_SECONDS,
    "decode_time": LONG_SECONDS,
    "inference_time": LONG_SECONDS,
    "request_time": LONG_SECONDS,
    "prompt_length": TOKENS,
    "completion_length": TOKENS,
    "max_tokens": TOKENS,
}
"""What is counted of sequences, and the buckets: see ``osd.engine.lifetime``."""


@dataclass
class Histogram:
    """``counts[i]`` figures were at most ``bounds[i]`` and more than the bound before, the last ones more than any."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        """Begin with empty buckets."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, figure: float) -> None:
        """Count a figure."""
        self.counts[bisect_left(self.bounds, figure)] += 1
        self.sum += figure

    def copy(self) -> Histogram:
        """The same, which no longer grows."""
        return replace(self, counts=list(self.counts))
