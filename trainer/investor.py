"""Account of a domain's training: reports of replicas, the current price, and the decisions of the fund."""

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
from trainer.capacity import SpareCapacity
from trainer.reporter import TrainingReporter

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_REPORT_SECONDS = 60.0
_GATHER_SECONDS = 1.0
_SELDOM_SECONDS = 3.0  # while the fund does not cover training, as each read is charged
_RATE_SECONDS = 300.0  # averaging time of the replicas' load from the domain

SLOT_SECONDS = 2.0
"""Length of a random pause, in seconds."""

PAUSED_SHARE = 0.1
"""Share of slots in which all trainers of a machine pause while requests run."""

_SLOTS = 256
_EVERY = 16  # slots between two estimates of the slowing: a jackknife takes about 10 ms
_EXPECTED = 0.05  # prior standard deviation of the logarithm of a slowing


def is_pause(now: float) -> bool:
    """Return whether trainers pause at the monotonic time ``now``; the same for all trainers of a machine."""
    return unit_hash(str(int(now / SLOT_SECONDS)).encode(), b"pause") < PAUSED_SHARE


class SlowdownMeter:
    """Meter of the step seconds that requests lose to training, by comparison with random pauses."""

    def __init__(self) -> None:
        """Start a meter without slots."""
        self._slots: deque[Slot] = deque(maxlen=_SLOTS)
        self._last: tuple[int, int, int, float, float] | None = None
        self._trained, self._new = False, 0
        self.share = 0.0
        """Estimated share of step seconds that requests lose while training runs."""

    def observe(self, loads: Iterable[ReplicaLoad], trained: float, now: float) -> float:
        """Add a reading of the loads.

        Args:
            loads: the loads of all replicas of the machine.
            trained: CPU seconds that this trainer has computed.
            now: the monotonic time.

        Returns:
            Step seconds lost in the slot that ended since the last reading; 0 within a slot.
        """
        slot, last = int(now / SLOT_SECONDS), self._last
        if last is not None and last[0] == slot:
            return 0.0
        loads = list(loads)
        steps, rows = sum(load.steps for load in loads), sum(load.rows for load in loads)
        seconds = sum(load.step_seconds for load in loads)
        self._last = (slot, steps, rows, seconds, trained)
        if last is None or slot != last[0] + 1:
            self._trained = False
            return 0.0
        steps, rows, seconds, worked = steps - last[1], rows - last[2], seconds - last[3], trained - last[4]
        rests, trained_before = is_pause(last[0] * SLOT_SECONDS), self._trained
        self._trained = worked > 0 and not rests
        if steps <= 0 or seconds <= 0:  # no request ran, or a replica started or ended
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
    """Account of one domain: keeps its fund and decides on the next slice of training.

    The fund pays ``trainer.price`` core seconds for each CPU second while requests run, and ``trainer.price_idle``
    otherwise. It also pays ``trainer.price`` for each core second that requests lose. Until a replica reports its work,
    training runs without a decision. Changed decisions are reported, and the current decision once a minute.
    """

    def __init__(
        self,
        settings: Settings,
        loads: ReplicaLoads,
        capacity: SpareCapacity,
        reporter: TrainingReporter,
        clock: Callable[[], float],
    ) -> None:
        """Create the account of ``settings.domain``; ``clock`` returns the CPU seconds of its training."""
        self._settings, self._loads, self._capacity, self._reporter = settings, loads, capacity, reporter
        self._clock, self._charged = clock, clock()
        self._threads = cores(settings.engine.threads)
        self._slowdown = SlowdownMeter()
        self._busy: dict[str, float] = {}
        self._uptake = self._rate = 0.0
        self._is_known = False
        self._looked_at = self._reported_at = -math.inf
        self._verdict: tuple[bool, int] | None = None
        self._covered: int | None = None
        self.decision: Decision | None = None
        """Last decision; None before the first."""

    def observe_loads(self, loads: Mapping[str, ReplicaLoad]) -> None:
        """Charge the CPU seconds since the last reading, and the step seconds that requests lost."""
        now = self._clock()
        seconds, self._charged = now - self._charged, now
        lost = self._threads * self._slowdown.observe(loads.values(), now, time.monotonic())
        self._reporter.fund.learn(seconds, self._price, self._settings.trainer.price * lost)
        self._reporter.cost.charge(contended=seconds if self._capacity.requests_run else 0.0, lost=lost)

    def read_work(self) -> None:
        """Read the work of replicas for the domain, once a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        elapsed, self._looked_at = now - self._looked_at, now
        try:
            replicas = self._loads.work()
        except RedisError as error:
            logger.debug("the work of replicas cannot be read, the last values stay: %s", error)
            return
        work = {name: work[self._settings.domain] for name, work in replicas.items() if self._settings.domain in work}
        self._is_known = self._is_known or bool(replicas)
        busy = self._threads * self._new_step_seconds(work)
        decay = math.exp(-elapsed / _RATE_SECONDS)
        self._rate = decay * self._rate + (1 - decay) * busy / elapsed
        self._uptake = sum(replica.uptake for replica in work.values())
        self._reporter.fund.serve(busy)

    def next_slice(self, learner: Learner) -> Decision | None:
        """Return the decision on the next slice; None until a replica reports its work."""
        self.read_work()
        if not self._is_known:
            return None
        is_started = self._covered == learner.next_candidate
        decision = decide(self._reporter.fund, self._price, self._settings.economy.max_loss, is_started)
        self._covered = learner.next_candidate if decision.begins and self._price else None
        self.decision = decision
        verdict, now = (decision.begins, learner.next_candidate), time.monotonic()
        if verdict != self._verdict or now - self._reported_at >= _REPORT_SECONDS:
            self._verdict, self._reported_at = verdict, now
            self._reporter.record_decision(decision)
        return decision

    def worth(self, learner: Learner) -> float:
        """Return the forecast of core seconds per second that the next version saves; domains are ranked by it."""
        return forecast(self._reporter.fund, learner.log_gain, self._rate)

    def charge_swap(self) -> None:
        """Charge the core seconds that all replicas need to take up a version, at the current price."""
        self._reporter.fund.learn(0.0, 0.0, self._price * self._uptake)
        self._reporter.cost.charge(lost=self._uptake)

    def stream_interval(self, awaited: bool) -> float:
        """Return the seconds between reads of the stream while nothing is trained on; fewer if it is ``awaited``."""
        return _GATHER_SECONDS if awaited or self.decision is None or self.decision.begins else _SELDOM_SECONDS

    @property
    def _price(self) -> float:
        """Current price of a core second."""
        trainer = self._settings.trainer
        return trainer.price if self._capacity.requests_run else trainer.price_idle

    def _new_step_seconds(self, work: Mapping[str, DomainWork]) -> float:
        """Return the seconds of steps since the last reading; of a restarted replica, since its restart."""
        seconds = 0.0
        for name, replica in work.items():
            before = self._busy.get(name, replica.busy)
            seconds += replica.busy - before if replica.busy >= before else replica.busy
        self._busy = {name: replica.busy for name, replica in work.items()}
        return seconds
