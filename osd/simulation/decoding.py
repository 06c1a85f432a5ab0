"""Simulated replica with continuous batching, whose steps do not change between two events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np
import simpy

from osd.engine.planner import MAX_NODES
from osd.simulation.arrivals import SimulatedRequest
from osd.simulation.draft_curve import THRESHOLDS, DraftCurve
from osd.simulation.step_costs import StepCosts

_NEARLY = 1e-9  # tokens that may be left of finished work


@dataclass
class ReplicaWork:
    """Totals of a replica.

    Attributes:
        answered: finished requests.
        refused: refused requests.
        tokens: tokens of answers.
        prompt_tokens: tokens of prompts.
        waited: seconds from arrivals to the start of prompts.
        stayed: seconds from arrivals to last tokens.
        busy: seconds of computation.
        reading: seconds of computation for prompts.
        drafted: draft tokens.
        accepted: accepted draft tokens.
    """

    answered: float = 0
    refused: float = 0
    tokens: float = 0
    prompt_tokens: float = 0
    waited: float = 0.0
    stayed: float = 0.0
    busy: float = 0.0
    reading: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0


@dataclass
class _Prefill:
    request: SimulatedRequest
    left: float


class DecodingReplica:
    """Replica that answers requests in order of arrival, at most one per slot.

    Between two events all steps are equal: all streams draft down to the threshold with the most tokens per second, and
    a chunk of prompts is read in the same step. So the simulation advances from event to event, not from step to step.
    It ignores events within a step, except for the surplus tokens of an answer's last step.

    Attributes:
        slowdown: factor of the duration of steps.
        work: totals.
        by_domain: [domains], busy seconds of each domain.
    """

    def __init__(
        self,
        env: simpy.Environment,
        costs: StepCosts,
        slots: int,
        chunk: int,
        queue: int,
        curves: Sequence[DraftCurve],
        finished: Callable[[SimulatedRequest], None],
    ) -> None:
        """Start without requests.

        Args:
            env: of the simulation.
            costs: of steps.
            slots: limit of concurrent requests.
            chunk: limit of prompt tokens per step.
            queue: limit of requests, with and without a slot.
            curves: draft curve of each domain.
            finished: called with each answered request.
        """
        self._env, self._costs, self._finished = env, costs, finished
        self._slots, self._chunk_limit, self._queue = slots, chunk, queue
        self._nodes = np.stack([curve.nodes for curve in curves])
        self._lengths = np.stack([curve.lengths for curve in curves])
        self._surplus = np.stack([curve.surplus for curve in curves])
        self._waiting: deque[SimulatedRequest] = deque()
        self._reading: deque[_Prefill] = deque()
        self._decoding: list[list[tuple[float, int, SimulatedRequest]]] = [[] for _ in curves]
        self._counts = np.zeros(len(curves))
        self._done = np.zeros(len(curves))  # tokens per stream of each domain since the start
        self._order = count()
        self._at = env.now
        self._timer: simpy.Event | None = None
        self.slowdown = 1.0
        self.work, self.by_domain = ReplicaWork(), np.zeros(len(curves))
        self._idle()

    def __len__(self) -> int:
        """Return the number of requests, with and without a slot."""
        return len(self._waiting) + self.running

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return len(self._reading) + int(self._counts.sum())

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting)

    def submit(self, request: SimulatedRequest) -> None:
        """Accept a request, or refuse it if the queue is full."""
        self.catch_up()
        if len(self) >= self._queue:
            self.work.refused += 1
            return
        self._waiting.append(request)
        self._continue()

    def set_curve(self, domain: int, curve: DraftCurve) -> None:
        """Set the draft curve of a domain from now on."""
        self.catch_up()
        self._nodes[domain], self._lengths[domain], self._surplus[domain] = curve.nodes, curve.lengths, curve.surplus
        self._continue()

    def set_slowdown(self, slowdown: float) -> None:
        """Set the factor of the duration of steps from now on."""
        if slowdown != self.slowdown:
            self.catch_up()
            self.slowdown = slowdown
            self._continue()

    def catch_up(self) -> None:
        """Account for the steps until now."""
        passed, self._at = self._env.now - self._at, self._env.now
        if not passed or not self._step:
            return
        steps, work = passed / self._step, self.work
        work.busy += passed
        work.reading += passed * self._reading_share
        work.drafted += steps * self._drafted
        work.accepted += steps * self._accepted
        self._done += steps * self._step_tokens
        self.by_domain += passed * self._shares
        if self._reading:
            self._reading[0].left -= steps * self._chunk

    def _continue(self) -> None:
        """Start waiting requests in free slots, and set the timer to the next event."""
        while self._waiting and self.running < self._slots:
            request = self._waiting.popleft()
            self.work.waited += self._env.now - request.due
            self._reading.append(_Prefill(request, float(request.prompt - request.cached)))
        self._plan()
        wait = self._next()
        if wait is None:
            self._timer = None
            return
        self._timer = self._env.timeout(wait)
        assert self._timer.callbacks is not None  # noqa: S101  a new event has callbacks
        self._timer.callbacks.append(self._on_timer)

    def _on_timer(self, timer: simpy.Event) -> None:
        if timer is not self._timer:
            return  # a later call has replaced this timer
        self.catch_up()
        while self._reading and self._reading[0].left <= _NEARLY * self._chunk_limit:
            self._begin(self._reading.popleft().request)
        for domain, streams in enumerate(self._decoding):
            while streams and streams[0][0] <= self._done[domain] + _NEARLY:
                self._counts[domain] -= 1
                self._end(heappop(streams)[2])
        self._continue()

    def _begin(self, request: SimulatedRequest) -> None:
        """Start the answer of a request; the step with the end of its prompt gave the first token."""
        self.work.prompt_tokens += request.prompt
        if request.answer == 1:
            self._end(request)
            return
        place = request.domain
        self._counts[place] += 1
        self._plan()
        at = place, self._threshold
        surplus = float(self._surplus[at])
        if surplus:  # drafts stop at the end of the answer
            self.work.accepted -= surplus
            self.work.drafted -= surplus * float(self._nodes[at] / (self._lengths[at] - 1))
        needed = self._done[place] + request.answer - 1 + surplus
        heappush(self._decoding[place], (needed, next(self._order), request))

    def _end(self, request: SimulatedRequest) -> None:
        self.work.answered += 1
        self.work.tokens += request.answer
        self.work.stayed += self._env.now - request.due
        self._finished(request)

    def _next(self) -> float | None:
        """Return the seconds until the next event, None without work."""
        if not self._step:
            return None
        steps = [self._reading[0].left / self._chunk] if self._reading else []
        for domain, streams in enumerate(self._decoding):
            if streams:
                steps.append((streams[0][0] - self._done[domain]) / self._step_tokens[domain])
        return max(float(min(steps)), 0.0) * self._step

    def _plan(self) -> None:
        """Choose the step for the current requests."""
        streams, readers = int(self._counts.sum()), len(self._reading)
        if not streams and not readers:
            self._idle()
            return
        chunk = 0
        if readers:
            left = sum(prompt.left for prompt in self._reading)
            chunk = min(self._costs.chunk(streams, readers, self._chunk_limit), max(left, 1.0))
        self._chunk = chunk
        if not streams:
            self._idle()
            self._chunk = chunk
            self._step = float(self._costs.seconds(0, np.zeros(1), chunk)[0]) * self.slowdown
            self._reading_share = 1.0
            return
        nodes, lengths = self._counts @ self._nodes, self._counts @ self._lengths
        seconds = self._costs.seconds(streams, nodes / streams, chunk)
        speeds = np.where((nodes <= MAX_NODES) | (np.arange(len(nodes)) == 0), lengths / seconds, 0.0)
        self._threshold = best = int(speeds.argmax())
        self._step = float(seconds[best]) * self.slowdown
        self._step_tokens = self._lengths[:, best]
        self._drafted, self._accepted = float(nodes[best]), float(lengths[best]) - streams
        self._shares = self._counts / streams
        alone = self._costs.seconds(streams, nodes[:1] / streams, 0)[0] if chunk else seconds[0]
        self._reading_share = 1 - alone / seconds[0] if chunk else 0.0

    def _idle(self) -> None:
        self._step = self._chunk = self._drafted = self._accepted = self._reading_share = 0.0
        self._threshold = len(THRESHOLDS) - 1
        self._step_tokens = self._shares = np.zeros(len(self._counts))
