"""Polling of conditions, and calls in threads. The deadline of a wait only ends a hang, so it is long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

HANG_SECONDS = 300.0


def wait_until(
    condition: Callable[[], Any], seconds: float = HANG_SECONDS, *, every: float = 0.02, what: str = "the condition"
) -> Any:
    """Call ``condition`` until its value is true, and return the value.

    Raises:
        AssertionError: ``what`` did not happen within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} seconds"
        time.sleep(every)
    return value


def together(call: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Call ``call`` with each of ``values``, all in parallel threads; return the results or raise the error."""
    with ThreadPoolExecutor(max_workers=len(items := list(values))) as pool:
        return list(pool.map(call, items))


@contextmanager
def background(run: Callable[[], Any], end: Callable[[], Any], threads: int = 1) -> Iterator[None]:
    """Call ``run`` in threads during the context; at its end call ``end``, wait, and raise an error of ``run``."""
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(run) for _ in range(threads)]
        try:
            yield
        finally:
            end()
    for call in calls:
        call.result()
