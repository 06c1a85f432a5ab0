"""What training costs: the CPU seconds of the trainer's processes, charged to the version that they lead to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from osd.registry.ledger import Ledger, Spent

logger = logging.getLogger(__name__)

_TELL_SECONDS = 1.0


class Spending:
    """The trainer's side of the ledger.

    All that the trainer computes is charged, on all threads of all its processes: micro-steps, gates, candidates that
    were rejected, reading the stream, checkpoints. It is CPU time, so that a trainer that stands back for serving costs
    nothing while it waits. What was spent since the last version belongs to the next one that is published.

    Args:
        domain: whose drafter is trained.
        ledger: where serving reads it.
        clock: CPU seconds of the trainer.
    """

    def __init__(self, domain: str, ledger: Ledger, clock: Callable[[], float] = time.process_time) -> None:
        self._domain = domain
        self._ledger = ledger
        self._clock = clock
        self._mark = clock()
        self._spent = Spent()
        self._told_at = -_TELL_SECONDS

    def spent(self) -> Spent:
        """What was spent until now."""
        now = self._clock()
        self._spent = Spent(self._spent.by_version, self._spent.unpublished + now - self._mark)
        self._mark = now
        return self._spent

    def published(self, version: int) -> None:
        """A version came of it."""
        spent = self.spent()
        self._spent = Spent({**spent.by_version, version: spent.unpublished})
        self._told_at = -_TELL_SECONDS
        self.tell()

    def resume(self, saved: Spent) -> None:
        """Go on from what a checkpoint says, or from what serving was told since then."""
        try:
            told = self._ledger.get(self._domain)
        except (RedisError, ValueError) as error:
            logger.warning("the ledger cannot be read: %s", error)
            told = Spent()
        before, mine = max(saved, told, key=lambda spent: spent.total), self.spent()
        self._spent = Spent(before.by_version, before.unpublished + mine.unpublished)

    def tell(self) -> None:
        """Tell serving, at most once a second; without Redis it is told later."""
        now = time.monotonic()
        if now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        try:
            self._ledger.set(self._domain, self.spent())
        except RedisError as error:
            logger.debug("the ledger cannot be told: %s", error)
