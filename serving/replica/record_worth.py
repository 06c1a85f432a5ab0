"""How much a trace is wanted: by the forecast of its domain's next version, and by the records of its trainer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from osd.capture.trace import ACCEPTED, Trace
from osd.config import TrainerSettings
from osd.hashing import unit_hash
from osd.learning.replay import LOOK_SECONDS, is_held_out, states_chance
from osd.registry.training import TrainingReports

logger = logging.getLogger(__name__)

EVERYBODY = 0.2
"""The score that every trace has at least: drift shows in what seemed worth nothing too."""

HELD_OUT = 0.5
"""The score of every held-out request: those that judge are best alike."""

_DOMAINS = 64


class RecordWorth:
    """Scores traces between 0.2 and 1, for one thread, and says of which requests hidden states are wanted.

    What is above 0.2 grows with the forecast of its domain's next version beside the largest forecast of all domains,
    which trainers report each second, and with the share of its tokens that no draft gave. A domain without a forecast
    scores as the largest; a domain without a trainer, while other domains have one, scores 0.
    """

    def __init__(
        self, reports: TrainingReports, settings: TrainerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reports, self._held_out, self._clock = reports, settings.held_out, clock
        self._domains: dict[str, None] = {}
        self._worth: dict[str, float] = {}
        self._states: dict[str, float] = {}
        self._look_at = -math.inf

    def __call__(self, trace: Trace) -> float:
        """The score of a trace."""
        self._look(trace.domain)
        if is_held_out(trace.request_id, self._held_out):
            return HELD_OUT
        return score(trace, self._worth.get(trace.domain, 0.0) if self._worth else 1.0)

    def note(self, trace: Trace) -> None:
        """Follow the trace's domain."""
        self._look(trace.domain)

    def states_weight(self, domain: str, request: str) -> float:
        """For how many requests of a domain the hidden states of one stand, 0 where they are not wanted.

        All are as long as a trainer comes along with them. One that has many records which it never trained on, because
        it may not or because that does not pay, says which share it wants. Of held-out requests at least a half is. Any
        thread may ask: nothing is looked at.
        """
        chance = states_chance(self._states.get(domain, 1.0), is_held_out(request, self._held_out))
        return 1 / chance if unit_hash(request.encode(), b"states") < chance else 0.0

    def close(self) -> None:
        """Close the connection."""
        self._reports.close()

    def _look(self, domain: str) -> None:
        """Learn from time to time what domains are worth, of those that traces came of last."""
        known = domain in self._domains
        self._domains.pop(domain, None)
        self._domains[domain] = None
        while len(self._domains) > _DOMAINS:
            self._domains.pop(next(iter(self._domains)))
        now = self._clock()
        if known and now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            found = self._reports.get(list(self._domains))
        except RedisError as error:
            logger.debug("what learning is worth is not known, what was known stays: %s", error)
            return
        self._states = {domain: said.states_wanted for domain, said in found.items()}
        nets = {domain: None if said.account is None else said.account.worth for domain, said in found.items()}
        most = max((net for net in nets.values() if net is not None), default=0.0)
        self._worth = {domain: 1.0 if net is None else net / most if most else 0.0 for domain, net in nets.items()}


def score(trace: Trace, worth: float) -> float:
    """The score of a trace of a domain that is worth so much beside others, 1 for the one that is worth most."""
    verdict = trace.verdict.numpy()
    without = 1 - float((verdict == ACCEPTED).sum()) / max(len(verdict), 1)
    return EVERYBODY + (1 - EVERYBODY) * worth * without
