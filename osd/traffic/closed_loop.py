"""Send prompts to an OpenAI endpoint as a few users do who wait for each answer before they ask again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx2

from osd.traffic.open_loop import Load, Tally, converse
from osd.traffic.prompt import Prompt


async def keep_asking(
    client: httpx2.AsyncClient,
    prompt: Callable[[], Awaitable[Prompt]],
    users: int,
    seconds: float,
    max_tokens: int,
    on_change: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Let so many ``users`` ask what ``prompt`` gives them, until no conversation is begun after ``seconds``.

    ``on_change`` is called after each request that begins or ends. Whose request fails asks no more.
    """
    tally, end = Tally(), time.monotonic() + seconds

    async def user() -> None:
        failed = tally.failed
        while time.monotonic() < end and tally.failed == failed:
            await converse(client, await prompt(), Load(1.0), max_tokens, tally, on_change)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return tally
