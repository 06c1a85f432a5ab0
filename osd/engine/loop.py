"""The engine's thread: it swaps drafters, admits requests and runs rounds, until it is stopped."""

from __future__ import annotations

import logging
import threading
import time

from osd.config import Settings
from osd.drafters.base import Drafter
from osd.engine.calibration import forward_seconds
from osd.engine.counters import DecodeSeconds, EngineCounters
from osd.engine.planner import Planner
from osd.engine.policy import Policy
from osd.engine.pool import DrafterPool
from osd.engine.request_router import RequestRouter
from osd.engine.round import Keeping, Outcome, commit, draft, verify
from osd.engine.savings import savings
from osd.engine.scheduler import Scheduler
from osd.engine.sequence import Sequence
from osd.engine.slots import SlotManager
from osd.engine.tracing import Tracer, TraceSink
from osd.metrics import SpeculationCounts
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.speculation.cost_model import CostModel

log = logging.getLogger(__name__)


class DecodeLoop:
    """Continuous batching on one thread, which calls ``run``.

    Any other thread may read and change what is public here while it holds ``changed``.

    Attributes:
        changed: the lock; whoever gives the loop something to do notifies it.
        scheduler: the requests.
        pool: the drafters, None without any.
        planner: how much is drafted.
        router: of requests that do not say their domain, None where nothing can tell them apart.
        counters: what was done so far.
        cancelled: ids of requests that are to end.
        speculate: whether rounds draft.
        stopping: whether ``run`` is to end.
    """

    def __init__(
        self,
        target: SlotModel,
        settings: Settings,
        policy: Policy,
        drafter: Drafter | None,
        version: int,
        sink: TraceSink | None,
    ) -> None:
        """See ``osd.engine.engine.Engine``; ``policy`` is that of requests without one of their own."""
        self._target, self._settings, self._policy, self._version = target, settings, policy, version
        self.changed = threading.Condition()
        self.pool: DrafterPool | None = None
        self.router: RequestRouter | None = None
        if drafter is not None:
            self.pool = DrafterPool(drafter, settings.domain, version, settings, self.changed, target)
            if target.taps:
                self.router = RequestRouter(self.pool, target)
        self.planner = Planner(policy, target.context, CostModel(), settings.growth.governed)
        self._slots = SlotManager(target, settings.engine)
        self._tracer = Tracer(sink, settings)
        self.scheduler = Scheduler(settings.engine, self._slots, self.planner, self.pool, self.router, self._tracer)
        self._keeping = Keeping(settings.capture.top_k, settings.trainer.samples != "teacher")
        self.counters = EngineCounters()
        self.cancelled: set[str] = set()
        self.speculate = True
        self.stopping = False

    def run(self) -> None:
        """Decode until ``stopping``; what is not finished then ends as cancelled."""
        several_cores(self._settings.engine.threads)
        if self.pool is not None:
            most = self._settings.engine.slots * (1 + self._policy.growth.max_nodes)
            self.planner.costs.measure(forward_seconds(self._target, most))
        while self._wait():
            try:
                with self.changed:
                    self._swap()
                    self._drop_cancelled()
                    for s in self.scheduler.admit():
                        self.counters.prompt_tokens += len(s.tokens)
                if self.scheduler.running:
                    self._round()
            except Exception as error:
                log.exception("a round failed")
                self._fail(f"{type(error).__name__} while decoding")

    def drafted_by(self, s: Sequence) -> tuple[str, int]:
        """Domain and version of a sequence's drafter."""
        drafter = s.drafter or (self.pool.own if self.pool is not None else None)
        if drafter is None:
            return self._settings.domain, self._version
        return drafter.domain, drafter.version

    def _wait(self) -> bool:
        """Wait until there is something to do; False when it is to stop."""
        with self.changed:
            scheduler, pool = self.scheduler, self.pool
            if not (scheduler.waiting or scheduler.running or self.stopping or (pool and pool.staged)):
                self.cancelled.clear()
                self.changed.wait()
            if self.stopping:
                for s in scheduler.everything():
                    scheduler.end(s)
            return not self.stopping

    def _swap(self) -> None:
        start = time.perf_counter()
        drafter = None if self.pool is None else self.pool.swap()
        if drafter is None:
            return
        self.planner.renew(drafter)
        stall = time.perf_counter() - start
        self.counters.swaps += 1
        self.counters.swap_stall_seconds_max = max(self.counters.swap_stall_seconds_max, stall)
        log.info("drafter %d of %s swapped in within %.1f ms", drafter.version, drafter.domain, stall * 1e3)

    def _drop_cancelled(self) -> None:
        gone = self.scheduler.named(self.cancelled)
        self.cancelled.clear()
        self.counters.cancelled += len(gone)
        for s in gone:
            self.scheduler.end(s)

    def _round(self) -> None:
        start = time.perf_counter()
        scheduled = self.scheduler.plan(self.speculate)
        drafted = draft(scheduled, self._target.device)
        verified = verify(drafted, self._target, self._keeping.top_k)
        outcome = commit(verified, self._slots, self._target.eos_ids, self._keeping)
        self._count(outcome)
        for one in outcome.sequences:
            s = one.sequence
            s.limit = s.policy.growth.next_limit(s.limit, len(one.tree.tokens), len(one.path))
            s.report()
            self._tracer.emit(s, *self.drafted_by(s))
            if s.finish and self.router is not None and self.speculate:
                self.router.ended(s)
            with self.changed:
                self.scheduler.settle(s)
        seconds = time.perf_counter() - start
        self.planner.observe(outcome, seconds)
        with self.changed:
            self.counters.busy_seconds += seconds
            self.counters.token_seconds += seconds * len(outcome.sequences)
            for version, added in savings(outcome, seconds, self.planner.costs).items():
                self.counters.seconds_by_version.setdefault(version, DecodeSeconds()).add(added)

    def _count(self, outcome: Outcome) -> None:
        with self.changed:
            self.counters.forwards += 1
            self.counters.cached_tokens = self.scheduler.cached_tokens
            for one in outcome.sequences:
                self.counters.completion_tokens += one.tokens
                if one.tree.tokens:
                    drafted_by = self.drafted_by(one.sequence)
                    of_version = self.counters.by_version.setdefault(drafted_by, SpeculationCounts())
                    for counts in (one.sequence.counts, of_version):
                        counts.count(one.drafted, one.accepted)

    def _fail(self, message: str) -> None:
        with self.changed:
            self.counters.failed += len(self.scheduler.running)
            for s in list(self.scheduler.running):
                s.fail(message)
                self.scheduler.release(s, forget=True)
