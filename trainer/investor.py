"""Whether to train now: the learner's value at the traffic that replicas report, at the price of the moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from osd.config import Settings
from osd.demand import Workload
from osd.learning.gate import GateDecision
from osd.learning.online import Learner
from osd.learning.value import Investment
from osd.registry.replica_loads import ReplicaLoads
from osd.runtime.device import cores
from trainer.capacity import Capacity
from trainer.slowing import Slowing

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0

Tell = Callable[[Investment], None]


class Investor:
    """Decides for one domain, once a second, on the next slice of learning.

    While no request runs a CPU second costs ``trainer.price_idle``; beside requests ``trainer.price``, for itself and
    for what it was measured to take from their rounds. As long as no replica has said what is asked of it, training
    goes on: there is nothing to reckon with. ``told`` hears of each decision that differs from the one before,
    and of the first one after each gate.
    """

    def __init__(
        self, settings: Settings, loads: ReplicaLoads, capacity: Capacity, slowing: Slowing, told: Tell
    ) -> None:
        self._settings, self._loads, self._capacity = settings, loads, capacity
        self._slowing, self._told = slowing, told
        self._threads = cores(settings.engine.threads)
        self._workloads: list[Workload] | None = None
        self._looked_at: float | None = None
        self._verdict: tuple[bool, int] | None = None
        self._decided: tuple[tuple[float, bool, int], Investment] | None = None

    def next_slice(self, learner: Learner) -> Investment | None:
        """The decision; None as long as there is nothing to reckon with.

        It stays for a second, until a gate, or until requests come or end: asking costs next to nothing.
        """
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at >= _LOOK_SECONDS:
            if self._looked_at is not None:
                learner.value.horizon.passed(now - self._looked_at)
            self._looked_at = now
            self._look()
        if self._workloads is None:
            return None
        trainer, beside = self._settings.trainer, self._capacity.beside_requests
        moment = (self._looked_at, beside, learner.next_candidate)
        if self._decided is not None and self._decided[0] == moment:
            return self._decided[1]
        price = trainer.price * (1 + self._threads * self._slowing.per_second) if beside else trainer.price_idle
        pace = trainer.threads * trainer.workers * (trainer.duty if beside else 1.0)
        investment = learner.value.invest(self._workloads, price, self._threads, pace)
        verdict = (investment.pays, learner.next_candidate)
        if verdict != self._verdict:
            self._verdict = verdict
            self._told(investment)
        self._decided = moment, investment
        return investment

    @property
    def decided(self) -> Investment | None:
        """The last decision, None before the first."""
        return None if self._decided is None else self._decided[1]

    def worth(self, learner: Learner, decision: GateDecision) -> dict[str, Any]:
        """What a candidate is expected to save, for its manifest; nothing while the traffic is not known.

        ``saving_rate`` are seconds of a core in each second, against the version in service; ``horizon`` the seconds
        for which that is expected to stay.
        """
        if self._workloads is None or decision.candidate is None or decision.baseline is None:
            return {}
        before, after = decision.baseline.length_beside_recall, decision.candidate.length_beside_recall
        rate = learner.value.traffic(self._workloads).saving_rate(before, after) * self._threads
        return {"saving_rate": round(rate, 6), "horizon": round(learner.value.horizon.seconds, 1)}

    def _look(self) -> None:
        try:
            replicas = self._loads.workloads()
        except RedisError as error:
            logger.debug("what is asked of replicas cannot be read, what was known stays: %s", error)
            return
        if replicas:
            domain = self._settings.domain
            self._workloads = [workloads[domain] for workloads in replicas.values() if domain in workloads]
