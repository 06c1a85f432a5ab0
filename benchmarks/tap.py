"""What a tap adds to the first token: the same streams to a server that answers at once, directly and through a tap."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.report import columns
from benchmarks.tap_processes import MODEL, tap, upstream
from osd.capture.server import RedisServer, free_port

DIRECT, TAPPED = "direct", "tapped"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """In each turn every number of ``users`` asks ``rounds`` times each, for so many ``events``."""

    users: tuple[int, ...]
    rounds: int
    events: int
    turns: int


@dataclass(frozen=True)
class Block:
    """Requests of ``users`` at once in one ``way``: medians of the seconds to the first event, and to the last."""

    way: str
    users: int
    turn: int
    first: float
    last: float


def measure(plan: Plan, report: Callable[[str], None] = lambda step: None) -> Iterator[Block]:
    """Ask in both ways; the ways take turns, as does which begins. Server and tap are processes of their own.

    Raises:
        RuntimeError: one of them does not start.
    """
    with RedisServer(64) as redis, _beside(upstream) as url, _beside(tap, url, redis.url) as tapped:
        addresses = {DIRECT: url, TAPPED: tapped}
        asyncio.run(_turn(url, 1, plan))  # what is made once is not measured
        asyncio.run(_turn(tapped, 1, plan))
        for turn in range(plan.turns):
            report(f"turn {turn + 1} of {plan.turns}")
            for users in plan.users:
                for way in (DIRECT, TAPPED) if turn % 2 == 0 else (TAPPED, DIRECT):
                    first, last = asyncio.run(_turn(addresses[way], users, plan))
                    yield Block(way, users, turn, first, last)


def table(blocks: Sequence[Block]) -> Grid:
    """Both ways beside each other, in milliseconds."""
    grid = columns("users", "first event, direct", "tapped", "added", "last event, added")
    for users in sorted({block.users for block in blocks}):
        of = {way: [one for one in blocks if one.users == users and one.way == way] for way in (DIRECT, TAPPED)}
        first = {way: Spread.of([one.first for one in found]) for way, found in of.items()}
        pairs = list(zip(of[DIRECT], of[TAPPED], strict=True))
        added = Spread.of([tapped.first - direct.first for direct, tapped in pairs])
        last = Spread.of([tapped.last - direct.last for direct, tapped in pairs])
        cells = [first[DIRECT], first[TAPPED], added, last]
        grid.add_row(str(users), *(cell.text(1000) for cell in cells))
    return grid


async def _turn(url: str, users: int, plan: Plan) -> tuple[float, float]:
    async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
        found = await asyncio.gather(*(_user(client, plan) for _ in range(users)))
    times = [one for each in found for one in each]
    return statistics.median([first for first, _ in times]), statistics.median([last for _, last in times])


async def _user(client: httpx2.AsyncClient, plan: Plan) -> list[tuple[float, float]]:
    messages = [{"role": "user", "content": "word " * 200}]
    body = {"model": MODEL, "stream": True, "messages": messages, "max_tokens": plan.events}
    times: list[tuple[float, float]] = []
    for _ in range(plan.rounds):
        begun, first = time.perf_counter(), 0.0
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                first = first or time.perf_counter() - begun
        times.append((first, time.perf_counter() - begun))
    return times


@contextmanager
def _beside(run: Callable[..., None], *given: str) -> Generator[str]:
    """A process that answers at an address."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    process = context.Process(target=run, args=(port, *given), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(url):
            if time.monotonic() > deadline or not process.is_alive():
                raise RuntimeError("a process that is measured does not start")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.join(10)


def _answers(url: str) -> bool:
    try:
        httpx2.post(f"{url}/", json={"max_tokens": 1}, timeout=5)
    except httpx2.HTTPError:
        return False
    return True
