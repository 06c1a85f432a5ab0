"""The reporter of a domain's training: its state and fund, counts and costs for serving, and events."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.economy.training import Decision, Fund
from osd.learning.online import Learned, Learner
from osd.learning.replay import states_wanted
from osd.registry.learnt import Learnt
from osd.registry.training import Account, Training, TrainingReports, VersionEffect
from trainer.rollout import Service
from trainer.state import Spent, TrainerState

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_EVENT_SECONDS = 1.0


class CostMeter:
    """Core seconds that training has taken.

    All that the trainer computes is charged, on all threads of all its processes: micro-steps, gates, candidates that
    were rejected, reading the stream, checkpoints. ``clock`` is CPU time, so that a trainer that stands back for
    serving costs nothing while it waits. What was spent since the last version belongs to the next one.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._mark = clock()
        self._spent = Spent()

    def spent(self) -> Spent:
        """Return what was spent until now."""
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        self._add(cpu=seconds, unpublished=seconds)
        return self._spent

    def charge(self, beside: float = 0.0, lost: float = 0.0) -> None:
        """Note CPU seconds ``beside`` requests, and add core seconds that replicas ``lost``."""
        self._add(beside=beside, slowed=lost, unpublished=lost)

    def published(self) -> None:
        """Take note of a version, which all that was spent since the one before belongs to."""
        self._spent = msgspec.structs.replace(self.spent(), unpublished=0.0)

    def resume(self, saved: Spent, reported: Training) -> None:
        """Go on from the checkpoint or from what was ``reported``, whichever counts more."""
        missing = max(reported.cost - saved.total, 0.0)
        if missing:
            unpublished = saved.unpublished + missing
            saved = Spent(reported.cpu_seconds, reported.beside_seconds, reported.slowed_seconds, unpublished)
        own, self._spent = self.spent(), saved
        self._add(**msgspec.structs.asdict(own))

    def _add(self, **seconds: float) -> None:
        sums = {name: getattr(self._spent, name) + value for name, value in seconds.items()}
        self._spent = msgspec.structs.replace(self._spent, **sums)


class TrainingReporter:
    """Keeps the state of a domain's training, its cost, its fund and the requests it learnt from, and reports them.

    No reported count ever falls, whatever checkpoint this trainer went on from. ``learnt`` are the requests that no
    version's manifest names yet.
    """

    def __init__(
        self,
        service: Service,
        cost: CostMeter,
        reports: TrainingReports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.cost, self.learnt, self.fund = TrainerState(), cost, Learnt(), Fund()
        self.trial: VersionEffect | None = None
        """Measured effect of the version on trial."""
        self._paid_back: float | None = None
        self._service, self._reports, self._clock = service, reports, clock
        self._reported: Training | None = None  # until Redis has returned what was reported before
        self._reported_at = self._event_at = -_REPORT_SECONDS

    def status(self, learner: Learner | None) -> dict[str, Any]:
        """Return the ``TrainerState`` as a dict; from any thread."""
        if learner is not None:
            self.state.follow(learner)
        return self.state.status()

    def learned(self, learner: Learner, learned: Learned) -> None:
        """Take in a micro-step; at most one a second becomes an event."""
        self.learnt.add(request_id for request_id, _ in learned.fresh)
        if not learned.step.skipped:
            self.state.loss = learned.step.loss
        self.state.follow(learner)
        now = self._clock()
        if now - self._event_at > _EVENT_SECONDS:
            self._event_at = now
            self._service.tell("train_step", None, **self.state.event(learner, self.cost.spent()))

    def decided(self, decision: Decision) -> None:
        """Report a decision on the next slice of training as an event."""
        spent, fund = self.cost.spent(), self.fund
        figures = {"fund": decision.fund, "needed": decision.needed, "certain": fund.certain, "saved": fund.saved}
        figures |= {"cost": spent.total, "fruitless": fund.fruitless}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        self._service.tell("fund", None, begins=decision.begins, **rounded)

    def published(self, stable: int) -> None:
        """Take in that a version was published, while ``stable`` is in service."""
        self.state.version = stable
        self.state.published += 1
        self.cost.published()
        self.learnt.published()

    def report(self, learner: Learner | None, decision: Decision | None, worth: Callable[[Learner], float]) -> None:
        """Report to serving, at most once a second; without Redis it is reported later.

        Args:
            learner: of the domain, None before there is one.
            decision: the last one on the next slice, None before the first.
            worth: see ``osd.economy.training.forecast``.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        now, domain = self._clock(), self._service.domain
        if learner is None or now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        self.state.follow(learner)
        spent = self.cost.spent()
        wanted = states_wanted(learner.replay.fresh_records, decision is None or decision.begins)
        training = self.state.report(learner, spent, self._account(spent, decision, worth(learner)), wanted)
        try:
            self._reported = training.at_least(self._before() if self._reported is None else self._reported)
            with self._service.lease.held():
                self._reports.set(domain, self._reported)
        except (RedisError, OSError) as error:
            logger.debug("training cannot be reported: %s", error)

    def _account(self, spent: Spent, decision: Decision | None, worth: float) -> Account:
        fund, gain = self.fund, self.fund.gain
        if fund.certain < spent.total:
            self._paid_back = None
        elif self._paid_back is None and fund.certain > 0:
            self._paid_back = time.time()
        before = [fund.base, *(version.number for version in fund.versions)]
        return Account(
            begins=decision is None or decision.begins,
            fund=0.0 if decision is None else decision.fund,
            needed=0.0 if decision is None else decision.needed,
            certain=fund.certain,
            saved=fund.saved,
            effects=tuple(
                VersionEffect(one.number, below, one.log, one.width, one.trials)
                for one, below in zip(fund.versions, before, strict=False)
            ),
            trial=self.trial,
            log=None if gain is None else gain[0],
            width=None if gain is None else gain[1],
            paid_back=self._paid_back,
            worth=worth if math.isfinite(worth) else None,
        )

    def _before(self) -> Training:
        """Read what was reported of the domain before."""
        domain = self._service.domain
        return self._reports.get([domain]).get(domain, Training())

    def saved(self, learner: Learner) -> dict[str, Any]:
        """Return counts, costs, the fund and requests as JSON, for a checkpoint."""
        self.state.follow(learner)
        return {
            "counters": self.state.saved(),
            "spent": msgspec.to_builtins(self.cost.spent(), str_keys=True),
            "learnt": self.learnt.state(),
            "fund": msgspec.to_builtins(self.fund),
            "paid_back": self._paid_back,
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what ``saved`` returned; without a fund in it, one begins.

        Raises:
            ValueError, KeyError, TypeError: it cannot be read; nothing changes.
        """
        learnt, spent = list(saved["learnt"]), msgspec.convert(saved["spent"], Spent, strict=False)
        fund, paid_back = saved.get("fund"), saved.get("paid_back")
        fund = None if fund is None else msgspec.convert(fund, Fund, strict=False)
        self.state.resume(saved["counters"])
        self.begin(spent)
        self.learnt.resume(learnt)
        if fund is None:
            logger.warning("the checkpoint holds no fund of training: it begins with the cost of one version")
        else:
            self.fund, self._paid_back = fund, paid_back

    def begin(self, spent: Spent) -> None:
        """Count on from ``spent``, or from what was reported before where that is more."""
        try:
            reported = self._before()
        except (RedisError, ValueError) as error:
            logger.warning("the report of training cannot be read: %s", error)
            reported = Training()
        self.cost.resume(spent, reported)

    def close(self) -> None:
        """Close the connection."""
        self._reports.close()
