"""What a trainer counts: records and candidates, the requests it has learnt from, and the CPU seconds that it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.learning.online import Learned, Learner
from osd.registry.learnt import Learnt
from osd.registry.ledger import Ledger, Spent
from trainer.status import Status

logger = logging.getLogger(__name__)

_TELL_SECONDS = 1.0
_SAVED = ("refused", "published", "rejected", "drifts")


@dataclass(frozen=True)
class Accounts:
    """What is kept beside the learner's state, by checkpoints too; no manifest names the requests ``learnt`` yet."""

    status: Status
    cost: CostMeter
    learnt: Learnt

    def status_of(self, learner: Learner | None) -> Status:
        """The status with what the learner has done."""
        if learner is None:
            return self.status
        distiller = learner.distiller
        return replace(self.status, steps=distiller.steps, skipped=distiller.skipped, **asdict(learner.counters))

    def learned(self, learned: Learned) -> None:
        """Take in a micro-step."""
        self.learnt.add(request_id for request_id, _ in learned.fresh)
        if not learned.step.skipped:
            self.status.loss = learned.step.loss

    def figures(self, learner: Learner) -> dict[str, Any]:
        """The figures of a micro-step, for its event."""
        distiller, counters = learner.distiller, learner.counters
        head = {} if distiller.head_loss is None else {"head_loss": distiller.head_loss}
        figures = {
            "loss": self.status.loss,
            "step": distiller.steps,
            "tokens": counters.tokens,
            "records": counters.records,
            "lag": self.status.lag,
            "skipped": distiller.skipped,
            "cpu_seconds": round(self.cost.spent().total, 3),
        }
        return {**figures, **head, **learner.trigger.figures()}

    def state(self) -> dict[str, Any]:
        """All of it as JSON, for ``resume``."""
        return {
            "counters": {name: getattr(self.status, name) for name in _SAVED},
            "spent": msgspec.to_builtins(self.cost.spent(), str_keys=True),
            "learnt": self.learnt.state(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave.

        Raises:
            ValueError, KeyError, TypeError: it cannot be read; nothing changes.
        """
        counters = {name: int(state["counters"][name]) for name in _SAVED}
        learnt = list(state["learnt"])
        self.cost.resume(msgspec.convert(state["spent"], Spent, strict=False))
        self.learnt.resume(learnt)
        for name, value in counters.items():
            setattr(self.status, name, value)

    def published(self, version: int, stable: int, saving: float) -> None:
        """A version came of all that was done since the last one, to save so much; ``stable`` is in service."""
        self.status.version = stable
        self.status.published += 1
        self.cost.published(version, saving)
        self.learnt.published()


class CostMeter:
    """The trainer's side of the ledger.

    All that the trainer computes is charged, on all threads of all its processes: micro-steps, gates, candidates that
    were rejected, reading the stream, checkpoints. It is CPU time by ``clock``, so that a trainer that stands back for
    serving costs nothing while it waits; what rounds beside it lose is added by ``charge``. What was spent since the
    last version belongs to the next one that is published. ``held`` is held while the ledger is written.
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
        self._told_at = -_TELL_SECONDS

    def spent(self) -> Spent:
        """What was spent until now."""
        now = self._clock()
        unpublished = self._spent.unpublished + now - self._mark
        self._spent = msgspec.structs.replace(self._spent, unpublished=unpublished)
        self._mark = now
        return self._spent

    def charge(self, slowed: float) -> None:
        """Rounds beside training lost so many seconds of a core."""
        self._spent = msgspec.structs.replace(
            self._spent, unpublished=self._spent.unpublished + slowed, slowed=self._spent.slowed + slowed
        )

    def published(self, version: int, saving: float) -> None:
        """Charge what was spent to a version that came of it, to save so many seconds of a core in each second."""
        self._spent = self.spent().published(version, saving)
        self._told_at = -_TELL_SECONDS
        self.tell()

    def keep(self, versions: Collection[int]) -> None:
        """Count all others together: they were removed."""
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
        if now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        try:
            with self._held():
                self._ledger.set(self._domain, self.spent())
        except (RedisError, OSError) as error:
            logger.debug("the ledger cannot be told: %s", error)
