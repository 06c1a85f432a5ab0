"""Requests sent to an engine at once."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from osd.engine.counters import EngineCounters
from osd.engine.engine import Engine
from osd.engine.request import Request, TokenLogprobs, Update
from osd.metrics import SpeculationCounts

Arrivals = dict[str, list[tuple[float, int]]]
"""Of each request, when tokens came, in seconds from the sending on, and how many at that moment."""

_LOOK_SECONDS = 0.001


def decode(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    """Seconds until every one of ``requests``, sent at once, is answered, and the tokens of each answer.

    Raises:
        RuntimeError: one of them failed.
    """
    answers: dict[str, list[int]] = defaultdict(list)
    last = 0.0
    for moment, update in updates_of(engine, requests):
        answers[update.request_id] += update.token_ids
        last = moment
    return last, [answers[request.id] for request in requests]


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def gaps(self) -> list[float]:
        """How far apart the two most probable tokens at each place are, in log-probability, where both are reported."""
        tops = [place.top for place in self.logprobs]
        return [top[0][1] - top[1][1] for top in tops]


def answers_of(
    engine: Engine, requests: Sequence[Request], meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Answer]:
    """Send ``requests`` at once and wait for every answer; by the requests' ids.

    ``meanwhile`` is called once, when the first of them has begun.

    Raises:
        RuntimeError: one of them failed.
    """
    found, begun = {request.id: Answer() for request in requests}, False
    for _, update in updates_of(engine, requests):
        if not begun:
            begun = True
            meanwhile()
        answer = found[update.request_id]
        answer.tokens += update.token_ids
        answer.text += update.text
        answer.logprobs += update.logprobs
        answer.counts = update.counts or answer.counts
    return found


def settled(engine: Engine) -> EngineCounters:
    """What a running engine has counted when it has nothing left to do."""
    while not engine.is_idle:
        time.sleep(_LOOK_SECONDS)
    return engine.counters()


def decoding_rate(arrivals: Arrivals) -> float:
    """Return tokens per second from the moment when the last request had begun until the first one ended."""
    begin = max(moments[0][0] for moments in arrivals.values())
    end = min(moments[-1][0] for moments in arrivals.values())
    count = sum(count for moments in arrivals.values() for moment, count in moments if begin < moment <= end)
    return count / (end - begin) if end > begin else 0.0


def updates_of(
    engine: Engine, requests: Sequence[Request], users: int | None = None, patience: float | None = None
) -> Iterator[tuple[float, Update]]:
    """Send ``requests`` at once, or as so many ``users`` do who wait for an answer before they ask again.

    Yields every update with the seconds since then, until all have ended.

    Raises:
        RuntimeError: one of them failed.
        queue.Empty: nothing came for ``patience`` seconds.
    """
    updates: queue.Queue[tuple[float, Update]] = queue.Queue()
    later, begun = iter(requests), time.perf_counter()

    def send(count: int | None) -> None:
        for request in islice(later, count):
            engine.submit(request, lambda update: updates.put((time.perf_counter() - begun, update)))

    send(users)
    left = len(requests)
    while left:
        moment, update = updates.get(timeout=patience)
        if update.finish_reason == "error":
            raise RuntimeError(f"a request failed: {update.error}")
        yield moment, update
        if update.finish_reason is not None:
            left -= 1
            send(1)
