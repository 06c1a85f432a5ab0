"""Tells serving what training costs, what it has done and what it expects, for the ledger and the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from redis.exceptions import RedisError

from osd.learning.online import Learner
from osd.learning.replay import Replay
from osd.learning.value import Investment
from osd.learning.wanted_states import states_wanted
from osd.registry.training import Expected, Training, TrainingReports
from trainer.accounts import Accounts

logger = logging.getLogger(__name__)

_TELL_SECONDS = 1.0


class Telling:
    """Tells of one domain, at most once a second; without Redis it is told later.

    No count that was told falls, whatever checkpoint this trainer went on from. ``held`` is held while it is written.
    """

    def __init__(
        self,
        domain: str,
        reports: TrainingReports,
        accounts: Accounts,
        replay: Replay,
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._domain, self._reports, self._accounts, self._replay, self._held = domain, reports, accounts, replay, held
        self._told: Training | None = None  # until Redis has said what was told before
        self._told_at = -_TELL_SECONDS

    def tell(self, learner: Learner | None, investment: Investment | None) -> None:
        """Tell what the ``learner`` has done, and what was decided on its next slice.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        self._accounts.cost.tell()
        now = time.monotonic()
        if learner is None or now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        training = self._training(learner, investment)
        try:
            if self._told is None:
                self._told = self._reports.get([self._domain]).get(self._domain, Training())
            self._told = training.at_least(self._told)
            with self._held():
                self._reports.set(self._domain, self._told)
        except (RedisError, OSError) as error:
            logger.debug("what training has done cannot be told: %s", error)

    def close(self) -> None:
        """Close the connections."""
        self._reports.close()

    def _training(self, learner: Learner, investment: Investment | None) -> Training:
        status, spent, replay = self._accounts.status_of(learner), self._accounts.cost.spent(), self._replay
        expected, pays = None, investment is None or investment.pays
        if investment is not None:
            expected = Expected(
                investment.pays, investment.saving_rate, investment.horizon, investment.earns, investment.costs
            )
        return Training(
            steps=status.steps,
            skipped=status.skipped,
            positions=status.tokens,
            records=status.records,
            trained=status.trained,
            held_out=status.held_out,
            refused=status.refused,
            passed=status.published,
            rejected=status.rejected,
            drifts=status.drifts,
            cpu_seconds=spent.cpu,
            slowed_seconds=spent.slowed,
            replay_records=len(replay.known()),
            replay_tokens=replay.tokens,
            replay_bytes=replay.bytes,
            lag=status.lag,
            lag_seconds=status.lag_seconds,
            loss=status.loss,
            expected=expected,
            states_wanted=states_wanted(replay.fresh_records, pays),
        )
