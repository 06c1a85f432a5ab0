"""Reports of a replica's load and counters, and the operator's switches."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from redis.exceptions import RedisError

from osd.capture.writer import TraceWriter
from osd.recall.backends import ENTRY_BYTES
from osd.redis_client import RedisClient, decoded
from osd.registry.replica_loads import DomainEffects, DomainWork, ReplicaLoad, ReplicaLoads, WorkByDomain
from serving.metrics.report import Report
from serving.metrics.table import ReplicaState, read_replica
from serving.replica.rollout_follower import Uptake, Watcher

if TYPE_CHECKING:
    from osd.engine.counters import EngineCounters
    from osd.engine.engine import Engine

logger = logging.getLogger(__name__)

LOAD_SECONDS = 0.1
"""Seconds between two reports of the load while a trainer on this machine reads them."""

POLL_SECONDS = 0.02
"""Longest delay in seconds until such a trainer can learn that no request runs any more; it learns of one at once."""

REPORT_SECONDS = 1.0
"""Seconds between two reports of the load otherwise, and between two reports of the work per domain."""

_WINDOW_SECONDS = 1.0

_TABLES_SECONDS = 15.0

_SWITCHES_KEY = "osd:control"


class Switches(msgspec.Struct, frozen=True):
    """Switches of the operator; without ``speculation`` every request decodes plainly."""

    speculation: bool = True


class Control(RedisClient):
    """Switches in Redis; each call is one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds other data under the key.
    """

    def get(self) -> Switches:
        """Return the switches, or the defaults if they were never set."""
        data = self._client.get(_SWITCHES_KEY)
        return Switches() if data is None else decoded(data, Switches, _SWITCHES_KEY)

    def set(self, switches: Switches) -> None:
        """Replace all switches; replicas follow within a second."""
        self._client.set(_SWITCHES_KEY, msgspec.json.encode(switches))


class TableSizes:
    """Size of an engine's recall tables by domain: (entries in use, bytes). Counting takes about a millisecond."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sizes: dict[str, tuple[int, int]] = {}
        self._counted_at = -math.inf

    def read(self, now: float) -> dict[str, tuple[int, int]]:
        """Return the sizes, at most 15 seconds old at ``now``."""
        if self._engine.pool is not None and now - self._counted_at >= _TABLES_SECONDS:
            self._counted_at = now
            self._sizes = {
                domain: (
                    sum(table.used() for table in memories.tables),
                    ENTRY_BYTES * sum(table.entries for table in memories.tables),
                )
                for domain, memories in self._engine.pool.all_memories().items()
            }
        return self._sizes


class LoadReports:
    """Reporter of an engine's load to Redis, which also follows the operator's switches.

    It sends a report when requests begin or end to wait or to run, every ``LOAD_SECONDS`` while a trainer on this
    machine reads it, and every ``REPORT_SECONDS`` otherwise. Once per ``REPORT_SECONDS`` it also sends the work
    of the engine and the measured effects of versions on trial.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        uptake: Uptake,
        loads: ReplicaLoads,
        control: Control,
        switch: Callable[[bool], None],
    ) -> None:
        """Create the reports; ``switch`` is called with the speculation switch whenever work is reported."""
        self._name, self._engine, self._uptake = name, engine, uptake
        self._loads, self._control, self._switch = loads, control, switch
        self._tokens: deque[tuple[float, int]] = deque()  # (time, tokens): the ends give the speed
        self._is_read, self._failing = True, False
        self._reported_state = (False, False)  # whether requests ran and waited at the last report
        self._reported_at = self._work_at = -math.inf
        self._before = engine.counters()

    def update(self, now: float) -> None:
        """Send the reports that are due at ``now``, seconds of a monotonic clock."""
        load = self._engine.load()
        state = (load.running > 0, load.waiting > 0)
        pause = LOAD_SECONDS if self._is_read else REPORT_SECONDS
        state_changed = self._is_read and state != self._reported_state
        if now - self._reported_at < pause and not state_changed:
            return
        counts = self._engine.counters()
        latency = _inter_token_ms(self._before, counts)
        self._reported_state, self._reported_at, self._before = state, now, counts
        report = ReplicaLoad(
            load.running, load.waiting, self._engine.drafter_version, self._speed(now, counts.completion_tokens),
            latency, counts.forwards, counts.rows, counts.busy_seconds,
        )  # fmt: skip
        try:
            if now - self._work_at < REPORT_SECONDS:
                self._is_read = self._loads.report(self._name, report)
            else:
                self._work_at = now
                self._is_read = self._loads.report(self._name, report, self._work(counts))
                self._switch(self._control.get().speculation)
                if comparisons := self._engine.comparisons:
                    effects = {domain: DomainEffects(compared) for domain, compared in comparisons.items()}
                    self._loads.report_effects(self._name, effects)
        except RedisError as error:
            if not self._failing:
                logger.warning("Redis does not answer, serving continues without it: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _speed(self, now: float, tokens: int) -> float:
        """Return the tokens per second over the last second."""
        self._tokens.append((now, tokens))
        while len(self._tokens) > 2 and now - self._tokens[0][0] > _WINDOW_SECONDS:
            self._tokens.popleft()
        then, before = self._tokens[0]
        return (tokens - before) / (now - then) if now > then else 0.0

    def _work(self, counts: EngineCounters) -> WorkByDomain:
        uptake = self._uptake.per_version(counts.swaps, counts.swap_stall_seconds)
        return {domain: DomainWork(busy, uptake) for domain, busy in counts.busy_by_domain.items()}


class Reporter:
    """Threads that report the load to Redis and the counters to ``push``.

    The thread of the load also applies the operator's switch of speculation to the engine.

    They are two threads, so that Redis cannot delay the counters. ``push`` takes a report and returns the seconds until
    the next report. It may block for a moment, but must not raise.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        writer: TraceWriter | None,
        watchers: Sequence[Watcher],
        uptake: Uptake,
        loads: ReplicaLoads,
        control: Control,
        push: Callable[[Report], float],
    ) -> None:
        self._name, self._engine, self._writer, self._watchers = name, engine, writer, watchers
        self._push, self._tables = push, TableSizes(engine)
        self._load = LoadReports(name, engine, uptake, loads, control, self.set_speculation)
        self.speculation = True
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._report_load, name="load-reporter", daemon=True),
            threading.Thread(target=self._report_counters, name="counter-reporter", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Push the last counters and stop the threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def set_speculation(self, enabled: bool) -> None:
        """Apply the switch to this replica's engine."""
        if enabled != self.speculation:
            self.speculation = enabled
            self._engine.set_speculation(enabled)

    def report(self) -> Report:
        """Return the current report of this replica."""
        counts = self._engine.counters()
        rejected = sum(watcher.rejected for watcher in self._watchers)
        tables, load = self._tables.read(time.monotonic()), self._engine.load()
        state = ReplicaState(load, self._writer, rejected, tables, self._engine.measured)
        counters, gauges = read_replica(counts, state)
        return Report(
            replica=self._name,
            time=time.time(),
            version=self._engine.drafter_version,
            speculation=self.speculation,
            counters=counters,
            gauges=gauges,
            canary=self._engine.canary_version,
            domains=self._engine.pool.other_versions() if self._engine.pool else {},
        )

    def _report_load(self) -> None:
        while not self._stop.is_set():
            self._engine.wait_for_request(POLL_SECONDS)
            self._load.update(time.monotonic())

    def _report_counters(self) -> None:
        pause = REPORT_SECONDS
        while not self._stop.wait(pause):
            pause = self._push(self.report())
        self._push(self.report())


def _inter_token_ms(before: EngineCounters, now: EngineCounters) -> float:
    tokens = now.completion_tokens - before.completion_tokens
    return 1000 * (now.token_seconds - before.token_seconds) / tokens if tokens else 0.0
