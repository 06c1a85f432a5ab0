"""Repeated calls while vLLM's server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only


async def repeat(call: Callable[[], Awaitable[object]], seconds: float, failure: str) -> None:
    """Call a function until the task is cancelled, with pauses of ``seconds``; log the first error of a series.

    ``failure`` says in the log what does not happen after an error.
    """
    failing = False
    while True:
        try:
            await call()
            failing = False
        except Exception as error:  # the registry, Redis or vLLM fails: try again
            if not failing:
                log.warning("%s for now: %s", failure, " ".join(str(error).split()))
            failing = True
        await asyncio.sleep(seconds)
