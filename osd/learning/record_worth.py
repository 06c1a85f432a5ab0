"""Value of a trace for training, from the trainer's forecast for its domain and the tokens that no draft gave."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from redis.exceptions import RedisError

from osd.capture.trace import ACCEPTED, Trace
from osd.config import TrainerSettings, tenant_of
from osd.hashing import unit_hash
from osd.learning.replay import STATES_SECONDS, is_held_out, states_probability
from osd.registry.training import TrainingReports

logger = logging.getLogger(__name__)

MIN_SCORE = 0.2
"""Lowest score of a trace. It is above 0 because drift can also show in requests without training value."""

HELD_OUT_SCORE = 0.5
"""Score of every held-out request. All have the same score, so that the held-out sample is not biased."""

_UNTRAINED = 64  # domains without a trainer that are remembered; clients can send any name


class RecordWorth:
    """Scores of traces between 0.2 and 1, and the choice of the requests whose hidden states are captured.

    The part of a score above 0.2 is proportional to two factors: the forecast for the next version of the domain
    relative to the largest forecast of all domains, and the share of tokens that no draft gave. Trainers report
    forecasts each second. A domain without a forecast counts like the domain with the largest. A domain without a
    trainer counts 0 while other domains have one. If several trainers learn from a domain, the largest forecast and the
    largest share of states count. Except ``states_weight``, the methods are for one thread.
    """

    def __init__(
        self,
        reports: TrainingReports,
        settings: TrainerSettings,
        wide_domains: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the scores.

        Args:
            reports: the reports of trainers.
            settings: the settings of the trainers.
            wide_domains: the domains whose trainers learn from all domains of their tenant.
            clock: returns the time in seconds.
        """
        self._reports, self._held_out, self._clock = reports, settings.held_out, clock
        self._wide = wide_domains
        self._domains: dict[str, None] = {}
        self._worth: dict[str, float] = {}
        self._state_shares: dict[str, float] = {}
        self._next_read = -math.inf

    def __call__(self, trace: Trace) -> float:
        """Return the score of a trace."""
        self.update(trace.domain)
        if is_held_out(trace.request_id, self._held_out):
            return HELD_OUT_SCORE
        return score(trace, self._largest(self._worth, trace.domain, 0.0) if self._worth else 1.0)

    def note(self, trace: Trace) -> None:
        """Read the reports for the trace's domain; see ``update``."""
        self.update(trace.domain)

    def update(self, domain: str) -> None:
        """Read the reports of trainers when ``domain`` is new, and otherwise every ``STATES_SECONDS``.

        Scores and ``states_weight`` use the last reports. While Redis does not answer, they stay.
        """
        is_known = domain in self._domains
        self._domains.pop(domain, None)
        self._domains[domain] = None
        for untrained in [name for name in self._domains if name not in self._state_shares][:-_UNTRAINED]:
            del self._domains[untrained]
        now = self._clock()
        if is_known and now < self._next_read:
            return
        self._next_read = now + STATES_SECONDS
        try:
            reports = self._reports.get(list(dict.fromkeys((*self._domains, *self._wide))))
        except RedisError as error:
            logger.debug("cannot read the forecasts of training, keeping the last ones: %s", error)
            return
        self._state_shares = {domain: report.states_wanted for domain, report in reports.items()}
        worth = {domain: report.account.worth if report.account else None for domain, report in reports.items()}
        largest = max((value for value in worth.values() if value is not None), default=0.0)
        self._worth = {
            domain: 1.0 if value is None else value / largest if largest else 0.0 for domain, value in worth.items()
        }

    def states_weight(self, domain: str, request: str) -> float:
        """Return the number of requests that the hidden states of this request represent.

        It is 0 if its states are not captured, and otherwise 1 / probability of capture. A trainer with few untrained
        records gets the states of all requests. With many, it asks for the states of a share of the requests. The
        probability for held-out requests is at least one half, or a quarter if training is not profitable. Repeated
        calls have the same result until the share changes. Every thread may call this, because it uses the last reports
        only.
        """
        share = self._largest(self._state_shares, domain, 1.0)
        chance = states_probability(share, is_held_out(request, self._held_out))
        return 1 / chance if unit_hash(request.encode(), b"states") < chance else 0.0

    def _largest(self, values: Mapping[str, float], domain: str, default: float) -> float:
        """Return the largest value of the trainers that learn from ``domain``; ``default`` without such a trainer."""
        tenant = tenant_of(domain)
        trainers = {domain, *(name for name in self._wide if tenant_of(name) == tenant)}
        return max((values[name] for name in trainers if name in values), default=default)

    def close(self) -> None:
        """Close the connection."""
        self._reports.close()


def score(trace: Trace, worth: float) -> float:
    """Return the score of a trace; ``worth`` is the forecast of its domain relative to the largest forecast."""
    verdict = trace.verdict.numpy()
    undrafted = 1 - float((verdict == ACCEPTED).sum()) / max(len(verdict), 1)
    return MIN_SCORE + (1 - MIN_SCORE) * worth * undrafted
