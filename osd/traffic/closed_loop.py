"""Send prompts to an OpenAI endpoint as a few users do who wait for each answer before they ask again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx2

from osd.traffic.open_loop import Load, Tally, converse
from osd.traffic.prompt import Prompt

_IN_VAIN = 8
"""Conversations in a row that fail before a user asks no more."""


async def keep_asking(
    client: httpx2.AsyncClient,
    prompt: Callable[[], Awaitable[Prompt]],
    users: int,
    seconds: float,
    max_tokens: int,
    on_change: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Let so many ``users`` ask what ``prompt`` gives them, until no conversation is begun after ``seconds``.

    The service may learn from all of it.

    ``on_change`` is called after each request that begins or ends. A user whose conversation fails goes on with the
    next prompt, and asks no more after eight that failed in a row.
    """
    tally, end = Tally(), time.monotonic() + seconds

    async def user() -> None:
        failed = 0
        while time.monotonic() < end and failed < _IN_VAIN:
            answered = await converse(client, await prompt(), Load(1.0, store=True), max_tokens, tally, on_change)
            failed = 0 if answered else failed + 1

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return tally
