"""Spare capacity for training: lowest priority, and pauses while serving needs the machine.

Serving needs the machine while a request waits in one of its replicas, or while the time between two tokens exceeds
``trainer.latency_objective_ms``. A replica reports at once that a first request waits or runs. It reports its latency
every 0.1 s, from one second after the first read of its load, while a process reads it. Training reads the loads every
0.01 s, between two operations of a micro-step too. So it yields within 200 ms of the first waiting request, and within
300 ms of a latency above the objective. While it waits, it reads them every 0.1 s.

While no request runs, training does not rest. If that was at least ``trainer.duty`` of the last minutes, it never runs
beside requests: even at the lowest priority, a shared core delays the forwards of all cores. Otherwise it takes at most
``trainer.duty`` of its cores' time while requests run. From the first request until a minute after the last it also
pauses in random slots, which measure how much requests lose to training, also to training between requests.
``trainer.investor`` decides whether training is worth its cost.

All seconds of work are CPU seconds. Both limits hold on an idle core, if all operations of a micro-step are short, as
on the CPUs that osd is measured on.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from redis.exceptions import RedisError
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from osd.config import TrainerSettings
from osd.economy.idle import IdleShare
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.runtime.device import several_cores

logger = logging.getLogger(__name__)

_LOOK = 0.01  # seconds between two reads of the loads within a micro-step
_WAIT = 0.1  # seconds between two reads while training waits: each read takes CPU time from the requests that run
_RETRY = 1.0
_BLIND_SECONDS = 5.0  # validity of the last loads while Redis is down
_MEASURED_SECONDS = 60.0  # after the last request, in which random pauses still measure what training costs


def lower_priority(threads: int) -> None:
    """Let the calling thread use ``threads`` cores, with the lowest priority for it and for threads it starts.

    On Linux it computes only while a core has nothing else to do, and any other thread displaces it at once. That holds
    for this thread alone, so status calls in other threads stay fast. Where this is impossible, it gets niceness 19.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # another system, or a sandbox that refuses it
        os.nice(19)
    several_cores(threads)


@contextmanager
def yielding(pause: Callable[[], None]) -> Generator[None]:
    """Call ``pause`` whenever this thread saves a tensor for the backward pass or reads a saved tensor.

    These are almost all operations of forward and backward, both in a drafter and in a frozen target that gradients
    pass through. Results do not change.
    """

    def keep(tensor: Tensor) -> Tensor:
        pause()
        return tensor.detach()  # a reference to the tensor itself would form a cycle with its graph

    def read(tensor: Tensor) -> Tensor:
        pause()
        return tensor

    with saved_tensors_hooks(keep, read):
        yield


class SpareCapacity:
    """Spare capacity of a machine for one trainer.

    Attributes:
        reachable: whether the loads could be read the last time.
        requests_run: whether requests ran at the last read of the loads.
        obstacle: why there was no spare capacity at the last call of ``spare``; "" if there was.
        on_loads: called with the loads after each read.
        worked: CPU seconds of the last piece of work, on each core.
    """

    def __init__(
        self,
        loads: ReplicaLoads,
        settings: TrainerSettings,
        clock: Callable[[], float],
        pauses: Callable[[float], bool] = lambda now: False,
    ) -> None:
        """Create the spare capacity.

        ``clock`` returns the CPU seconds that each core of this trainer has worked. ``pauses`` returns whether training
        pauses at a monotonic time, unless no request ran in the last minute.
        """
        self._loads, self._pauses = loads, pauses
        self._settings = settings
        self._clock = clock
        self._unreadable_until = 0.0
        self._last_share, self._read_at, self._ran_at = 0.0, -math.inf, -math.inf
        self._began = self._looked = -math.inf  # start of the last work, and last check within work
        self._before = self.worked = 0.0
        self._idle = IdleShare()
        self.reachable, self.requests_run, self.obstacle = True, False, ""
        self.on_loads: Callable[[Mapping[str, ReplicaLoad]], None] = lambda loads: None

    def spare(self, glance: bool = False) -> float:
        """Return the share of the time that training may use now.

        It is 0 in a random pause, while a request waits or the latency exceeds the objective in any replica, and while
        requests run if there was enough time without requests. Otherwise it is 1 while no request runs, and
        ``trainer.duty`` while requests run. When the loads cannot be read it stays the same for five seconds, and is 0
        after that.

        Args:
            glance: accept loads that are up to one second old, so that replicas need not report more often.
        """
        now = time.monotonic()
        if now >= self._unreadable_until:
            try:
                self._last_share = self._share(self._loads.read(glance), now)
                self._read_at = now
            except RedisError as error:
                if self.reachable:
                    logger.warning("the loads of replicas cannot be read, training waits for Redis: %s", error)
                self.reachable = False
                self._unreadable_until = now + _RETRY
            else:
                self.reachable = True
        if now - self._read_at < _BLIND_SECONDS:
            return self._last_share
        self.obstacle = "Redis does not answer, so the loads of replicas are unknown"
        return 0.0

    def _share(self, loads: Mapping[str, ReplicaLoad], now: float) -> float:
        self.requests_run = any(load.running > 0 for load in loads.values())
        if self.requests_run:
            self._ran_at = now
        if (elapsed := now - self._read_at) < _BLIND_SECONDS:
            self._idle.observe(not self.requests_run, elapsed)
        self.on_loads(loads)
        self.obstacle = self._find_obstacle(loads, now)
        if self.obstacle:
            return 0.0
        return self._settings.duty if self.requests_run else 1.0

    def _find_obstacle(self, loads: Mapping[str, ReplicaLoad], now: float) -> str:
        """Return why training must not run now, or "" if it may run."""
        objective = self._settings.latency_objective_ms or math.inf
        if any(load.waiting > 0 for load in loads.values()):
            return "a request waits in a replica"
        if any(load.inter_token_ms > objective for load in loads.values()):
            return f"the time between two tokens is above trainer.latency_objective_ms, {objective:g} ms"
        if self.requests_run and self._idle.suffices(self._settings.duty):
            return f"no request ran in {self._idle.value:.0%} of the last minute, and training waits for such moments"
        if now - self._ran_at < _MEASURED_SECONDS and self._pauses(now):
            return "a short random pause measures how much training slows requests"
        return ""

    def wait(
        self,
        stop: threading.Event,
        paused: threading.Event,
        set_state: Callable[[str], None],
        patience: float = math.inf,
    ) -> bool:
        """Wait until a micro-step may run.

        Args:
            stop: ends the wait.
            paused: prolongs the wait while it is set.
            set_state: called with "paused" or "yielding" at each check that fails.
            patience: the longest wait, in seconds.

        Returns:
            False when ``stop`` was set, or after ``patience`` seconds.
        """
        deadline = time.monotonic() + patience
        while not stop.is_set() and time.monotonic() < deadline:
            rest = math.inf
            if paused.is_set():
                set_state("paused")
            elif (share := self.spare()) == 0:
                set_state("yielding")
            elif (rest := self._rest(share, self.worked)) <= 0:
                return True
            stop.wait(min(rest, _WAIT))
        return False

    @contextmanager
    def working(self) -> Generator[None]:
        """Measure the work inside the context; ``wait`` rests after it."""
        self._began, self._before = time.monotonic(), self._clock()
        try:
            yield
        finally:
            self.worked = self._clock() - self._before

    def give_way(self, must_end: Callable[[], bool], on_wait: Callable[[float], None]) -> None:
        """Wait while serving needs the machine, and rest while requests run.

        Call it often within ``working``: most calls return at once.

        Args:
            must_end: returns whether the wait must end at once.
            on_wait: called during the wait, with the share of the time that training may use.
        """
        if time.monotonic() - self._looked < _LOOK:
            return
        while not must_end():
            self._looked, share = time.monotonic(), self.spare()
            if (rest := self._rest(share, self._clock() - self._before)) <= 0:
                return
            on_wait(share)
            time.sleep(min(rest, _WAIT))

    def _rest(self, share: float, worked: float) -> float:
        """Return the seconds until ``worked`` is no more than ``share`` of the time since the work began."""
        if share in (0, 1):
            return 0.0 if share else math.inf
        return self._began + worked / share - time.monotonic()
