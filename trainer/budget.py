"""Compute budget of a domain's training: its turn, the spare capacity and its fund."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from osd.config import Settings
from osd.learning.online import Learner
from osd.registry.replica_loads import ReplicaLoads
from trainer.capacity import SpareCapacity, yielding
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import Executor
from trainer.investor import Investor, is_pause
from trainer.reporter import TrainingReporter

_IDLE_SECONDS = 2.0  # between two calls of ``idle`` during sleep
_TURN_SECONDS = 0.5  # between two calls of ``idle`` while other domains have the turn


class TrainingBudget:
    """Compute budget of a domain: its worker computes in its turn, with spare capacity, when its fund covers it.

    Attributes:
        ended: set by ``end``, when the worker must end.
        investor: keeps the fund.
    """

    def __init__(
        self,
        domain: str,
        scheduler: DomainScheduler,
        capacity: SpareCapacity,
        investor: Investor,
        set_state: Callable[[str, str], None],
    ) -> None:
        """Create a budget; ``set_state`` is called with each new state of the worker and its reason."""
        self._domain, self._scheduler, self._capacity, self.investor = domain, scheduler, capacity, investor
        self._set_state = set_state
        self.ended, self._paused, self._resting = threading.Event(), threading.Event(), threading.Event()
        self._woken = threading.Event()  # set while the worker is paused or must end

    @classmethod
    def of(
        cls,
        settings: Settings,
        loads: ReplicaLoads,
        executor: Executor,
        scheduler: DomainScheduler,
        reporter: TrainingReporter,
    ) -> TrainingBudget:
        """Create the budget of ``settings.domain`` from the loads of replicas."""
        domain, trainer = settings.domain, settings.trainer
        threads = executor.size * trainer.threads
        capacity = SpareCapacity(loads, trainer, lambda: executor.clock() / threads, is_pause)
        investor = Investor(settings, loads, capacity, reporter, partial(scheduler.cpu_seconds, domain))
        capacity.on_loads = investor.observe_loads
        return cls(domain, scheduler, capacity, investor, reporter.state.set)

    def end(self) -> None:
        """Let the worker end: at once while it waits, otherwise after the current micro-step."""
        self.ended.set()
        self._woken.set()

    def pause(self, timeout: float) -> bool:
        """Stop training; return True once the worker rests, False when ``timeout`` seconds pass before that."""
        self._resting.clear()
        self._paused.set()
        self._woken.set()
        return self._resting.wait(timeout)

    def resume(self) -> None:
        """Continue training after ``pause``."""
        self._paused.clear()
        self._woken.clear()
        if self.ended.is_set():
            self._woken.set()

    @property
    def paused(self) -> bool:
        """Whether training is paused."""
        return self._paused.is_set()

    def missing(self, learner: Learner) -> str:
        """Return why the next slice of training does not start now, or "" when it starts."""
        decision = self.investor.next_slice(learner)
        if decision is None:
            return ""
        self._scheduler.set_value(self._domain, self.investor.worth(learner))
        if decision.begins:
            return ""
        if not decision.needed:
            return f"the fund of training is overdrawn by {-decision.fund:.1f} core seconds"
        return f"the fund of training holds {decision.fund:.1f} of {decision.needed:.1f} core seconds for a version"

    def take_next_turn(self) -> None:
        """Take the next turn before all other domains, as the value of this domain is not known yet."""
        self._scheduler.set_value(self._domain, math.inf)

    def read_loads(self) -> None:
        """Read the loads of replicas, as the price of training depends on them."""
        self._capacity.spare(glance=True)

    def release(self) -> None:
        """Give the turn to other domains."""
        self._scheduler.release(self._domain)

    def rest(self, state: str) -> None:
        """Give the turn to other domains and set the state: "paused" or "yielding"."""
        self.release()
        self._set_state(state, self._capacity.obstacle if state == "yielding" else "")
        if state == "paused":
            self._resting.set()
            self.ended.wait(0.02)

    def sleep(self, seconds: float, idle: Callable[[], object]) -> None:
        """Sleep for ``seconds``, or until a pause or the end; call ``idle`` every two seconds."""
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0 and not self._woken.wait(min(remaining, _IDLE_SECONDS)):
            idle()

    def wait(self, idle: Callable[[], object], patience: float = math.inf) -> bool:
        """Wait until a micro-step may run.

        Args:
            idle: called at first, and regularly while there is no spare capacity.
            patience: the longest wait for the turn, and for spare capacity, in seconds.

        Returns:
            False when the worker must end, or after a wait of ``patience`` seconds.
        """
        idle()

        def rest(state: str) -> None:
            self.rest(state)
            idle()

        deadline = time.monotonic() + patience
        while True:
            turn = self._scheduler.acquire(self._domain, self.ended, min(deadline - time.monotonic(), _TURN_SECONDS))
            if turn and not self._capacity.wait(self.ended, self._paused, rest, patience):
                return False
            if turn and self._scheduler.holds(self._domain):
                return True
            if self.ended.is_set():
                return False
            if not turn:
                self._set_state("waiting", "another domain of this trainer has its turn")
                idle()
            if time.monotonic() >= deadline:
                return False

    def working(self) -> AbstractContextManager[None]:
        """Return a context that measures the work inside it."""
        return self._capacity.working()

    @property
    def worked(self) -> float:
        """CPU seconds of the last work, on each core."""
        return self._capacity.worked

    @contextmanager
    def step(self, idle: Callable[[], bool]) -> Generator[None]:
        """Measure the micro-step inside the context, which yields to serving; see ``give_way``."""
        with self._capacity.working(), yielding(partial(self.give_way, idle)):
            yield

    def give_way(self, idle: Callable[[], bool]) -> None:
        """Wait within a micro-step while there is no spare capacity; call ``idle`` regularly.

        The wait ends at once when the worker must rest or end, or when ``idle`` returns True.
        """
        must_rest = is_yielding = False

        def on_wait(share: float) -> None:
            nonlocal must_rest, is_yielding
            if not share:
                is_yielding = True
                self._set_state("yielding", self._capacity.obstacle)
            must_rest = idle()

        self._capacity.give_way(lambda: must_rest or self.paused or self.ended.is_set(), on_wait)
        if is_yielding:
            self._set_state("training", "")
