"""The trainer's part in forgetting a request: its memory is emptied of it, and the drafter is known to have seen it."""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from osd.capture.purge import Purges, Removed
from trainer.intake import Intake
from trainer.learnt import Learnt

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class Forgetting:
    """Follows the list of purged requests; what is asked for while no trainer runs is done when one starts."""

    def __init__(self, domain: str, purges: Purges, intake: Intake, learnt: Learnt) -> None:
        self._domain, self._purges, self._intake, self._learnt = domain, purges, intake, learnt
        self._looked_at = self._alive_at = -_LOOK_SECONDS

    def look(self) -> None:
        """Forget what is asked for since the last look, twice a second at most; not during an evaluation."""
        self.alive()
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            asked = self._purges.asked()
            for request in asked.keys() - self._intake.purged:
                learnt = self._learnt.knows(request)
                removed = Removed(self._intake.purge(request), learnt)
                self._purges.answer(request, self._domain, removed)
                logger.info("request forgotten: %d records", removed.records)
            self._intake.purged &= asked.keys()
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)

    def alive(self) -> None:
        """Say that this trainer will answer."""
        now = time.monotonic()
        if now - self._alive_at < _LOOK_SECONDS:
            return
        self._alive_at = now
        try:
            self._purges.alive(self._domain)
        except RedisError as error:
            logger.debug("Redis does not answer: %s", error)

    def close(self) -> None:
        """Close the connection."""
        self._purges.close()
