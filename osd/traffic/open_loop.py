"""Send prompts to an OpenAI endpoint as independent users would: open loop, Poisson or recorded arrivals.

A slow service does not slow the arrivals down; what it cannot take in time shows as latency and failures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from osd.traffic.arrivals import Arrival, poisson
from osd.traffic.prompt import Prompt


@dataclass(frozen=True)
class Load:
    """What is sent: ``rate`` conversations a second, for ``seconds`` or ``limit`` of them, whichever ends first.

    With neither, each prompt is sent once. ``seed`` fixes the arrival times. With ``arrivals`` it is these instead of
    ``rate``, ``max_tokens`` and ``seed`` that say when each conversation begins and how long its answers are. With
    ``store`` a service may learn from it whatever it does by default.
    """

    rate: float
    seconds: float | None = None
    limit: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    arrivals: tuple[Arrival, ...] | None = None
    ignore_eos: bool = False
    store: bool = False

    def starts(self, prompts: int) -> Iterable[Arrival]:
        """When each conversation begins, where each of ``prompts`` is sent once unless something else is asked for."""
        if self.arrivals is None:
            arrivals: Iterable[Arrival] = poisson(self.rate, self.max_tokens, self.seed)
            limit = self.limit if self.limit is not None or self.seconds is not None else prompts
        else:
            arrivals, limit = self.arrivals, self.limit
        for arrival in itertools.islice(arrivals, limit):
            if self.seconds is not None and arrival.due > self.seconds:
                return
            yield arrival


@dataclass
class Tally:
    """What became of the requests so far; latencies in seconds, of finished requests.

    ``gaps`` are the waits between two pieces of an answer, each of one token or of several; ``per_token`` is what a
    token after the first took on average, of each answer that has two.
    """

    sent: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    latency: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet."""
        return self.sent - self.finished - self.failed

    def figures(self) -> dict[str, float | int | None]:
        """Counts, and the median and the 99th percentile of each latency, None where there is none."""
        figures: dict[str, float | int | None] = {
            name: getattr(self, name) for name in ("sent", "finished", "failed", "tokens")
        }
        for name in ("latency", "first_token", "gaps", "per_token"):
            for percent in (50, 99):
                value = percentile(getattr(self, name), percent)
                figures[f"{name}_p{percent}"] = None if value is None else round(value, 4)
        return figures


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value that ``percent`` of 100 do not exceed, between two of them if need be; None of no values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Failed(Exception):
    """A request that did not end as it should."""


async def replay(
    prompts: Sequence[Prompt],
    url: str,
    load: Load,
    tally: Tally | None = None,
    *,
    api_key: str | None = None,
    on_change: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Send prompts, from the start again when the load needs more, until it is through and every answer is there.

    The service is at ``url``, without ``/v1``; ``api_key`` is its bearer token. ``tally`` counts on and can be looked
    at meanwhile; ``on_change`` is called after each request that begins or ends.
    """
    tally = Tally() if tally is None else tally
    async with client_of(url, api_key) as client, asyncio.TaskGroup() as conversations:
        start = time.monotonic()
        for prompt, arrival in zip(itertools.cycle(prompts), load.starts(len(prompts)), strict=False):
            await asyncio.sleep(max(0.0, start + arrival.due - time.monotonic()))
            conversations.create_task(converse(client, prompt, load, arrival.tokens, tally, on_change))
    return tally


def client_of(url: str, api_key: str | None) -> httpx2.AsyncClient:
    """A client of the service at ``url`` that waits long for answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=httpx2.Timeout(300, connect=10))


async def converse(
    client: httpx2.AsyncClient,
    prompt: Prompt,
    load: Load,
    max_tokens: int,
    tally: Tally,
    on_change: Callable[[Tally], None],
) -> bool:
    """Say each turn after the answer to the one before, and return whether all were answered.

    A failed turn ends the conversation.
    """
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if load.ignore_eos else {}),
            **({"store": True} if load.store else {}),
        }
        tally.sent += 1
        on_change(tally)
        begun = time.monotonic()
        try:
            answer, tokens, moments = await _ask(client, body)
        except (httpx2.HTTPError, httpx2.InvalidURL, _Failed) as error:
            tally.failed += 1
            tally.errors[str(error) or type(error).__name__] += 1
            return False
        else:
            tally.finished += 1
            tally.tokens += tokens
            tally.latency.append(time.monotonic() - begun)
            tally.first_token.append(moments[0] - begun)
            tally.gaps += (two - one for one, two in itertools.pairwise(moments))
            if tokens > 1:
                tally.per_token.append((moments[-1] - moments[0]) / (tokens - 1))
        finally:
            on_change(tally)
        messages.append({"role": "assistant", "content": answer})
    return True


async def _ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[str, int, list[float]]:
    """The answer, its tokens as the service counts them, and when each piece of it came.

    Raises:
        _Failed: the service refuses, or the stream ends early.
    """
    text, tokens, finished = "", None, False
    moments: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise _Failed(f"HTTP {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            try:
                event = json.loads(data)
                if "error" in event:
                    raise _Failed(f"stream: {event['error']['message']}")
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    moments.append(time.monotonic())
                    text += choice["delta"].get("content") or ""
                    finished = finished or choice["finish_reason"] is not None
            except (ValueError, LookupError, TypeError, AttributeError):
                raise _Failed("stream: an event is not what OpenAI's protocol says") from None
    if not finished or tokens is None or not moments:
        raise _Failed("stream: ended before the answer did")
    return text, tokens, moments
