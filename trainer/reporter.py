"""Reporter of a domain's training: state, counts, costs and fund for serving, and events."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.economy.report import RECALL_ALONE
from osd.economy.training import Decision, Fund
from osd.learning.online import Learner, LearnerStep
from osd.learning.replay import states_share
from osd.registry.trained_requests import TrainedRequests
from osd.registry.training import FundReport, Training, TrainingReports, VersionEffect
from trainer.rollout import DomainVersions
from trainer.state import TrainerState, TrainingCost

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""Shortest time between two reports to serving."""

_EVENT_SECONDS = 1.0


class CostMeter:
    """Meter of the core seconds that training takes.

    It counts all CPU time of the trainer, on all threads of all its processes: micro-steps, gates, rejected candidates,
    reads of the stream, checkpoints. A trainer that waits for serving uses no CPU time, so it costs nothing. The cost
    since the last version belongs to the next version.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        """Start a meter at 0; ``clock`` returns CPU seconds."""
        self._clock = clock
        self._mark = clock()
        self._cost = TrainingCost()

    def current(self) -> TrainingCost:
        """Return the cost so far."""
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        self._add(cpu=seconds, unpublished=seconds)
        return self._cost

    def charge(self, contended: float = 0.0, lost: float = 0.0) -> None:
        """Add costs that the clock does not show.

        Args:
            contended: CPU seconds, already counted by the clock, that ran while requests ran.
            lost: core seconds that replicas lost.
        """
        self._add(contended=contended, slowed=lost, unpublished=lost)

    def start_version(self) -> None:
        """Reset the cost since the last version; the total cost continues."""
        self._cost = msgspec.structs.replace(self.current(), unpublished=0.0)

    def resume(self, saved: TrainingCost, reported: Training) -> None:
        """Continue from the larger of the checkpoint's cost and the reported cost."""
        missing = max(reported.cost - saved.total, 0.0)
        if missing:
            unpublished = saved.unpublished + missing
            saved = TrainingCost(reported.cpu_seconds, reported.beside_seconds, reported.slowed_seconds, unpublished)
        current, self._cost = self.current(), saved
        self._add(**msgspec.structs.asdict(current))

    def _add(self, **seconds: float) -> None:
        sums = {name: getattr(self._cost, name) + value for name, value in seconds.items()}
        self._cost = msgspec.structs.replace(self._cost, **sums)


class TrainingReporter:
    """Reporter of one domain: state, cost, fund, and the requests that training used.

    No reported count ever falls, even after a restart from an older checkpoint.

    Attributes:
        state: the state of training.
        cost: the meter of the cost.
        trained_requests: the requests that no version's manifest names yet.
        fund: the fund of training.
    """

    def __init__(
        self,
        versions: DomainVersions,
        cost: CostMeter,
        reports: TrainingReports,
        clock: Callable[[], float] = time.monotonic,
        mixes: bool = False,
    ) -> None:
        """Create the reporter of a domain.

        Args:
            versions: the versions of the domain.
            cost: the meter of its cost.
            reports: where the reports are kept.
            clock: times the intervals between reports, in seconds.
            mixes: whether recall drafts with the trained drafter.
        """
        self.state, self.cost, self.trained_requests, self.fund = TrainerState(), cost, TrainedRequests(), Fund()
        self.trial: VersionEffect | None = None
        """Measured effect of the canary."""
        self.over_recall: VersionEffect | None = None
        """Measured effect of the version in service over recall alone."""
        self._paid_back: float | None = None
        self._versions, self._reports, self._clock, self._mixes = versions, reports, clock, mixes
        self._reported: Training | None = None  # None until the last report was read from Redis
        self._reported_at = self._event_at = -REPORT_SECONDS

    def status(self, learner: Learner | None) -> dict[str, Any]:
        """Return the ``TrainerState`` as a dict; thread-safe."""
        if learner is not None:
            self.state.follow(learner)
        return self.state.status()

    def record_step(self, learner: Learner, learned: LearnerStep) -> None:
        """Record a micro-step; write at most one event per second."""
        self.trained_requests.add(request_id for request_id, _ in learned.fresh)
        if not learned.step.skipped:
            self.state.loss = learned.step.loss
        self.state.follow(learner)
        now = self._clock()
        if now - self._event_at > _EVENT_SECONDS:
            self._event_at = now
            self._versions.record_event("train_step", None, **self.state.event(learner, self.cost.current()))

    def record_decision(self, decision: Decision) -> None:
        """Write an event with a decision on the next slice of training."""
        cost, fund = self.cost.current(), self.fund
        figures = {"fund": decision.fund, "needed": decision.needed, "certain": fund.certain, "saved": fund.saved}
        figures |= {"cost": cost.total, "fruitless": fund.fruitless}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        self._versions.record_event("fund", None, begins=decision.begins, **rounded)

    def record_publication(self, stable: int) -> None:
        """Record a publication; ``stable`` is the stable version afterwards."""
        self.state.version = stable
        self.state.published += 1
        self.cost.start_version()
        self.trained_requests.clear()

    def report(self, learner: Learner | None, decision: Decision | None, worth: Callable[[Learner], float]) -> None:
        """Report to serving at most once a second; without Redis try again later.

        Args:
            learner: the learner of the domain; None before it exists.
            decision: the last decision on the next slice; None before the first.
            worth: returns the forecast, see ``osd.economy.training.forecast``.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        now, domain = self._clock(), self._versions.domain
        if learner is None or now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        self.state.follow(learner)
        cost = self.cost.current()
        share = states_share(learner.replay.fresh_records, decision is None or decision.begins)
        training = self.state.report(learner, cost, self._account(cost, decision, worth(learner)), share)
        try:
            self._reported = training.at_least(self._last_report() if self._reported is None else self._reported)
            with self._versions.lease.held():
                self._reports.set(domain, self._reported)
        except (RedisError, OSError) as error:
            logger.debug("training cannot be reported: %s", error)

    def _account(self, cost: TrainingCost, decision: Decision | None, worth: float) -> FundReport:
        fund, gain = self.fund, self.fund.gain
        if fund.certain < cost.total:
            self._paid_back = None
        elif self._paid_back is None and fund.certain > 0:
            self._paid_back = time.time()
        over_recall = self.over_recall
        if over_recall is None and (mixed := fund.mixed) is not None:
            over_recall = VersionEffect(self.state.version, RECALL_ALONE, mixed.log, mixed.width, mixed.trials)
        baselines = [fund.base, *(version.number for version in fund.versions)]
        effects = [
            VersionEffect(version.number, baseline, version.log, version.width, version.trials)
            for version, baseline in zip(fund.versions, baselines, strict=False)
        ]
        return FundReport(
            begins=decision is None or decision.begins,
            fund=0.0 if decision is None else decision.fund,
            needed=0.0 if decision is None else decision.needed,
            certain=fund.certain,
            saved=fund.saved,
            effects=() if self._mixes else tuple(effects),
            trial=self.trial,
            over_recall=over_recall,
            log=None if gain is None else gain[0],
            width=None if gain is None else gain[1],
            paid_back=self._paid_back,
            worth=worth if math.isfinite(worth) else None,
        )

    def _last_report(self) -> Training:
        """Return the last report on the domain."""
        domain = self._versions.domain
        return self._reports.get([domain]).get(domain, Training())

    def checkpoint_state(self, learner: Learner) -> dict[str, Any]:
        """Return counts, costs, the fund and the requests as JSON, for a checkpoint."""
        self.state.follow(learner)
        return {
            "counters": self.state.checkpoint_state(),
            "spent": msgspec.to_builtins(self.cost.current(), str_keys=True),
            "learnt": self.trained_requests.state(),
            "fund": msgspec.to_builtins(self.fund),
            "paid_back": self._paid_back,
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore the values that ``checkpoint_state`` returned; without a fund start a new fund.

        Raises:
            ValueError, KeyError, TypeError: the state cannot be read; nothing changes.
        """
        learnt, cost = list(saved["learnt"]), msgspec.convert(saved["spent"], TrainingCost, strict=False)
        fund, paid_back = saved.get("fund"), saved.get("paid_back")
        fund = None if fund is None else msgspec.convert(fund, Fund, strict=False)
        self.state.resume(saved["counters"])
        self.resume_cost(cost)
        self.trained_requests.resume(learnt)
        if fund is None:
            logger.warning("the checkpoint has no fund of training: a new fund starts with the cost of one version")
        else:
            self.fund, self._paid_back = fund, paid_back
            if not self._mixes:
                fund.mixed = None

    def resume_cost(self, cost: TrainingCost) -> None:
        """Continue from the larger of ``cost`` and the cost of the last report."""
        try:
            reported = self._last_report()
        except (RedisError, ValueError) as error:
            logger.warning("the last report of training cannot be read: %s", error)
            reported = Training()
        self.cost.resume(cost, reported)

    def close(self) -> None:
        """Close the connection."""
        self._reports.close()
