"""Threads for what the event loop must not wait for: tokenizers, and the planning of trees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

LONG = 16_384
"""Characters, or tokens, from which on a text is a long one: it takes some 20 ms."""

Result = TypeVar("Result")


class Tokenizing:
    """Two threads: long texts wait for each other in one of their own, and short ones never for them."""

    def __init__(self) -> None:
        self._short, self._long = (ThreadPoolExecutor(1, f"tokenize-{length}") for length in ("short", "long"))

    async def run(self, size: int, call: Callable[..., Result], *arguments: object) -> Result:
        """What ``call`` returns for a text of ``size`` characters or tokens."""
        thread = self._short if size < LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *arguments))
