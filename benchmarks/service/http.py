"""``osd bench http``: overhead of a service's HTTP, Ray and JSON over an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated

import typer

from benchmarks.engines import BenchError, encode, loading, plain_engine, running
from benchmarks.options import Prompts, Tokens, Turns
from benchmarks.streams import updates_of
from benchmarks.turns import Spread, in_turns, ratios
from deploy.assembly import START_ERRORS
from deploy.embedded import Embedded
from osd.cli.common import ConfigFile, Overrides, fail, key_of, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.traffic import load
from osd.traffic.open_loop import Load, Tally, client_of, converse
from osd.traffic.prompt import Prompt

HTTP, PROCESS = "http", "process"
_USERS = (1, 8, 64)
_PLAIN = ["drafter.kind=none", "trainer.enabled=false", "serving.replicas=1"]


def http(
    prompts: Prompts = "unittest",
    users: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Users who ask at the same time; may be given again. 1, 8 and 64 by default."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each user in a turn.")] = 2,
    tokens: Tokens = 64,
    turns: Turns = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure what HTTP, Ray and JSON add to the engine's time.

    Both decode plainly, greedily and past the end of answers, so that they do the same work.
    """
    settings = settings_of(config, [*(overrides or []), *_PLAIN])
    check_files(json_file)
    numbers = tuple(users or _USERS)
    plan = Plan(numbers, requests, tokens, turns)
    with loading():
        texts = load(prompts)[: max(numbers) * requests]
        engine, _ = plain_engine(settings)
    with ExitStack() as ends:
        ends.enter_context(running(engine))
        try:
            url = ends.enter_context(Embedded(settings, say)).url
        except START_ERRORS as error:
            fail(error)
        found = list(measure(engine, url, key_of(settings), texts, plan))
    about = {"target": settings.target.source, "prompts": prompts, "tokens": tokens, "requests": requests}
    conclude([table(found)], {**about, "blocks": [asdict(block) for block in found]}, json_file)


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


def measure(engine: Engine, url: str, api_key: str | None, prompts: Sequence[Prompt], plan: Plan) -> Iterator[Block]:
    """Send the requests of each block in both ways, in turns.

    Args:
        engine: Running, as each replica of the service has it.
        url: Address of the service.
        api_key: Its key, where it asks for one.
        prompts: Their first turns are sent, in order and from the start again.
        plan: Numbers of users, requests and turns.

    Raises:
        BenchError: a prompt is too long, or the service refuses a request or ends it too soon.
        RuntimeError: the engine fails.
    """
    longest = engine.settings.engine.context - plan.tokens
    ids = encode(engine.tokenizer, prompts, longest)
    if len(ids) < len(prompts):
        raise BenchError(f"a prompt has more than the {longest} tokens that engine.context leaves for it")

    def block(users: int, way: str, turn: int) -> Block:
        count = users * plan.rounds
        asked = [(turn * count + n) % len(prompts) for n in range(count)]
        if way == HTTP:
            texts = [prompts[n] for n in asked]
            first, seconds = asyncio.run(over_http(url, api_key, texts, users, plan.tokens))
        else:
            first, seconds = _in_process(engine, [ids[n] for n in asked], users, plan.tokens)
        return Block(way, users, turn, statistics.median(first), count * plan.tokens / seconds)

    for users in plan.users:
        say(f"{users} users")
        for _, found in in_turns({way: partial(block, users, way) for way in (HTTP, PROCESS)}, plan.turns, say):
            yield found


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


def table(blocks: Sequence[Block]) -> Table:
    """Make a table with a row for each number of users."""
    names = ("tokens/s in process", "over HTTP", "of in process", "first token later by, ms")
    table = Table("", ("users", *names), [])
    for users, mine in itertools.groupby(blocks, lambda block: block.users):
        both = list(mine)
        http, process = ([block for block in both if block.way == way] for way in (HTTP, PROCESS))
        rates = [block.rate for block in http], [block.rate for block in process]
        later = [a.first_token - b.first_token for a, b in zip(http, process, strict=True)]
        cells = (Spread.of(rates[1]).text(digits=1), Spread.of(rates[0]).text(digits=1))
        table.rows.append((str(users), *cells, ratios(*rates).text(digits=3), Spread.of(later).text(1e3, 1)))
    return table
