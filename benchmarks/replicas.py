"""What a second replica adds: the same users ask a service of one and of two replicas, in turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx2
from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.over_http import over_http
from benchmarks.report import columns
from benchmarks.start import await_answer, up
from osd.config import Settings
from osd.scrape import Scrape
from osd.traffic.prompt import Prompt

COUNTS = (1, 2)
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """In each turn ``users`` ask ``requests`` times each for ``tokens`` tokens."""

    users: int
    requests: int
    tokens: int
    turns: int


@dataclass(frozen=True)
class Block:
    """All tokens a second of a service of so many ``replicas``, and the median seconds to a first token."""

    replicas: int
    turn: int
    rate: float
    first_token: float


def measure(
    settings: Settings, prompts: Sequence[Prompt], plan: Plan, report: Callable[[str], None] = lambda step: None
) -> Iterator[Block]:
    """Start services of one and of two replicas in turns, as does which begins, and ask them all prompts.

    Raises:
        BenchError: a service does not come up, or a request fails.
    """
    texts = [prompts[at % len(prompts)] for at in range(plan.users * plan.requests)]
    key = settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
    for turn in range(plan.turns):
        for count in COUNTS if turn % 2 else COUNTS[::-1]:
            report(f"turn {turn + 1} of {plan.turns}, {count} of {COUNTS[-1]} replicas")
            serving = settings.serving.model_copy(update={"replicas": count, "max_replicas": None})
            with up(settings.model_copy(update={"serving": serving})) as (process, url, errors):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                with httpx2.Client(base_url=url, headers=headers, timeout=60) as http:
                    await_answer(process, http, errors)
                    while len(Scrape.of(http.get("/metrics").text).by("osd_running_requests", "replica")) < count:
                        time.sleep(_LOOK_SECONDS)
                asyncio.run(over_http(url, key, texts[: plan.users], plan.users, plan.tokens))  # warms up
                first, seconds = asyncio.run(over_http(url, key, texts, plan.users, plan.tokens))
            yield Block(count, turn, len(texts) * plan.tokens / seconds, statistics.median(first))


def table(blocks: Sequence[Block]) -> Grid:
    """The medians over turns with the least and the most, and what two replicas do in place of one."""
    grid = columns("replicas", "tokens/s", "first token, ms", "of one replica")
    one, *_ = by_count = [[block for block in blocks if block.replicas == count] for count in COUNTS]
    for count, of_count in zip(COUNTS, by_count, strict=True):
        grid.add_row(
            str(count),
            Spread.of([block.rate for block in of_count]).text(digits=1),
            Spread.of([block.first_token for block in of_count]).text(1e3, 1),
            Spread.of([mine.rate / other.rate for mine, other in zip(of_count, one, strict=True)]).text(digits=3),
        )
    return grid
