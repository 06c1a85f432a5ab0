"""The compute budget of a domain's training: its turn, what serving leaves, and what its fund covers."""

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
from trainer.capacity import Capacity, yielding
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import Executor
from trainer.investor import Investor, paused
from trainer.reporter import TrainingReporter

_GLANCE = 2.0  # seconds of sleep between two calls of ``idle``


class TrainingBudget:
    """Decides when a domain's worker computes: in its turn, where serving leaves room and the fund covers it.

    ``over`` is set by ``end``, when the worker is to end; ``investor`` keeps the fund. ``say`` hears of the worker's
    state, and what is missing.
    """

    def __init__(
        self,
        domain: str,
        scheduler: DomainScheduler,
        capacity: Capacity,
        investor: Investor,
        say: Callable[[str, str], None],
    ) -> None:
        self._domain, self._scheduler, self._capacity, self.investor = domain, scheduler, capacity, investor
        self._say = say
        self.over, self._paused, self._resting = threading.Event(), threading.Event(), threading.Event()
        self._woken = threading.Event()  # while it is paused or over

    @classmethod
    def of(
        cls,
        settings: Settings,
        loads: ReplicaLoads,
        executor: Executor,
        scheduler: DomainScheduler,
        reporter: TrainingReporter,
    ) -> TrainingBudget:
        """Make the budget of ``settings.domain`` from what replicas report in ``loads``."""
        domain, trainer = settings.domain, settings.trainer
        threads = executor.size * trainer.threads
        capacity = Capacity(loads, trainer, lambda: executor.clock() / threads, paused)
        investor = Investor(settings, loads, capacity, reporter, partial(scheduler.clock, domain))
        capacity.seen = investor.seen
        return cls(domain, scheduler, capacity, investor, reporter.state.say)

    def end(self) -> None:
        """End the worker after the micro-step that is under way."""
        self.over.set()
        self._woken.set()

    def pause(self, timeout: float) -> bool:
        """Train no more; True as soon as the worker rests, False when it does not within ``timeout`` seconds."""
        self._resting.clear()
        self._paused.set()
        self._woken.set()
        return self._resting.wait(timeout)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._paused.clear()
        self._woken.clear()
        if self.over.is_set():
            self._woken.set()

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self._paused.is_set()

    def missing(self, learner: Learner) -> str:
        """Return why the next slice of training is not begun now, "" when it is."""
        decision = self.investor.next_slice(learner)
        if decision is None:
            return ""
        self._scheduler.value(self._domain, self.investor.worth(learner))
        if decision.begins:
            return ""
        return f"the fund of training holds {decision.fund:.1f} of {decision.needed:.1f} core seconds for a version"

    def first(self) -> None:
        """Take the next turn before all other domains: the value of this one is not known yet."""
        self._scheduler.value(self._domain, math.inf)

    def look(self) -> None:
        """Look at the loads of replicas: whether requests run decides what training costs."""
        self._capacity.spare(glance=True)

    def give(self) -> None:
        """Let the other domains have their turn."""
        self._scheduler.give(self._domain)

    def rest(self, why: str) -> None:
        """Let the other domains have their turn, and say why."""
        self.give()
        self._say(why, "")
        if why == "paused":
            self._resting.set()
            self.over.wait(0.02)

    def sleep(self, seconds: float, idle: Callable[[], object]) -> None:
        """Sleep, until a pause or the end at most; ``idle`` is called now and then."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._woken.wait(min(left, _GLANCE)):
            idle()

    def wait(self, idle: Callable[[], object], patience: float = math.inf) -> bool:
        """Wait until a micro-step may run.

        ``idle`` is called at first, and now and then while serving leaves no room. Returns False when the worker is
        to end, or other domains had the turn for ``patience`` seconds.
        """
        idle()

        def rest(why: str) -> None:
            self.rest(why)
            idle()

        while self._scheduler.take(self._domain, self.over, patience):
            if not self._capacity.wait(self.over, self._paused, rest):
                return False
            if self._scheduler.has(self._domain):
                return True
        return False

    def working(self) -> AbstractContextManager[None]:
        """Return a context that measures the work inside, to rest after it."""
        return self._capacity.working()

    @property
    def worked(self) -> float:
        """CPU seconds of the last work on each core."""
        return self._capacity.worked

    @contextmanager
    def step(self, idle: Callable[[], bool]) -> Generator[None]:
        """Measure the micro-step inside, which gives way to serving; see ``give_way``."""
        with self._capacity.working(), yielding(partial(self.give_way, idle)):
            yield

    def give_way(self, idle: Callable[[], bool]) -> None:
        """Within a micro-step, stand still while serving leaves no room, and call ``idle`` now and then.

        The micro-step goes on to its end at once when the worker is to rest or to end, or when ``idle`` returns True.
        """
        wanted = False

        def look(share: float) -> None:
            nonlocal wanted
            if not share:
                self._say("yielding", "")
            wanted = idle()

        self._capacity.give_way(lambda: wanted or self.paused or self.over.is_set(), look)
