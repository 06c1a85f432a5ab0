"""Seed prompts for a target without traffic: its own, and given prompts outside the held-out ones.

They alternate: the target writes a prompt by continuing its chat template where a user's message begins (Xu et al.,
"Magpie", ICLR 2025); then a given prompt follows.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import httpx2
from transformers import PreTrainedTokenizerBase

from osd.traffic import SOURCES, load
from osd.traffic.open_loop import Load, Tally, converse
from osd.traffic.prompt import HELD_OUT, Prompt, shuffled, split

_USERS = 4
_TOKENS = 96  # of an answer
_AT_ONCE = 8  # prompts that the target writes in one request
_MOST_FAILURES = 8  # consecutive failures after which a user stops
_MARK = "\N{SYMBOL FOR START OF TEXT}"


def load_prompts(file: str | None) -> list[Prompt]:
    """Return the prompts of a file, or the built-in ones without those held out for measurements.

    Raises:
        TrafficError: the file cannot be used.
    """
    if file is not None:
        return load(file)
    return shuffled(prompt for source in SOURCES.values() for prompt in split(source(), HELD_OUT)[0])


def user_opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the chat template puts before a user's first message, empty if it has no place for one."""
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    before, mark, _ = text.partition(_MARK)
    return tokenizer(before, add_special_tokens=False).input_ids if mark else []


async def keep_asking(
    client: httpx2.AsyncClient,
    prompt: Callable[[], Awaitable[Prompt]],
    users: int,
    seconds: float,
    max_tokens: int,
    on_change: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Send prompts as ``users`` who wait for each answer; no conversation starts after ``seconds``.

    The requests permit the service to learn from them (``store``). ``on_change`` is called after each request that
    starts or ends. After a failed conversation a user continues with the next prompt. A user stops after eight
    consecutive failures of its own.
    """
    tally, end = Tally(), time.monotonic() + seconds

    async def user() -> None:
        failed = 0
        while time.monotonic() < end and failed < _MOST_FAILURES:
            answered = await converse(client, await prompt(), Load(1.0, store=True), max_tokens, tally, on_change)
            failed = 0 if answered else failed + 1

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return tally


class Seeds:
    """Source of prompts, alternately written by the target and from ``prompts``.

    ``written`` counts the prompts that were requested from the target.
    """

    def __init__(self, client: httpx2.AsyncClient, opening: list[int], prompts: Iterable[Prompt]) -> None:
        """Let the service behind ``client`` continue the tokens ``opening``; it writes no prompts if they are empty."""
        self.written = 0
        self._client, self._opening = client, opening
        self._prompts = itertools.cycle(prompts)
        self._ready: deque[str] = deque()
        self._writes = False

    async def answer(self, seconds: float, on_change: Callable[[Tally], None]) -> Tally:
        """Send prompts for ``seconds``, a few at a time, and return the counts; see ``keep_asking``."""
        return await keep_asking(self._client, self.next, _USERS, seconds, _TOKENS, on_change)

    async def next(self) -> Prompt:
        """Return a prompt written by the target, or a given prompt, in turn; the target writes several at a time."""
        self._writes = not self._writes and bool(self._opening)
        if self._writes:
            if not self._ready:
                await self._write()
            if self._ready:
                text = self._ready.popleft()
                return Prompt(text[:32], "warm-up", (text,))
        return next(self._prompts)

    async def _write(self) -> None:
        self.written += _AT_ONCE
        body = {"prompt": self._opening, "max_tokens": _TOKENS, "temperature": 1, "n": _AT_ONCE, "store": False}
        response = await self._client.post("/v1/completions", json=body)
        if response.status_code == 200:
            texts = (choice["text"].strip() for choice in response.json()["choices"])
            self._ready.extend(text for text in texts if text)
