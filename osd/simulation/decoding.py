"""A replica that decodes: continuous batching between events, at the pace that its rounds have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np
import simpy

from osd.engine.planner import MOST_NODES
from osd.simulation.arriving import Asked
from osd.simulation.draft_curve import THRESHOLDS, DraftCurve
from osd.simulation.round_costs import RoundCosts

_NEARLY = 1e-9  # tokens that are left of what is done


@dataclass
class Work:
    """What a replica has done: seconds in which it computed, and what for."""

    answered: float = 0
    refused: float = 0
    tokens: float = 0
    prompt_tokens: float = 0
    waited: float = 0.0  # before the prompt was begun
    stayed: float = 0.0  # from coming to the last token
    busy: float = 0.0
    reading: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0


@dataclass
class _Reading:
    asked: Asked
    left: float


class DecodingReplica:
    """Answers requests in the order in which they come, as many at once as there are slots.

    Between two events a round is always the same: all that decode draft down to one threshold, the one that gives most
    tokens a second, and prompts are read by the chunk beside them. So time passes from event to event and not from
    round to round; what is within a round (a request that waits for its end, an answer that ends within it) is not
    told apart, but for the tokens of its last round that an answer does not need.
    """

    def __init__(
        self,
        env: simpy.Environment,
        costs: RoundCosts,
        slots: int,
        chunk: int,
        queue: int,
        curves: Sequence[DraftCurve],
        finished: Callable[[Asked], None],
    ) -> None:
        """A replica of ``slots`` that reads ``chunk`` tokens of prompts a round and holds ``queue`` requests.

        ``curves`` say how the drafts of each domain do; ``finished`` hears of each answer.
        """
        self._env, self._costs, self._finished = env, costs, finished
        self._slots, self._most, self._queue = slots, chunk, queue
        self._nodes = np.stack([one.nodes for one in curves])
        self._lengths = np.stack([one.lengths for one in curves])
        self._surplus = np.stack([one.surplus for one in curves])
        self._waiting: deque[Asked] = deque()
        self._reading: deque[_Reading] = deque()
        self._decoding: list[list[tuple[float, int, Asked]]] = [[] for _ in curves]
        self._counts = np.zeros(len(curves))
        self._done = np.zeros(len(curves))  # tokens that a stream of each domain has been given since the beginning
        self._order = count()
        self._at = env.now
        self._timer: simpy.Event | None = None
        self.slowdown = 1.0
        self.work, self.by_domain = Work(), np.zeros(len(curves))
        self._idle()

    def __len__(self) -> int:
        """Requests that are there."""
        return len(self._waiting) + self.running

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._reading) + int(self._counts.sum())

    @property
    def waiting(self) -> int:
        """Requests that have none."""
        return len(self._waiting)

    def ask(self, asked: Asked) -> None:
        """Take a request, or refuse it where there are too many."""
        self.catch_up()
        if len(self) >= self._queue:
            self.work.refused += 1
            return
        self._waiting.append(asked)
        self._go_on()

    def drafts(self, domain: int, curve: DraftCurve) -> None:
        """From now on drafts of a domain do so well."""
        self.catch_up()
        self._nodes[domain], self._lengths[domain], self._surplus[domain] = curve.nodes, curve.lengths, curve.surplus
        self._go_on()

    def slow(self, slowdown: float) -> None:
        """From now on rounds take so many times as long."""
        if slowdown != self.slowdown:
            self.catch_up()
            self.slowdown = slowdown
            self._go_on()

    def catch_up(self) -> None:
        """Do what was to be done until now."""
        passed, self._at = self._env.now - self._at, self._env.now
        if not passed or not self._round:
            return
        rounds, work = passed / self._round, self.work
        work.busy += passed
        work.reading += passed * self._reading_share
        work.drafted += rounds * self._drafted
        work.accepted += rounds * self._accepted
        self._done += rounds * self._given
        self.by_domain += passed * self._shares
        if self._reading:
            self._reading[0].left -= rounds * self._chunk

    def _go_on(self) -> None:
        """Let those begin who can, and wake up for what is next."""
        while self._waiting and self.running < self._slots:
            asked = self._waiting.popleft()
            self.work.waited += self._env.now - asked.due
            self._reading.append(_Reading(asked, float(asked.prompt - asked.cached)))
        self._plan()
        wait = self._next()
        if wait is None:
            self._timer = None
            return
        self._timer = self._env.timeout(wait)
        assert self._timer.callbacks is not None  # noqa: S101 - it was made just now
        self._timer.callbacks.append(self._ring)

    def _ring(self, timer: simpy.Event) -> None:
        if timer is not self._timer:
            return  # what it was for has changed
        self.catch_up()
        while self._reading and self._reading[0].left <= _NEARLY * self._most:
            self._begin(self._reading.popleft().asked)
        for domain, streams in enumerate(self._decoding):
            while streams and streams[0][0] <= self._done[domain] + _NEARLY:
                self._counts[domain] -= 1
                self._end(heappop(streams)[2])
        self._go_on()

    def _begin(self, asked: Asked) -> None:
        """The round that read the last of the prompt gave the first token."""
        self.work.prompt_tokens += asked.prompt
        if asked.answer == 1:
            self._end(asked)
            return
        place = asked.domain
        self._counts[place] += 1
        self._plan()
        at = place, self._threshold
        surplus = float(self._surplus[at])
        if surplus:  # nothing is drafted beyond an answer's end
            self.work.accepted -= surplus
            self.work.drafted -= surplus * float(self._nodes[at] / (self._lengths[at] - 1))
        needed = self._done[place] + asked.answer - 1 + surplus
        heappush(self._decoding[place], (needed, next(self._order), asked))

    def _end(self, asked: Asked) -> None:
        self.work.answered += 1
        self.work.tokens += asked.answer
        self.work.stayed += self._env.now - asked.due
        self._finished(asked)

    def _next(self) -> float | None:
        """Seconds until something is done, None where there is nothing to do."""
        if not self._round:
            return None
        rounds = [self._reading[0].left / self._chunk] if self._reading else []
        for domain, streams in enumerate(self._decoding):
            if streams:
                rounds.append((streams[0][0] - self._done[domain]) / self._given[domain])
        return max(float(min(rounds)), 0.0) * self._round

    def _plan(self) -> None:
        """What a round is from now on."""
        streams, readers = int(self._counts.sum()), len(self._reading)
        if not streams and not readers:
            self._idle()
            return
        chunk = 0
        if readers:
            left = sum(one.left for one in self._reading)
            chunk = min(self._costs.chunk(streams, readers, self._most), max(left, 1.0))
        self._chunk = chunk
        if not streams:
            self._idle()
            self._chunk = chunk
            self._round = float(self._costs.seconds(0, np.zeros(1), chunk)[0]) * self.slowdown
            self._reading_share = 1.0
            return
        nodes, lengths = self._counts @ self._nodes, self._counts @ self._lengths
        seconds = self._costs.seconds(streams, nodes / streams, chunk)
        speeds = np.where((nodes <= MOST_NODES) | (np.arange(len(nodes)) == 0), lengths / seconds, 0.0)
        self._threshold = best = int(speeds.argmax())
        self._round = float(seconds[best]) * self.slowdown
        self._given = self._lengths[:, best]
        self._drafted, self._accepted = float(nodes[best]), float(lengths[best]) - streams
        self._shares = self._counts / streams
        alone = self._costs.seconds(streams, nodes[:1] / streams, 0)[0] if chunk else seconds[0]
        self._reading_share = 1 - alone / seconds[0] if chunk else 0.0

    def _idle(self) -> None:
        self._round = self._chunk = self._drafted = self._accepted = self._reading_share = 0.0
        self._threshold = len(THRESHOLDS) - 1
        self._given = self._shares = np.zeros(len(self._counts))
