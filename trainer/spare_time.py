"""When the worker of a domain may compute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from trainer.capacity import Capacity, yielding
from trainer.domain_scheduler import DomainScheduler

_GLANCE = 2.0  # seconds of sleep between two calls of who has to say that it is there


class SpareTime:
    """A worker's time: in its turn among the domains, where serving leaves room, and neither paused nor over.

    ``over`` is set when the worker shall end, by ``end``. ``say`` hears of the worker's state, and what is missing.
    """

    def __init__(
        self, domain: str, scheduler: DomainScheduler, capacity: Capacity, say: Callable[[str, str], None]
    ) -> None:
        self._domain, self._scheduler, self._capacity, self._say = domain, scheduler, capacity, say
        self.over, self._paused, self._resting = threading.Event(), threading.Event(), threading.Event()
        self._woken = threading.Event()  # while it is paused or over

    def end(self) -> None:
        """Leave none of it from now on."""
        self.over.set()
        self._woken.set()

    def pause(self, timeout: float) -> bool:
        """Leave no more of it; True as soon as the worker rests, False when it does not within ``timeout`` seconds."""
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

    def rest(self, why: str) -> None:
        """Let the other domains have their turn."""
        self._scheduler.give(self._domain)
        self._say(why, "")
        if why == "paused":
            self._resting.set()
            self.over.wait(0.02)

    def sleep(self, seconds: float, idle: Callable[[], object]) -> None:
        """Do nothing for so long, or until it is to pause or over, but call ``idle`` now and then."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._woken.wait(min(left, _GLANCE)):
            idle()

    def wait(self, idle: Callable[[], object], patience: float = math.inf) -> bool:
        """Wait until a micro-step may run; False when it is over, or other domains had the turn for so long.

        ``idle`` is called at first, and now and then while serving leaves no room.
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

    @contextmanager
    def step(self, idle: Callable[[], bool]) -> Generator[None]:
        """Do one micro-step inside, see ``give_way``."""
        with self._capacity.working(), yielding(partial(self.give_way, idle)):
            yield

    def give_way(self, idle: Callable[[], bool]) -> None:
        """Within a micro-step: stand still while serving leaves no room, and call ``idle`` now and then meanwhile.

        Where the worker is to rest, or to end, or ``idle`` says that it is wanted, the micro-step goes on to its end at
        once.
        """
        wanted = False

        def look(share: float) -> None:
            nonlocal wanted
            if not share:
                self._say("yielding", "")
            wanted = idle()

        self._capacity.give_way(lambda: wanted or self.paused or self.over.is_set(), look)
