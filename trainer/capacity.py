"""Training in what serving leaves over: lowest priority, and pauses while serving needs the machine.

Serving needs it while a request waits in a replica of this machine, and while the time between two tokens there is
above ``trainer.latency_objective_ms``. A replica tells of waiting requests within 0.02 s, and of its latency every
0.1 s, from a second after the first look on and as long as somebody looks. Training looks every 0.04 s, between two
operations of a micro-step too: it yields within 200 ms of the first waiting request, and within 300 ms of a latency
that is too long.

Beside requests that run, training takes at most ``trainer.duty`` of its cores' time: even at the lowest priority a core
that is shared makes the forwards of all cores wait. It pauses in random seconds, which show what requests lose by it.
While nothing runs, training goes on without rests. ``trainer.investor`` decides whether it is paid at all.

All seconds of work are CPU seconds. How much one operation takes is the machine's affair: where all of a micro-step's
are short, as on the CPUs that osd is measured on, the two promises hold for a core that training finds free.
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
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.runtime.device import several_cores

logger = logging.getLogger(__name__)

_POLL = 0.02
_LOOK = 0.04  # between two looks at the loads within a micro-step
_RETRY = 1.0
_BLIND_SECONDS = 5.0  # for which what was last known of the load may stand


def lower_priority(threads: int) -> None:
    """Give the calling thread ``threads`` cores, and it and every thread that it starts the lowest priority."""
    # On Linux the niceness belongs to the thread, so that status calls stay quick.
    os.nice(19)
    several_cores(threads)


@contextmanager
def yielding(pause: Callable[[], None]) -> Generator[None]:
    """Call ``pause`` whenever this thread saves a tensor for the backward pass, and whenever it reads one again.

    That is before almost every operation of forward and backward, of a drafter as of a frozen target that gradients
    run through. Results do not change.
    """

    def keep(tensor: Tensor) -> Tensor:
        pause()
        return tensor.detach()  # the tensor itself would hold the graph that holds it

    def read(tensor: Tensor) -> Tensor:
        pause()
        return tensor

    with saved_tensors_hooks(keep, read):
        yield


class Capacity:
    """Says when to train.

    ``clock`` gives the CPU seconds that each of its cores has worked; ``pauses`` says whether training pauses beside
    requests at a monotonic time. ``seen`` is shown the loads at each look, ``beside_requests`` says whether any ran
    then, and ``worked`` are the CPU seconds of the last piece of work, on each core.
    """

    def __init__(
        self,
        loads: ReplicaLoads,
        settings: TrainerSettings,
        clock: Callable[[], float],
        pauses: Callable[[float], bool] = lambda now: False,
    ) -> None:
        self._loads, self._pauses = loads, pauses
        self._settings = settings
        self._clock = clock
        self._unreadable_until = 0.0
        self._known, self._known_at = 0.0, -math.inf
        self._began = self._looked = -math.inf  # the last piece of work, and the last look within one
        self._before = self.worked = 0.0
        self.reachable, self.beside_requests = True, False
        self.seen: Callable[[Mapping[str, ReplicaLoad]], None] = lambda loads: None

    def spare(self, glance: bool = False) -> float:
        """The share of the time that may be trained now.

        0 while in some replica a request waits or tokens come slower than the objective allows, and in a random pause;
        ``trainer.duty`` while requests run, all of it otherwise. When the loads cannot be read it stays for five
        seconds, and is 0 then: serving may need anything.

        A ``glance`` may see what was a second ago, and has no replica tell more often.
        """
        now = time.monotonic()
        if now >= self._unreadable_until:
            try:
                self._known, self._known_at = self._share(self._loads.read(glance)), now
            except RedisError as error:
                if self.reachable:
                    logger.warning("the loads of replicas cannot be read, training waits until they can: %s", error)
                self.reachable = False
                self._unreadable_until = now + _RETRY
            else:
                self.reachable = True
        return self._known if now - self._known_at < _BLIND_SECONDS else 0.0

    def _share(self, loads: Mapping[str, ReplicaLoad]) -> float:
        objective = self._settings.latency_objective_ms or math.inf
        self.beside_requests = any(load.running > 0 for load in loads.values())
        self.seen(loads)
        if any(load.waiting > 0 or load.inter_token_ms > objective for load in loads.values()):
            return 0.0
        if not self.beside_requests:
            return 1.0
        return 0.0 if self._pauses(time.monotonic()) else self._settings.duty

    def wait(self, stop: threading.Event, paused: threading.Event, say: Callable[[str], None]) -> bool:
        """Return when a micro-step may run, or False when ``stop`` was set; ``say`` hears at each look why not."""
        while not stop.is_set():
            if paused.is_set():
                say("paused")
            elif (share := self.spare()) == 0:
                say("yielding")
            elif time.monotonic() - self._began >= self.worked / share:
                return True
            stop.wait(_POLL)
        return False

    @contextmanager
    def working(self) -> Generator[None]:
        """Take note of the work inside, to rest after it."""
        self._began, self._before = time.monotonic(), self._clock()
        try:
            yield
        finally:
            self.worked = self._clock() - self._before

    def give_way(self, leave: Callable[[], bool], look: Callable[[float], None]) -> None:
        """Within ``working``, as often as one likes: wait while serving needs the machine, and rest beside requests.

        No longer than until ``leave`` says that the work is to end; while it waits ``look`` hears the share that may
        be trained now.
        """
        if time.monotonic() - self._looked < _LOOK:
            return
        while not leave():
            self._looked, share, worked = time.monotonic(), self.spare(), self._clock() - self._before
            if share == 1 or (share and time.monotonic() - self._began >= worked / share):
                return
            look(share)
            time.sleep(_POLL)
