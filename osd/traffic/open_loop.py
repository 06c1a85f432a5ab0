"""Open-loop client of an OpenAI endpoint, with Poisson or recorded arrivals.

A slow service does not delay the arrivals; its overload shows as latency and failures.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from osd.addresses import uses_proxies
from osd.nesting import parse_json
from osd.traffic.arrivals import Arrival, poisson
from osd.traffic.prompt import Prompt


@dataclass(frozen=True)
class Load:
    """Rate, length and settings of a load.

    Attributes:
        rate: conversations per second.
        seconds: duration; the load ends at the first of ``seconds`` and ``limit``. With neither, each prompt is sent
            once.
        limit: number of conversations.
        max_tokens: most tokens of an answer.
        temperature: of each request.
        seed: of the arrival times.
        arrivals: recorded arrivals, which replace ``rate``, ``max_tokens`` and ``seed``.
        ignore_eos: whether answers continue to ``max_tokens``.
        store: whether the service may learn from the requests even if it does not by default.
        domain: domain of each request; None names no domain. The domains of prompts are not sent.
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
    domain: str | None = None

    def starts(self, prompts: int) -> Iterable[Arrival]:
        """Yield the start of each conversation.

        Without ``seconds`` and ``limit`` each of ``prompts`` prompts is sent once.
        """
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
    """Counts of requests, and latencies in seconds of finished requests.

    Attributes:
        sent: requests sent.
        finished: requests answered completely.
        failed: requests without a complete answer.
        tokens: tokens of all answers.
        latency: seconds from request to end.
        first_token: seconds from request to the first piece.
        gaps: seconds between two pieces of an answer, each of one or more tokens.
        per_token: mean seconds per token after the first, for each answer of at least two tokens.
        errors: number of failures by message.
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
        """Return the counts, and the median and the 99th percentile of each latency, None without values."""
        figures: dict[str, float | int | None] = {
            name: getattr(self, name) for name in ("sent", "finished", "failed", "tokens")
        }
        for name in ("latency", "first_token", "gaps", "per_token"):
            for percent in (50, 99):
                value = percentile(getattr(self, name), percent)
                figures[f"{name}_p{percent}"] = None if value is None else round(value, 4)
        return figures


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the value that ``percent`` of 100 do not exceed, interpolated if necessary; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Failed(Exception):
    """Failure of a request."""


async def replay(
    prompts: Sequence[Prompt],
    url: str,
    load: Load,
    tally: Tally | None = None,
    *,
    api_key: str | None = None,
    on_change: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Send prompts according to the load, cyclically if it needs more, and wait for all answers.

    Args:
        prompts: conversations to send.
        url: of the service, without ``/v1``.
        load: when and how to send.
        tally: counts to continue, which may be read during the call.
        api_key: bearer token of the service.
        on_change: called after each request that begins or ends.
    """
    tally = Tally() if tally is None else tally
    async with client_of(url, api_key) as client, asyncio.TaskGroup() as conversations:
        start = time.monotonic()
        for prompt, arrival in zip(itertools.cycle(prompts), load.starts(len(prompts)), strict=False):
            await asyncio.sleep(max(0.0, start + arrival.due - time.monotonic()))
            conversations.create_task(converse(client, prompt, load, arrival.tokens, tally, on_change))
    return tally


def client_of(url: str, api_key: str | None) -> httpx2.AsyncClient:
    """Return a client of the service at ``url`` with a long timeout for answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    timeout, trusts = httpx2.Timeout(300, connect=10), uses_proxies(url)
    return httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=trusts)


def fields_of(domain: str | None) -> dict[str, Any]:
    """Return the fields of a request that name its domain; none without a domain.

    The field ``osd`` also names domains that have no drafter yet, unlike the model name.
    """
    return {} if domain is None else {"osd": {"domain": domain}}


async def converse(
    client: httpx2.AsyncClient,
    prompt: Prompt,
    load: Load,
    max_tokens: int,
    tally: Tally,
    on_change: Callable[[Tally], None],
) -> bool:
    """Send each turn after the answer to the previous one; return whether all were answered.

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
            **fields_of(load.domain),
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
            tally.gaps += (later - earlier for earlier, later in itertools.pairwise(moments))
            if tokens > 1:
                tally.per_token.append((moments[-1] - moments[0]) / (tokens - 1))
        finally:
            on_change(tally)
        messages.append({"role": "assistant", "content": answer})
    return True


async def _ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[str, int, list[float]]:
    """Return the answer, its tokens as counted by the service, and the arrival time of each piece.

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
                event = parse_json(data)
                if "error" in event:
                    raise _Failed(f"stream: {event['error']['message']}")
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    moments.append(time.monotonic())
                    text += choice["delta"].get("content") or ""
                    finished = finished or choice["finish_reason"] is not None
            except (ValueError, LookupError, TypeError, AttributeError):
                raise _Failed("stream: an event does not follow OpenAI's protocol") from None
    if not finished or tokens is None or not moments:
        raise _Failed("stream: ended before the answer did")
    return text, tokens, moments
