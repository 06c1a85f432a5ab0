"""The account of a domain's training: what replicas report, the price of the moment, and the fund's decision."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from redis.exceptions import RedisError

from osd.config import Settings
from osd.economy.training import Decision, Slot, decide, forecast, slowing
from osd.hashing import unit_hash
from osd.learning.online import Learner
from osd.registry.replica_loads import DomainWork, ReplicaLoad, ReplicaLoads
from osd.runtime.device import cores
from trainer.capacity import Capacity
from trainer.reporter import TrainingReporter

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_TELL_SECONDS = 60.0
_GATHER_SECONDS = 1.0
_SELDOM_SECONDS = 3.0  # where the fund does not cover training: a look is charged too
_RATE_SECONDS = 300.0  # of the past that tells how busy replicas are for the domain

SLOT_SECONDS = 2.0
"""Length of a random pause."""

PAUSED_SHARE = 0.1
"""Share of slots in which no trainer of the machine computes beside requests."""

_SLOTS = 256
_EVERY = 16  # slots, after which the slowing is estimated again: a jackknife takes some 10 ms
_EXPECTED = 0.05  # standard deviation of the logarithm of a slowing, before any measurement


def paused(now: float) -> bool:
    """Whether trainers pause in the slot of ``now``, a monotonic time: all those of a machine in the same slots."""
    return unit_hash(str(int(now / SLOT_SECONDS)).encode(), b"pause") < PAUSED_SHARE


class Slowing:
    """Step seconds that requests lose beside training, by comparison with random slots in which it pauses."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=_SLOTS)
        self._last: tuple[int, int, int, float, float] | None = None
        self._trained, self._new = False, 0
        self.share = 0.0
        """Estimated share of step seconds that is lost while training runs."""

    def observe(self, loads: Iterable[ReplicaLoad], trained: float, now: float) -> float:
        """Take in a look at the loads.

        Args:
            loads: of all replicas of the machine.
            trained: CPU seconds that this trainer has computed.
            now: monotonic time.

        Returns:
            Step seconds lost in the slot that ended since the last look, 0 within a slot.
        """
        place, last = int(now / SLOT_SECONDS), self._last
        if last is not None and last[0] == place:
            return 0.0
        loads = list(loads)
        steps, rows = sum(load.steps for load in loads), sum(load.rows for load in loads)
        seconds = sum(load.step_seconds for load in loads)
        self._last = (place, steps, rows, seconds, trained)
        if last is None or place != last[0] + 1:
            self._trained = False
            return 0.0
        steps, rows, seconds, worked = steps - last[1], rows - last[2], seconds - last[3], trained - last[4]
        rests, trained_before = paused(last[0] * SLOT_SECONDS), self._trained
        self._trained = worked > 0 and not rests
        if steps <= 0 or seconds <= 0:  # no request ran, or a replica came or went
            return 0.0
        if rests:
            if trained_before:
                self._slots.append(Slot(True, steps, rows, seconds))
            return 0.0
        if not worked:
            return 0.0
        self._slots.append(Slot(False, steps, rows, seconds))
        self._new += 1
        if self._new % _EVERY == 0:
            log, error = slowing(self._slots)
            certainty = 0.0 if math.isinf(error) else _EXPECTED**2 / (_EXPECTED**2 + error**2)
            self.share = -math.expm1(-max(certainty * log, 0.0))
        return self.share * seconds


class Investor:
    """Keeps the fund of one domain and decides on its next slice of learning.

    Beside requests a CPU second costs ``trainer.price``, else ``trainer.price_idle``. As long as no replica reports
    its work, training goes on. ``told`` hears of changed decisions, and once a minute.
    """

    def __init__(
        self,
        settings: Settings,
        loads: ReplicaLoads,
        capacity: Capacity,
        reporter: TrainingReporter,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` gives the CPU seconds of the domain's training."""
        self._settings, self._loads, self._capacity, self._reporter = settings, loads, capacity, reporter
        self._clock, self._charged = clock, clock()
        self._threads = cores(settings.engine.threads)
        self._slowing = Slowing()
        self._busy: dict[str, float] = {}
        self._uptake = self._rate = 0.0
        self._is_known = False
        self._looked_at = self._told_at = -math.inf
        self._verdict: tuple[bool, int] | None = None
        self._covered: int | None = None
        self.decided: Decision | None = None
        """The last decision, None before the first."""

    def seen(self, loads: Mapping[str, ReplicaLoad]) -> None:
        """Charge what was computed since the last look, and what requests of ``loads`` lost by it."""
        now = self._clock()
        seconds, self._charged = now - self._charged, now
        lost = self._threads * self._slowing.observe(loads.values(), now, time.monotonic())
        beside = self._capacity.beside_requests
        self._reporter.fund.learn(seconds, self._price, lost)
        self._reporter.cost.charge(beside=seconds if beside else 0.0, lost=lost)

    def look(self) -> None:
        """Read what replicas did for the domain, once a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        passed, self._looked_at = now - self._looked_at, now
        try:
            replicas = self._loads.work()
        except RedisError as error:
            logger.debug("the work of replicas cannot be read, what was known stays: %s", error)
            return
        work = {name: work[self._settings.domain] for name, work in replicas.items() if self._settings.domain in work}
        self._is_known = self._is_known or bool(replicas)
        busy = self._threads * self._done(work)
        kept = math.exp(-passed / _RATE_SECONDS)
        self._rate = kept * self._rate + (1 - kept) * busy / passed
        self._uptake = sum(one.uptake for one in work.values())
        self._reporter.fund.serve(busy)

    def next_slice(self, learner: Learner) -> Decision | None:
        """Decide; None as long as no replica reports its work."""
        self.look()
        if not self._is_known:
            return None
        begun = self._covered == learner.next_candidate
        decision = decide(self._reporter.fund, self._price, self._settings.economy.max_loss, begun)
        self._covered = learner.next_candidate if decision.begins and self._price else None
        self.decided = decision
        verdict, now = (decision.begins, learner.next_candidate), time.monotonic()
        if verdict != self._verdict or now - self._told_at >= _TELL_SECONDS:
            self._verdict, self._told_at = verdict, now
            self._reporter.decided(decision)
        return decision

    def worth(self, learner: Learner) -> float:
        """Forecast of the core seconds a second that the next version saves, which ranks domains."""
        return forecast(self._reporter.fund, learner.promised, self._rate)

    def taken_up(self) -> None:
        """Charge what replicas need to take up a version."""
        self._reporter.fund.learn(0.0, 0.0, self._price * self._uptake)
        self._reporter.cost.charge(lost=self._uptake)

    def patience(self, awaited: bool) -> float:
        """Seconds from one look at the stream to the next where nothing is trained on; less if it is ``awaited``."""
        return _GATHER_SECONDS if awaited or self.decided is None or self.decided.begins else _SELDOM_SECONDS

    @property
    def _price(self) -> float:
        """Of a second of a core at the moment."""
        trainer = self._settings.trainer
        return trainer.price if self._capacity.beside_requests else trainer.price_idle

    def _done(self, work: Mapping[str, DomainWork]) -> float:
        """Seconds of steps since the last look; of a replica that restarted, since then."""
        done = 0.0
        for name, one in work.items():
            before = self._busy.get(name, one.busy)
            done += one.busy - before if one.busy >= before else one.busy
        self._busy = {name: one.busy for name, one in work.items()}
        return done
