"""What the ledger says that drafts saved, beside the clock: the same requests with drafts and without, in turns."""

from __future__ import annotations

import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.table import Table as Grid

from benchmarks.figures import Quartiles
from benchmarks.report import columns
from benchmarks.streams import settled, updates_of
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update

PLAIN, DRAFTED = "plain", "drafted"


@dataclass(frozen=True)
class Traffic:
    """How requests come: from so many ``users``, who wait for an answer before they ask again, or at a ``rate``.

    With a ``rate``, in requests a second, they come from independent users: the times between them are exponential.
    """

    users: int
    rate: float | None = None


@dataclass(frozen=True)
class Plan:
    """``blocks`` of ``requests`` each, of at most ``tokens`` tokens, and one more before them to warm up."""

    blocks: int
    requests: int
    tokens: int

    @property
    def prompts(self) -> int:
        """That it takes."""
        return (self.blocks + 1) * self.requests


@dataclass(frozen=True)
class Way:
    """How a block is answered: with drafts or without; ``prepare`` is called before it, while the engine rests."""

    name: str
    drafted: bool
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Block:
    """Requests that were answered in one way within ``seconds``, and what the engine counted meanwhile.

    It was busy for ``busy_seconds``, of which its ledger says that drafts saved ``saved_seconds``.
    """

    way: str
    number: int
    tokens: int
    seconds: float
    busy_seconds: float
    saved_seconds: float

    @property
    def said(self) -> float:
        """Busy seconds a token of plain decoding, by the ledger."""
        return (self.busy_seconds + self.saved_seconds) / self.tokens

    @property
    def took(self) -> float:
        """Busy seconds a token."""
        return self.busy_seconds / self.tokens


def measure(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    traffic: Traffic,
    plan: Plan,
    report: Callable[[str], None] = lambda step: None,
    ways: Sequence[Way] = (Way(DRAFTED, True), Way(PLAIN, False)),
) -> Iterator[Block]:
    """Answer each block of prompts in every way, greedily; the ways take turns, as does which begins.

    Args:
        engine: running, with a drafter and without the prefix cache.
        prompts: ``plan.prompts`` of them, none of which comes in two blocks. What is drafted for is remembered.
        traffic: how they come; in all ways alike.
        plan: how many.
        report: told which block begins.
        ways: with drafts and without, unless others are given.

    Raises:
        RuntimeError: a request failed.
    """
    for number in range(plan.blocks + 1):
        report(f"block {number} of {plan.blocks}")
        asked = prompts[number * plan.requests : (number + 1) * plan.requests]
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            way.prepare()
            before, began = settled(engine), time.monotonic()
            _ask(engine, [_request(way, number, at, prompt, plan) for at, prompt in enumerate(asked)], traffic, number)
            after, seconds = settled(engine), time.monotonic() - began
            if number:
                yield Block(
                    way.name,
                    number,
                    after.completion_tokens - before.completion_tokens,
                    seconds,
                    after.busy_seconds - before.busy_seconds,
                    after.saved_seconds - before.saved_seconds,
                )


def _request(way: Way, number: int, at: int, prompt: tuple[int, ...], plan: Plan) -> Request:
    greedy = SamplingParams(temperature=0)
    name = f"{way.name}-{number}-{at}"
    return Request(name, prompt, plan.tokens, greedy, capture=way.drafted, speculate=way.drafted)


def _ask(engine: Engine, requests: Sequence[Request], traffic: Traffic, seed: int) -> None:
    """Send ``requests`` as ``traffic`` says and wait for every answer; the same ``seed`` has them come alike."""
    if traffic.rate is None:
        deque(updates_of(engine, requests, traffic.users), maxlen=0)
        return
    ends: queue.Queue[Update] = queue.Queue()
    gaps, begun = random.Random(seed), time.monotonic()  # noqa: S311 - no secret
    for request, moment in zip(requests, accumulate(gaps.expovariate(traffic.rate) for _ in requests), strict=True):
        time.sleep(max(begun + moment - time.monotonic(), 0.0))
        engine.submit(request, lambda update: ends.put(update) if update.finish_reason else None)
    for update in (ends.get() for _ in requests):
        if update.finish_reason == "error":
            raise RuntimeError(f"a request failed: {update.error}")


@dataclass(frozen=True)
class Found:
    """The ledger beside the clock, in shares of the busy seconds that plain decoding took.

    ``off`` is by how much the seconds with drafts and those that the ledger adds differ from the plain ones, all blocks
    together, ``by_block`` the same of each. ``speedup`` is of busy seconds a token.
    """

    off: float
    by_block: Quartiles
    speedup: Quartiles


def conclude(blocks: Sequence[Block]) -> Found:
    """Of blocks in both ways, by the token: answers may differ in bfloat16, where forwards of other sizes round."""
    plain = {block.number: block for block in blocks if block.way == PLAIN}
    drafted = {block.number: block for block in blocks if block.way == DRAFTED}
    pairs = [(mine, plain[number]) for number, mine in sorted(drafted.items())]
    said = sum(mine.said * other.tokens for mine, other in pairs)
    return Found(
        said / sum(other.busy_seconds for _, other in pairs) - 1,
        Quartiles.of([mine.said / other.took - 1 for mine, other in pairs]),
        Quartiles.of([other.took / mine.took for mine, other in pairs]),
    )


def table(found: Found) -> Grid:
    """The figures as a table."""
    grid = columns("", "all blocks", "median of blocks", "quartiles", "least to most")
    off, speed = found.by_block, found.speedup
    within = f"{off.lower:+.1%} to {off.upper:+.1%}"
    grid.add_row(
        "ledger off by", f"{found.off:+.1%}", f"{off.median:+.1%}", within, f"{off.least:+.1%} to {off.most:+.1%}"
    )
    within = f"{speed.lower:.2f} to {speed.upper:.2f}"
    grid.add_row("times plain", "", f"{speed.median:.2f}", within, f"{speed.least:.2f} to {speed.most:.2f}")
    return grid
