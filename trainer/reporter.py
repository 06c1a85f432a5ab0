"""The reporter of a domain's training: its state for whoever asks, counts and costs for serving, and events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.learning.online import Learned, Learner
from osd.learning.replay import states_wanted
from osd.learning.value import Investment
from osd.registry.learnt import Learnt
from osd.registry.ledger import Ledger, Spent
from osd.registry.training import Training, TrainingReports
from trainer.rollout import Service
from trainer.state import TrainerState

logger = logging.getLogger(__name__)

LEDGER_SECONDS = 1.0
"""Between two writes of the ledger."""

_REPORT_SECONDS = 1.0
_EVENT_SECONDS = 1.0


class CostMeter:
    """CPU seconds that training has taken, and the ledger that serving reads them from.

    All that the trainer computes is charged, on all threads of all its processes: micro-steps, gates, candidates that
    were rejected, reading the stream, checkpoints. ``clock`` is CPU time, so that a trainer that stands back for
    serving costs nothing while it waits; ``charge`` adds what rounds beside it lose. What was spent since the last
    version belongs to the next one that is published. The ledger is written while ``held`` is held.
    """

    def __init__(
        self,
        domain: str,
        ledger: Ledger,
        clock: Callable[[], float] = time.process_time,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._domain = domain
        self._ledger = ledger
        self._clock, self._held = clock, held
        self._mark = clock()
        self._spent = Spent()
        self._told_at = -LEDGER_SECONDS

    def spent(self) -> Spent:
        """Return what was spent until now."""
        now = self._clock()
        unpublished = self._spent.unpublished + now - self._mark
        self._spent = msgspec.structs.replace(self._spent, unpublished=unpublished)
        self._mark = now
        return self._spent

    def charge(self, slowed: float) -> None:
        """Add core seconds that rounds beside training lost."""
        self._spent = msgspec.structs.replace(
            self._spent, unpublished=self._spent.unpublished + slowed, slowed=self._spent.slowed + slowed
        )

    def published(self, version: int, saving: float) -> None:
        """Charge what was spent to a version, which is expected to save ``saving`` core seconds in each second."""
        self._spent = self.spent().published(version, saving)
        self._told_at = -LEDGER_SECONDS
        self.tell()

    def keep(self, versions: Collection[int]) -> None:
        """Count all other versions together: they were removed."""
        self._spent = self.spent().only(versions)

    def resume(self, saved: Spent) -> None:
        """Go on from the checkpoint or from the ledger, whichever counts more."""
        try:
            told = self._ledger.get(self._domain)
        except (RedisError, ValueError) as error:
            logger.warning("the ledger cannot be read: %s", error)
            told = Spent()
        before, mine = max(saved, told, key=lambda spent: spent.total), self.spent()
        self._spent = msgspec.structs.replace(
            before, unpublished=before.unpublished + mine.unpublished, slowed=before.slowed + mine.slowed
        )

    def tell(self) -> None:
        """Write the ledger, at most once a second; without Redis it is written later.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        now = time.monotonic()
        if now - self._told_at < LEDGER_SECONDS:
            return
        self._told_at = now
        try:
            with self._held():
                self._ledger.set(self._domain, self.spent())
        except (RedisError, OSError) as error:
            logger.debug("the ledger cannot be told: %s", error)

    def close(self) -> None:
        """Close the connection."""
        self._ledger.close()


class TrainingReporter:
    """Keeps the state of a domain's training, its cost and the requests it learnt from, and tells others of them.

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
        self.state, self.cost, self.learnt = TrainerState(), cost, Learnt()
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

    def decided(self, investment: Investment) -> None:
        """Tell of a decision on the next slice of training."""
        self._service.tell("investment", None, **investment.figures())

    def published(self, version: int, stable: int, saving: float) -> None:
        """Take in a published version with its expected saving, while ``stable`` is in service."""
        self.state.version = stable
        self.state.published += 1
        self.cost.published(version, saving)
        self.learnt.published()

    def report(self, learner: Learner | None, next_slice: Investment | None) -> None:
        """Report to serving, at most once a second; without Redis it is reported later.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        self.cost.tell()
        now, domain = self._clock(), self._service.domain
        if learner is None or now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        self.state.follow(learner)
        wanted = states_wanted(learner.replay.fresh_records, next_slice is None or next_slice.pays)
        training = self.state.report(learner, self.cost.spent(), next_slice, wanted)
        try:
            if self._reported is None:
                self._reported = self._reports.get([domain]).get(domain, Training())
            self._reported = training.at_least(self._reported)
            with self._service.lease.held():
                self._reports.set(domain, self._reported)
        except (RedisError, OSError) as error:
            logger.debug("training cannot be reported: %s", error)

    def saved(self, learner: Learner) -> dict[str, Any]:
        """Return counts, costs and requests as JSON, for a checkpoint."""
        self.state.follow(learner)
        return {
            "counters": self.state.saved(),
            "spent": msgspec.to_builtins(self.cost.spent(), str_keys=True),
            "learnt": self.learnt.state(),
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what ``saved`` returned.

        Raises:
            ValueError, KeyError, TypeError: it cannot be read; nothing changes.
        """
        learnt, spent = list(saved["learnt"]), msgspec.convert(saved["spent"], Spent, strict=False)
        self.state.resume(saved["counters"])
        self.cost.resume(spent)
        self.learnt.resume(learnt)

    def close(self) -> None:
        """Close the connections."""
        self.cost.close()
        self._reports.close()
