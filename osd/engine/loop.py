"""The engine's thread: it swaps drafters, admits requests and runs rounds, until it is stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from osd.config import Settings
from osd.drafting.base import Drafter
from osd.economy.costs import CostModel
from osd.engine.calibration import calibrate
from osd.engine.counters import EngineCounters
from osd.engine.health import Health
from osd.engine.planner import Planner, measured_step
from osd.engine.policy import Policy
from osd.engine.pool import ActiveDrafter, DrafterPool
from osd.engine.request_router import RequestRouter
from osd.engine.round import Keeping, Outcome, SequenceOutcome, commit, draft, verify
from osd.engine.scheduler import Scheduler
from osd.engine.sequence import Sequence
from osd.engine.slots import SlotManager
from osd.engine.tracing import StatesWanted, Tracer, TraceSink
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel, TargetLostError

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
        health: whether rounds end.
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
        states: StatesWanted,
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
        self.planner = Planner(policy, target.context, CostModel(), settings.growth.governed, settings.economy)
        self._slots = SlotManager(target, settings.engine)
        self._tracer = Tracer(sink, settings, target.label, states)
        self.scheduler = Scheduler(settings.engine, self._slots, self.planner, self.pool, self.router, self._tracer)
        self._keeping = Keeping(settings.capture.top_k, settings.trainer.samples != "teacher")
        self.counters = EngineCounters()
        self.health = Health()
        self.cancelled: set[str] = set()
        self.speculate = True
        self.stopping = False

    def run(self) -> None:
        """Decode until ``stopping``; what is not finished then ends as cancelled."""
        self.health.working()
        try:
            several_cores(self._settings.engine.threads)
            most = self._settings.engine.slots * (1 + self._policy.growth.max_nodes)
            self._slots.settle(self._rests)
            calibrate(self._target, most, self.planner.costs.measure, self._rests)
            self.health.resting()  # what came before is no round
            while self._wait():
                self.step()
        except Exception as error:  # nothing decodes any more, and nobody is to wait for it
            log.exception("the engine's thread ends")
            self.health.ended(str(error) if isinstance(error, TargetLostError) else type(error).__name__)
            with self.changed:
                self.stopping = True
                self._fail(self.scheduler.everything(), error)

    def drafted_by(self, s: Sequence) -> tuple[str, int]:
        """Domain and version of a sequence's drafter."""
        return self._version_of(s.drafter)

    def _version_of(self, drafter: ActiveDrafter | None) -> tuple[str, int]:
        """Domain and version of a drafter, of the own where it is None."""
        drafter = drafter or (self.pool.own if self.pool is not None else None)
        if drafter is None:
            return self._settings.domain, self._version
        return drafter.domain, drafter.version

    def _wait(self) -> bool:
        """Wait until there is something to do; False when it is to stop."""
        with self.changed:
            self._rests()
            self.health.working()
            if self.stopping:
                self._cancel(self.scheduler.everything())
            return not self.stopping

    def _rests(self, seconds: float | None = None) -> bool:
        """Whether nothing is to be done for so many seconds; without them it waits until there is something."""

        def wanted() -> bool:
            staged = self.pool and self.pool.staged
            return bool(staged or self.stopping or self.cancelled or self.scheduler.everything())

        with self.changed:
            if not wanted():
                self.health.resting()
            return not self.changed.wait_for(wanted, seconds)

    def step(self) -> None:
        """Swap, admit, and run a round where there is something to run; on the thread of ``run`` alone."""
        try:
            with self.changed:
                self._swap()
                self.scheduler.follow_canaries()
                self._cancel(self.scheduler.named(self.cancelled))
                self.cancelled.clear()
                self.scheduler.fit()
                while (s := self.scheduler.take()) is not None:
                    again = s.preempted
                    s.lifetime.began = s.lifetime.began or time.monotonic()
                    if self._try(s, self.scheduler.admit) and not again:
                        self.counters.prompt_tokens += len(s.tokens)
            for s in [s for s in self.scheduler.running if not s.decoding]:
                self._try(s, self.scheduler.catch_up)
            if self.scheduler.running:
                self._round()
                self.health.round_ended()
        except TargetLostError:
            raise
        except Exception as error:
            log.exception("a round failed")
            self.health.round_failed(type(error).__name__)
            with self.changed:
                self._fail(list(self.scheduler.running), error)

    def _try(self, s: Sequence, act: Callable[[Sequence], None]) -> bool:
        """Do something for one sequence; where that fails, the sequence does, and no other."""
        try:
            act(s)
        except Exception as error:
            self._fail_alone(s, error)
            return False
        return True

    def _fail_alone(self, s: Sequence, error: Exception) -> None:
        log.error("request %s failed", s.request.id, exc_info=error)
        self.health.request_failed(type(error).__name__)
        with self.changed:
            self._fail([s], error)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End sequences with an error; nothing in their slots can be relied on. Must hold ``changed``."""
        for s in sequences:
            if not s.ended:
                self.counters.failed += 1
                s.fail(f"{type(error).__name__} while decoding")
            self.scheduler.let_go(s, forget=True)

    def _swap(self) -> None:
        start = time.perf_counter()
        drafter = None if self.pool is None else self.pool.swap()
        if drafter is None:
            return
        self.planner.renew(drafter)
        stall = time.perf_counter() - start
        self.counters.swapped(stall)
        log.info("drafter %d of %s swapped in within %.1f ms", drafter.version, drafter.domain, stall * 1e3)

    def _cancel(self, gone: list[Sequence]) -> None:
        self.counters.cancelled += len(gone)
        for s in gone:
            self._try(s, self.scheduler.end)

    def _round(self) -> None:
        start = time.perf_counter()
        for s in self.scheduler.running:
            s.take_turn()
        scheduled = self.scheduler.plan(self.speculate)
        drafted = draft(scheduled, self._target.device)
        verified = verify(drafted, self._target, self._keeping.top_k)
        outcome = commit(verified, self._slots, self._keeping)
        with self.changed:
            self.counters.cached_tokens = self.scheduler.cached_tokens
            self.counters.preemptions = self.scheduler.preemptions
            self.counters.drew(outcome, self.drafted_by, time.monotonic())
        for s, error in outcome.failed.items():
            self._fail_alone(s, error)
        for one in outcome.sequences:
            self._try(one.sequence, partial(self._settle, one))
        seconds = time.perf_counter() - start
        self._compare_versions(outcome, seconds)
        self.planner.observe(outcome, seconds)
        with self.changed:
            self.counters.took(outcome, seconds)

    def _compare_versions(self, outcome: Outcome, seconds: float) -> None:
        """Take in a step of versions that take turns."""
        canaries = [one.sequence.canary for one in outcome.sequences]
        switchback = self.planner.switchback
        drafts = self.speculate and (switchback is None or switchback.drafts)
        costs = None if switchback is None else switchback.costs
        for turns in {canary.turns for canary in canaries if canary is not None}:
            step = measured_step(outcome, seconds, drafts)
            if not drafts:
                turns.interrupt()
            elif not outcome.exceptional:
                turns.observe(step, costs)

    def _settle(self, one: SequenceOutcome, s: Sequence) -> None:
        """Tell a sequence's client and its trace what the round gave it, and let it go where it has finished."""
        if not one.forced:
            s.limit = s.policy.growth.next_limit(s.limit, len(one.tree.tokens), len(one.path))
        s.report()
        self._tracer.emit(s, *self._version_of(s.learner))
        if s.finish and self.router is not None and self.speculate:
            self.router.ended(s)
        with self.changed:
            self.counters.ended(s)
            self.scheduler.settle(s)
        if s.finish:
            self.health.request_ended()
