"""Requests sent to an engine at once."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from osd.engine.engine import Engine
from osd.engine.request import Request, Update


def seconds_of(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds until every one of ``requests``, sent at once, is answered.

    Raises:
        RuntimeError: one of them failed.
    """
    updates: queue.Queue[Update] = queue.Queue()
    begun = time.perf_counter()
    for request in requests:
        engine.submit(request, updates.put)
    left = len(requests)
    while left:
        update = updates.get()
        if update.finish_reason == "error":
            raise RuntimeError(f"a request failed: {update.error}")
        left -= update.finish_reason is not None
    return time.perf_counter() - begun
