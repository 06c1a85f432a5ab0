"""Requests sent to an engine, and the updates that come back."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from osd.cli.common import RunError
from osd.engine.counters import EngineCounters
from osd.engine.engine import Engine
from osd.engine.request import Request, TokenLogprobs, Update
from osd.metrics import SpeculationCounts

TokenTimes = dict[str, list[tuple[float, int]]]
"""Token counts of each request by id: (seconds after sending, number of tokens) for each update."""

_LOOK_SECONDS = 0.001


def decode(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    """Decode ``requests``, all sent at once, and return the seconds until the last token and the tokens of each answer.

    Raises:
        RunError: a request failed.
    """
    answers: dict[str, list[int]] = defaultdict(list)
    seconds = 0.0
    for moment, update in updates_of(engine, requests):
        answers[update.request_id] += update.token_ids
        seconds = moment
    return seconds, [answers[request.id] for request in requests]


@dataclass
class RequestResult:
    """Answer to one request and its draft counts."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def gaps(self) -> list[float]:
        """Differences of log-probability between the two most probable tokens at each position with ``logprobs``."""
        tops = [position.top for position in self.logprobs]
        return [top[0][1] - top[1][1] for top in tops]


def answers_of(
    engine: Engine, requests: Sequence[Request], on_first: Callable[[], None] = lambda: None
) -> dict[str, RequestResult]:
    """Send ``requests`` at once, wait for every answer and return the results by request id.

    ``on_first`` is called once, at the first update.

    Raises:
        RunError: a request failed.
    """
    results, is_started = {request.id: RequestResult() for request in requests}, False
    for _, update in updates_of(engine, requests):
        if not is_started:
            is_started = True
            on_first()
        result = results[update.request_id]
        result.tokens += update.token_ids
        result.text += update.text
        result.logprobs += update.logprobs
        result.counts = update.counts or result.counts
    return results


def wait_until_idle(engine: Engine) -> EngineCounters:
    """Wait until a running engine has no work left, and return its counters."""
    while not engine.is_idle:
        time.sleep(_LOOK_SECONDS)
    return engine.counters()


def decoding_rate(arrivals: TokenTimes) -> float:
    """Return tokens per second between the last request's first token and the first request's last token.

    The result is 0 if the requests were never decoded together.
    """
    begin = max(moments[0][0] for moments in arrivals.values())
    end = min(moments[-1][0] for moments in arrivals.values())
    count = sum(count for moments in arrivals.values() for moment, count in moments if begin < moment <= end)
    return count / (end - begin) if end > begin else 0.0


def updates_of(
    engine: Engine, requests: Sequence[Request], users: int | None = None, patience: float | None = None
) -> Iterator[tuple[float, Update]]:
    """Send ``requests`` and yield every update with the seconds since the start, until all requests have finished.

    With ``users``, each user waits for an answer before the next request; None sends all requests at once.

    Raises:
        RunError: a request failed.
        queue.Empty: no update came for ``patience`` seconds.
    """
    updates: queue.Queue[tuple[float, Update]] = queue.Queue()
    waiting, start = iter(requests), time.perf_counter()

    def send(count: int | None) -> None:
        for request in islice(waiting, count):
            engine.submit(request, lambda update: updates.put((time.perf_counter() - start, update)))

    send(users)
    unfinished = len(requests)
    while unfinished:
        moment, update = updates.get(timeout=patience)
        if update.finish_reason == "error":
            raise RunError(f"a request failed: {update.error}")
        yield moment, update
        if update.finish_reason is not None:
            unfinished -= 1
            send(1)
