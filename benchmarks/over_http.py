"""What the way over HTTP costs: the same requests to a service and to an engine in this process, in turns."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.pair import BenchError, encode
from benchmarks.report import columns
from benchmarks.streams import updates_of
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.traffic.open_loop import Load, Tally, client_of, converse
from osd.traffic.prompt import Prompt

HTTP, PROCESS = "http", "process"


@dataclass(frozen=True)
class Plan:
    """In each turn every number of ``users`` asks ``rounds`` times each, for ``tokens`` tokens."""

    users: tuple[int, ...]
    rounds: int
    tokens: int
    turns: int


@dataclass(frozen=True)
class Block:
    """Requests of ``users`` who each wait for an answer before they ask again, in one ``way``.

    ``first_token`` is the median of the seconds until a request's first token, ``rate`` all tokens a second.
    """

    way: str
    users: int
    turn: int
    first_token: float
    rate: float


def measure(
    engine: Engine,
    url: str,
    api_key: str | None,
    prompts: Sequence[Prompt],
    plan: Plan,
    report: Callable[[str], None] = lambda step: None,
) -> Iterator[Block]:
    """Send the requests of each block in both ways; the ways take turns, as does which begins.

    Args:
        engine: running, as each replica of the service has it.
        url: of the service.
        api_key: of it, where it wants one.
        prompts: of which the first turns are asked, in order and from the start again.
        plan: how many requests.
        report: told which block begins.

    Raises:
        BenchError: a prompt is too long, or the service refuses a request or ends it too soon.
        RuntimeError: the engine fails.
    """
    longest = engine.settings.engine.context - plan.tokens
    ids = encode(engine.tokenizer, prompts, longest)
    if len(ids) < len(prompts):
        raise BenchError(f"a prompt has more than the {longest} tokens that engine.context has beside the answer")
    asked = itertools.cycle(zip(prompts, ids, strict=True))
    for turn in range(plan.turns + 1):  # the first warms up
        for users in plan.users:
            report(f"turn {turn} of {plan.turns}, {users} users")
            block = list(itertools.islice(asked, users * plan.rounds))
            for way in (HTTP, PROCESS) if turn % 2 else (PROCESS, HTTP):
                if way == HTTP:
                    texts = [prompt for prompt, _ in block]
                    first, seconds = asyncio.run(over_http(url, api_key, texts, users, plan.tokens))
                else:
                    first, seconds = _in_process(engine, [ids for _, ids in block], users, plan.tokens)
                if turn:
                    yield Block(way, users, turn, statistics.median(first), len(block) * plan.tokens / seconds)


async def over_http(
    url: str, api_key: str | None, prompts: Sequence[Prompt], users: int, tokens: int
) -> tuple[list[float], float]:
    """Seconds until the first token of each request, and of all, as ``users`` ask who each wait for an answer.

    Making the client, which takes 30 ms, is no part of it.

    Raises:
        BenchError: a request fails, or has not so many ``tokens``.
    """
    tally, left, load = Tally(), iter(prompts), Load(1.0, ignore_eos=True)
    async with client_of(url, api_key) as client:

        async def user() -> None:
            for prompt in left:
                await converse(client, replace(prompt, turns=prompt.turns[:1]), load, tokens, tally, lambda tally: None)

        begun = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        seconds = time.perf_counter() - begun
    if tally.failed or tally.tokens != len(prompts) * tokens:
        error = next(iter(tally.errors), f"{tally.tokens} tokens instead of {len(prompts) * tokens}")
        raise BenchError(f"{tally.failed} requests failed: {error}")
    return tally.first_token, seconds


def _in_process(
    engine: Engine, prompts: Sequence[tuple[int, ...]], users: int, tokens: int
) -> tuple[list[float], float]:
    greedy = SamplingParams(temperature=0)
    requests = [Request(str(at), prompt, tokens, greedy, ignore_eos=True) for at, prompt in enumerate(prompts)]
    sent, first = [0.0] * users, {}  # who has an answer sends the next request
    for moment, update in updates_of(engine, requests, users):
        if update.token_ids:
            first.setdefault(int(update.request_id), moment)
        if update.finish_reason:
            sent.append(moment)
    return [first[at] - sent[at] for at in range(len(requests))], sent[-1]


def table(blocks: Sequence[Block]) -> Grid:
    """For each number of users the medians over turns, with the least and the most."""
    grid = columns("users", "tokens/s in process", "over HTTP", "of in process", "first token later by, ms")
    for users in sorted({block.users for block in blocks}):
        http, process = (
            [block for block in blocks if (block.users, block.way) == (users, way)] for way in (HTTP, PROCESS)
        )
        pairs = list(zip(http, process, strict=True))
        grid.add_row(
            str(users),
            Spread.of([block.rate for block in process]).text(digits=1),
            Spread.of([block.rate for block in http]).text(digits=1),
            Spread.of([mine.rate / other.rate for mine, other in pairs]).text(digits=3),
            Spread.of([mine.first_token - other.first_token for mine, other in pairs]).text(1e3, 1),
        )
    return grid
