"""What a service does under requests that arrive when they want."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as Grid

from benchmarks.report import columns
from osd.traffic.open_loop import Load, Tally, replay
from osd.traffic.prompt import Prompt

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Found:
    """What became of the requests, and the seconds from the first arrival to the last answer."""

    tally: Tally
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Counts, latencies in seconds, and tokens a second over the whole time."""
        figures = {**self.tally.figures(), "seconds": round(self.seconds, 3)}
        return {**figures, "tokens_per_second": round(self.tally.tokens / self.seconds, 2)}


def measure(
    prompts: Sequence[Prompt],
    url: str,
    load: Load,
    api_key: str | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> Found:
    """Send ``prompts`` to the service at ``url`` and wait for every answer.

    One request is sent beforehand and left out, so that connections and kernels are warm.
    """
    told = 0.0

    def tell(tally: Tally) -> None:
        nonlocal told
        if time.monotonic() - told > _REPORT_SECONDS:
            told = time.monotonic()
            report(f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed, {tally.tokens} tokens")

    asyncio.run(replay(prompts[-1:], url, Load(rate=1000, limit=1, max_tokens=8), api_key=api_key))
    begun = time.monotonic()
    tally = asyncio.run(replay(prompts, url, load, api_key=api_key, on_change=tell))
    return Found(tally, time.monotonic() - begun)


def table(found: Found) -> Grid:
    """Counts, tokens a second, and latencies in milliseconds."""
    figures = found.figures()
    grid = columns("", "p50", "p99")
    for name, key in (
        ("first token, ms", "first_token"),
        ("between two pieces of an answer, ms", "gaps"),
        ("a token after the first, ms", "per_token"),
        ("whole answer, ms", "latency"),
    ):
        cells = [figures[f"{key}_p{percent}"] for percent in (50, 99)]
        grid.add_row(name, *("" if value is None else f"{value * 1e3:.1f}" for value in cells))
    for name in ("sent", "failed", "tokens", "tokens_per_second"):
        grid.add_row(name.replace("_per_", "/"), str(figures[name]))
    return grid
