"""Decoding loop of the engine's thread: it swaps drafters, admits requests and runs decoding steps until it stops."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from osd.config import Settings
from osd.drafting.base import Drafter
from osd.economy.costs import CostModel
from osd.engine.calibration import calibrate
from osd.engine.counters import EngineCounters
from osd.engine.domain_drafters import ActiveDrafter
from osd.engine.grammar import GrammarError
from osd.engine.health import Health
from osd.engine.planner import Planner, measured_step
from osd.engine.policy import Policy
from osd.engine.pool import DrafterPool
from osd.engine.request import RequestDataError
from osd.engine.request_router import RequestRouter
from osd.engine.scheduler import Scheduler
from osd.engine.sequence import SequenceState
from osd.engine.slots import SlotManager
from osd.engine.step import (
    AdvancedStep,
    CaptureDetail,
    StepOutcome,
    account,
    advance,
    draft,
    launch,
    read,
)
from osd.engine.tracing import StatesWeight, Tracer, TraceSink
from osd.runtime.device import several_cores, yield_to_others
from osd.runtime.model import SlotModel, TargetLostError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Unaccounted:
    """Step that has advanced, with its start and its end on ``time.perf_counter``; None ends it with its reports."""

    step: AdvancedStep
    start: float
    end: float | None


class DecodeLoop:
    """Continuous batching on one thread, which calls ``run``.

    A device computes a step while the host accounts for the step before: its text, stop strings, traces, reports and
    costs. On a CPU the forward runs in the calling thread, so the host accounts for a step at once.

    Any other thread may read and change the public attributes while it holds ``changed``.

    Attributes:
        changed: the lock; notify it after giving the loop work.
        scheduler: of the requests.
        pool: drafters; None for plain decoding.
        planner: of draft sizes.
        router: of requests without a domain; None without drafters, or if the target has no taps.
        counters: since the start.
        health: whether steps end.
        cancelled: ids of requests to end.
        speculate: whether steps draft.
        stopping: whether ``run`` should end.
    """

    def __init__(
        self,
        target: SlotModel,
        settings: Settings,
        policy: Policy,
        drafter: Drafter | None,
        version: int,
        sink: TraceSink | None,
        states_weight: StatesWeight,
    ) -> None:
        """Prepare the loop, see ``osd.engine.engine.Engine``; ``policy`` is for requests without a policy."""
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
        self._tracer = Tracer(sink, settings, target.label, states_weight)
        self.scheduler = Scheduler(settings.engine, self._slots, self.planner, self.pool, self.router, self._tracer)
        self._detail = CaptureDetail(settings.capture.top_k, settings.trainer.samples != "teacher")
        self.counters = EngineCounters()
        self.health = Health()
        self.cancelled: set[str] = set()
        self.speculate = True
        self.stopping = False
        self._overlaps = target.is_asynchronous
        self._unaccounted: _Unaccounted | None = None

    def run(self) -> None:
        """Decode until ``stopping``, and then cancel the remaining requests."""
        self.health.begin_work()
        try:
            yield_to_others()
            several_cores(self._settings.engine.threads)
            max_rows = self._settings.engine.slots * (1 + self._policy.growth.max_nodes)
            self._slots.touch_memory(self._is_idle)
            calibrate(self._target, max_rows, self.planner.costs.measure, self._is_idle)
            self.health.end_work()  # the calibration is not a step
            while self._wait():
                self.step()
        except Exception as error:  # nothing decodes any more, so end all requests
            log.exception("the engine's thread ends")
            self.health.decoding_ended(str(error) if isinstance(error, TargetLostError) else type(error).__name__)
            with self.changed:
                self.stopping = True
                self._account_for_rest()
                self._fail(self.scheduler.sequences(), error)

    def _version_of(self, drafter: ActiveDrafter | None) -> tuple[str, int]:
        """Return domain and version of a drafter, None for the default drafter."""
        drafter = drafter or (self.pool.default if self.pool is not None else None)
        if drafter is None:
            return self._settings.domain, self._version
        return drafter.domain, drafter.version

    def _wait(self) -> bool:
        """Wait until there is work; return False if the loop should stop."""
        with self.changed:
            self._is_idle()
            self.health.begin_work()
            if self.stopping:
                self._account_for_rest()
                self._cancel(self.scheduler.sequences())
            return not self.stopping

    def _is_idle(self, seconds: float | None = None) -> bool:
        """Wait up to ``seconds`` for work, None without a limit, and return whether there is none."""

        def has_work() -> bool:
            staged = self.pool and self.pool.staged
            return bool(staged or self.stopping or self.cancelled or self.scheduler.sequences())

        with self.changed:
            if not has_work():
                self.health.end_work()
            return not self.changed.wait_for(has_work, seconds)

    def step(self) -> None:
        """Swap drafters, admit requests and run a decoding step if a sequence runs; only on the thread of ``run``."""
        try:
            with self.changed:
                if self.cancelled or (self.pool is not None and self.pool.staged):
                    self._account()  # what ends or changes now must not see the results of an earlier step later
                self._swap()
                self.scheduler.follow_alternates()
                self._cancel(self.scheduler.with_ids(self.cancelled))
                self.cancelled.clear()
                self.scheduler.reserve_memory()
                while (s := self.scheduler.take_next()) is not None:
                    was_preempted = s.preempted
                    s.lifetime.began = s.lifetime.began or time.monotonic()
                    if self._try(s, self.scheduler.admit) and not was_preempted:
                        self.counters.prompt_tokens += len(s.tokens)
            for s in [s for s in self.scheduler.running if not s.decoding]:
                self._try(s, self.scheduler.catch_up)
            if self.scheduler.running:
                self._decode()
                self.health.step_ended()
            else:
                self._account()
        except TargetLostError:
            raise
        except Exception as error:
            log.exception("a decoding step failed")
            self.health.step_failed(type(error).__name__)
            with self.changed:
                self._account_for_rest()
                self._fail(list(self.scheduler.running), error)

    def _try(self, s: SequenceState, act: Callable[[SequenceState], None]) -> bool:
        """Call ``act`` for one sequence; after an error end only this sequence and return False."""
        try:
            act(s)
        except Exception as error:
            self._fail_alone(s, error)
            return False
        return True

    def _fail_alone(self, s: SequenceState, error: Exception) -> None:
        """End one sequence with an error; an error of its own data says nothing about the health of the engine."""
        if isinstance(error, GrammarError):
            log.info("the grammar of request %s ends it: %s", s.request.id, error)
        else:
            log.error("request %s failed", s.request.id, exc_info=error)
            if not isinstance(error, RequestDataError):
                self.health.request_failed(type(error).__name__)
        with self.changed:
            self._fail([s], error)

    def _fail(self, sequences: list[SequenceState], error: Exception) -> None:
        """End sequences with an error and discard the content of their slots. Must hold ``changed``."""
        refusal = str(error) if isinstance(error, GrammarError) else ""
        cause = error.__cause__ if isinstance(error, RequestDataError) else error
        for s in sequences:
            if not s.ended:
                self.counters.grammar_failed += bool(refusal)
                self.counters.failed += not refusal
                s.fail(f"{type(cause).__name__} while decoding", refusal)
            self.scheduler.remove(s, forget=True)

    def _swap(self) -> None:
        start = time.perf_counter()
        if self.pool is None:
            return
        rests = self.pool.domains[self.pool.domain].rests
        if (drafter := self.pool.swap()) is None:
            return
        self.planner.reset(drafter, renews_budget=drafter.domain == self.pool.domain and not rests)
        stall = time.perf_counter() - start
        self.counters.count_swap(stall)
        log.info("drafter %d of %s swapped in within %.1f ms", drafter.version, drafter.domain, stall * 1e3)

    def _cancel(self, sequences: list[SequenceState]) -> None:
        self.counters.cancelled += len(sequences)
        for s in sequences:
            self._try(s, self.scheduler.cancel)

    def _decode(self) -> None:
        """Run a decoding step; the device works from ``launch`` to the end of ``read``."""
        start = time.perf_counter()
        for s in self.scheduler.running:
            s.take_turn()
        drafts = draft(self.scheduler.plan(self.speculate), self._target.device)
        launched = launch(drafts, self._target, self._detail.top_k)
        self._account()
        advanced = advance(read(launched), self._slots)
        self._unaccounted = _Unaccounted(advanced, start, time.perf_counter() if self._overlaps else None)
        for s, error in advanced.failed.items():
            self._fail_alone(s, error)
        with self.changed:
            for s in advanced.sequences:
                if s.finish or s.unrouted is not None:
                    self._try(s, self.scheduler.settle)
        if not self._overlaps or not self.scheduler.running:
            self._account()

    def _account(self) -> None:
        """Account for the step that has advanced, if any: count, trace and report its tokens, and learn its costs."""
        done, self._unaccounted = self._unaccounted, None
        if done is None:
            return
        try:
            outcome = account(done.step, self._detail)
            with self.changed:
                self.counters.cached_tokens = self.scheduler.cached_tokens
                self.counters.preemptions = self.scheduler.preemptions
                self.counters.count_tokens(outcome, self._version_of, time.monotonic())
            for s, error in outcome.failed.items():
                self._fail_alone(s, error)
            for result in outcome.sequences:
                self._try(result.sequence, self._report)
            seconds = (done.end or time.perf_counter()) - done.start
            self._compare_versions(outcome, seconds)
            self.planner.observe(outcome, seconds)
            with self.changed:
                self.counters.count_seconds(outcome, seconds)
        except Exception as error:
            with self.changed:
                self._fail(list(done.step.sequences), error)
            raise

    def _account_for_rest(self) -> None:
        """Account for the last step before all sequences end; its tokens are valid even if the next step fails."""
        try:
            self._account()
        except Exception:
            log.exception("the results of the last step are lost")

    def _compare_versions(self, outcome: StepOutcome, seconds: float) -> None:
        """Add the step to the comparisons of versions that took part in it."""
        alternates = {result.alternate for result in outcome.sequences if result.alternate is not None}
        switchback = self.planner.switchback
        if switchback is not None:
            switchback.compares = any(alternate.reference for alternate in alternates)
        if self.pool is None or not alternates:
            return
        costs = None if switchback is None else switchback.costs
        step = measured_step(outcome, seconds, self.planner.costs)
        for alternate in alternates:
            bank = switchback.versions if switchback is not None and alternate.reference else None
            if not outcome.drafts:
                alternate.turns.interrupt()
            elif not outcome.exceptional:
                alternate.turns.observe(step, costs, bank)
        self.pool.settle()

    def _report(self, s: SequenceState) -> None:
        """Send the outcome of a step to the client and the trace of a sequence, and release it if it has ended."""
        s.report()
        self._tracer.emit(s, *self._version_of(s.learner))
        if not s.finish:
            return
        if self.router is not None and self.speculate:
            self.router.observe_end(s)
        with self.changed:
            self.counters.count_end(s)
            self.scheduler.remove(s)
        self.health.request_ended()
