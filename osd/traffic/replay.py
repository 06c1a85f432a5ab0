"""Send prompts to an OpenAI endpoint as independent users would: open loop, Poisson arrivals.

A slow service does not slow the arrivals down; what it cannot take in time shows as latency and failures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from osd.traffic.prompt import Prompt


@dataclass(frozen=True)
class Load:
    """What is sent: ``rate`` conversations a second, for ``seconds`` or ``limit`` of them, whichever ends first.

    With neither, each prompt is sent once. ``seed`` fixes the arrival times.
    """

    rate: float
    seconds: float | None = None
    limit: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Tally:
    """What became of the requests so far; latencies in seconds, of finished requests."""

    sent: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    latency: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet."""
        return self.sent - self.finished - self.failed


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
    """Send prompts until the load is through and every answer is there.

    Args:
        prompts: taken in order, and from the start again when the load needs more.
        url: of the service, without ``/v1``.
        load: how many, how fast, how long.
        tally: counted on, to be looked at meanwhile.
        api_key: sent as bearer token.
        on_change: called after each request that begins or ends.
    """
    tally = Tally() if tally is None else tally
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx2.Timeout(300, connect=10)
    limit = load.limit if load.limit is not None or load.seconds is not None else len(prompts)
    arrivals = random.Random(load.seed)  # noqa: S311 - arrival times, not secrets
    async with (
        httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout) as client,
        asyncio.TaskGroup() as conversations,
    ):
        start, due = time.monotonic(), 0.0
        for count, prompt in enumerate(itertools.cycle(prompts)):
            due += arrivals.expovariate(load.rate)
            if (limit is not None and count >= limit) or (load.seconds is not None and due > load.seconds):
                break
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            conversations.create_task(_converse(client, prompt, load, tally, on_change))
    return tally


async def _converse(
    client: httpx2.AsyncClient, prompt: Prompt, load: Load, tally: Tally, on_change: Callable[[Tally], None]
) -> None:
    """Say each turn after the answer to the one before; a failed turn ends the conversation."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        body = {
            "messages": messages,
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tally.sent += 1
        on_change(tally)
        begun = time.monotonic()
        try:
            answer, tokens, first_token = await _ask(client, body)
        except (httpx2.HTTPError, httpx2.InvalidURL, _Failed) as error:
            tally.failed += 1
            tally.errors[str(error) or type(error).__name__] += 1
            return
        else:
            tally.finished += 1
            tally.tokens += tokens
            tally.latency.append(time.monotonic() - begun)
            tally.first_token.append(first_token - begun)
        finally:
            on_change(tally)
        messages.append({"role": "assistant", "content": answer})


async def _ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[str, int, float]:
    """The answer, its tokens as the service counts them, and when the first of it came.

    Raises:
        _Failed: the service refuses, or the stream ends early.
    """
    text, tokens, first_token, finished = "", None, None, False
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
                    first_token = first_token or time.monotonic()
                    text += choice["delta"].get("content") or ""
                    finished = finished or choice["finish_reason"] is not None
            except (ValueError, LookupError, TypeError, AttributeError):
                raise _Failed("stream: an event is not what OpenAI's protocol says") from None
    if not finished or tokens is None or first_token is None:
        raise _Failed("stream: ended before the answer did")
    return text, tokens, first_token
