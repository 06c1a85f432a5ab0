"""``osd bench http``: overhead of HTTP, Ray and JSON over an engine in this process."""

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
from deploy.cli.starts import start_errors
from deploy.embedded import Embedded
from osd.cli.common import ConfigFile, Overrides, RunError, key_of, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
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
        typer.Option(min=1, help="Number of concurrent users; repeat the option for several. 1, 8 and 64 by default."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per user and turn.")] = 2,
    tokens: Tokens = 64,
    turns: Turns = 7,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the tokens per second and first-token delay that HTTP, Ray and JSON cost.

    The same requests go to a service over HTTP, and without HTTP to an engine in this process. Both decode plainly,
    greedily and past the end of answers, so that they do the same work.
    """
    settings = settings_of(config, [*(overrides or []), *_PLAIN])
    check_files(json_file)
    user_counts = tuple(users or _USERS)
    plan = HttpPlan(user_counts, requests, tokens, turns)
    with loading():
        texts = load(prompts)[: max(user_counts) * requests]
        engine, _ = plain_engine(settings)
    with ExitStack() as stack:
        stack.enter_context(start_errors())
        stack.enter_context(running(engine))
        url = stack.enter_context(Embedded(settings, say)).url
        blocks = list(measure(engine, url, key_of(settings), texts, plan))
    about = {"target": settings.target.source, "prompts": prompts, "tokens": tokens, "requests": requests}
    conclude([table(blocks)], {**about, "blocks": [asdict(block) for block in blocks]}, json_file)


@dataclass(frozen=True)
class HttpPlan:
    """Size of the measurement: each user sends ``rounds`` requests for ``tokens`` tokens in a turn."""

    users: tuple[int, ...]
    rounds: int
    tokens: int
    turns: int


@dataclass(frozen=True)
class LoadBlock:
    """Requests of ``users`` concurrent users in one way; each user waits for an answer before the next request."""

    way: str  # HTTP or PROCESS
    users: int  # number of users
    turn: int  # number of the turn
    first_token: float  # median seconds until a request's first token
    rate: float  # tokens per second of all users


def measure(
    engine: Engine, url: str, api_key: str | None, prompts: Sequence[Prompt], plan: HttpPlan
) -> Iterator[LoadBlock]:
    """Send the requests of each block in both ways, in turns; prompts are taken in order and repeated from the start.

    The running ``engine`` has the settings of a replica. Only the first turn of a prompt is sent.

    Raises:
        BenchError: a prompt is too long.
        RunError: a request fails or returns too few tokens.
    """
    limit = engine.target.context - plan.tokens
    ids = encode(engine.tokenizer, prompts, limit)
    if len(ids) < len(prompts):
        raise BenchError(f"a prompt has more than the {limit} tokens that engine.context leaves")

    def run_block(users: int, way: str, turn: int) -> LoadBlock:
        count = users * plan.rounds
        indices = [(turn * count + n) % len(prompts) for n in range(count)]
        if way == HTTP:
            texts = [prompts[n] for n in indices]
            first, seconds = asyncio.run(over_http(url, api_key, texts, users, plan.tokens))
        else:
            first, seconds = _in_process(engine, [ids[n] for n in indices], users, plan.tokens)
        return LoadBlock(way, users, turn, statistics.median(first), count * plan.tokens / seconds)

    for users in plan.users:
        say(f"{users} users")
        for _, block in in_turns({way: partial(run_block, users, way) for way in (HTTP, PROCESS)}, plan.turns, say):
            yield block


async def over_http(
    url: str, api_key: str | None, prompts: Sequence[Prompt], users: int, tokens: int
) -> tuple[list[float], float]:
    """Return the seconds until each request's first token, and the seconds until ``users`` users have all answers.

    Creating the client takes 30 ms and is not measured.

    Raises:
        RunError: a request fails, or the answers do not have ``tokens`` tokens each.
    """
    tally, waiting, load = Tally(), iter(prompts), Load(1.0, ignore_eos=True)
    async with client_of(url, api_key) as client:

        async def user() -> None:
            for prompt in waiting:
                await converse(client, replace(prompt, turns=prompt.turns[:1]), load, tokens, tally, lambda tally: None)

        start = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        seconds = time.perf_counter() - start
    if tally.failed or tally.tokens != len(prompts) * tokens:
        error = next(iter(tally.errors), f"{tally.tokens} tokens instead of {len(prompts) * tokens}")
        raise RunError(f"{tally.failed} requests failed: {error}")
    return tally.first_token, seconds


def _in_process(
    engine: Engine, prompts: Sequence[tuple[int, ...]], users: int, tokens: int
) -> tuple[list[float], float]:
    greedy = SamplingParams(temperature=0)
    requests = [Request(str(at), prompt, tokens, greedy, ignore_eos=True) for at, prompt in enumerate(prompts)]
    sent, first = [0.0] * users, {}  # the end of an answer is the start of the next request
    for moment, update in updates_of(engine, requests, users):
        if update.token_ids:
            first.setdefault(int(update.request_id), moment)
        if update.finish_reason:
            sent.append(moment)
    return [first[at] - sent[at] for at in range(len(requests))], sent[-1]


def table(blocks: Sequence[LoadBlock]) -> Table:
    """Return a table with a row for each number of users."""
    names = ("tokens/s in process", "over HTTP", "of in process", "first token later by, ms")
    table = Table("", ("users", *names), [])
    for users, group in itertools.groupby(blocks, lambda block: block.users):
        of_users = list(group)
        http, process = ([block for block in of_users if block.way == way] for way in (HTTP, PROCESS))
        rates = [block.rate for block in http], [block.rate for block in process]
        delays = [a.first_token - b.first_token for a, b in zip(http, process, strict=True)]
        cells = (Spread.of(rates[1]).text(digits=1), Spread.of(rates[0]).text(digits=1))
        table.rows.append((str(users), *cells, ratios(*rates).text(digits=3), Spread.of(delays).text(1e3, 1)))
    return table
