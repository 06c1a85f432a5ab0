"""Detection of drift: a fall of the acceptance rate below its usual level that is not chance."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.metrics import acceptance_rate

_WARM_RECORDS = 40
"""Minimum number of records for the estimate of the level of a version in a domain."""

_WARM_TESTED = 200
"""Minimum number of tested draft tokens in these records."""

_MAX_TESTS = 64
"""Maximum number of pairs of domain and version that are followed at the same time."""


def tested_tokens(trace: Trace) -> tuple[int, int]:
    """Return the numbers of accepted and of tested draft tokens of a request.

    Accepted tokens and the first rejected token of each decoding step are tested.
    """
    verdict = trace.verdict.numpy()
    return int((verdict == ACCEPTED).sum()), int((verdict != NOT_DRAFTED).sum())


@dataclass(frozen=True)
class Drift:
    """Alarm: the acceptance rate of a version in a domain has fallen.

    Attributes:
        domain: the domain of the requests.
        version: the drafter version.
        before: the acceptance rate before the fall.
        now: the approximate acceptance rate since the fall.
        since: creation time of the first record that seems to belong to the fall, in seconds since the epoch; 0 if
            unknown.
    """

    domain: str
    version: int
    before: float
    now: float
    since: float = 0.0


class Cusum:
    """CUSUM test of the acceptance rate against a fall by ``fall`` (Page 1954).

    The level p0 and the dispersion phi are estimated from the first records. Draft tokens of one request are not
    independent; phi (at least 1) is the ratio of the records' variance to the variance of independent tokens. Each
    further record, with a of t tested tokens accepted, adds its log likelihood ratio of p1 = p0 - fall against p0,
    divided by phi, to a sum that never falls below zero. A record that represents several requests counts as often, and
    raises phi accordingly.

    The alarm is a sum above log(``records``). With a known level, the mean number of records between two false alarms
    is then at least ``records`` (Lorden 1971). To keep this with an estimated level, p0 is set two standard errors
    below the estimate.

    Attributes:
        level: the estimated acceptance rate.
        began: creation time of the first record of a possible fall; set by the caller.
    """

    def __init__(self, fall: float, records: int) -> None:
        self._fall = fall
        self._threshold = math.log(records)
        self._warm: list[tuple[int, int, float]] = []
        self._gains: tuple[float, float] | None = None
        self._sum = 0.0
        self._since = (0.0, 0.0)  # accepted and tested tokens since the sum was last zero
        self.level = 0.0
        self.began = 0.0

    def add(self, accepted: int, tested: int, weight: float = 1.0) -> float | None:
        """Add a record.

        Args:
            accepted: the number of accepted draft tokens.
            tested: the number of tested draft tokens.
            weight: the number of requests that the record represents.

        Returns:
            The acceptance rate since the estimated start of a fall when there is an alarm, else None.
        """
        if not tested:
            return None
        if self._gains is None:
            self._warm.append((accepted, tested, weight))
            if len(self._warm) >= _WARM_RECORDS and sum(t for _, t, _ in self._warm) >= _WARM_TESTED:
                self._estimate_level()
            return None
        self._since = (self._since[0] + weight * accepted, self._since[1] + weight * tested)
        self._sum += weight * (accepted * self._gains[0] + (tested - accepted) * self._gains[1])
        if self._sum <= 0:
            self._sum, self._since = 0.0, (0.0, 0.0)
        return acceptance_rate(*self._since) if self._sum > self._threshold else None

    @property
    def is_calm(self) -> bool:
        """Whether no evidence of a fall has accumulated."""
        return self._sum == 0

    def _estimate_level(self) -> None:
        accepted, tested, weight = np.array(self._warm, float).T
        accepted, tested = weight * accepted, weight * tested
        rate = (accepted.sum() + 0.5) / (tested.sum() + 1.0)
        chance = rate * (1 - rate)
        # Pearson's statistic divided by its degrees of freedom.
        phi = max(float(((accepted - rate * tested) ** 2 / (tested * chance)).sum() / (len(tested) - 1)), 1.0)
        self.level = float(rate)
        p0 = max(self.level - 2 * math.sqrt(phi * chance / tested.sum()), self.level / 2)
        p1 = max(p0 - self._fall, p0 / 4)
        self._gains = math.log(p1 / p0) / phi, math.log((1 - p1) / (1 - p0)) / phi


class DriftWatch:
    """Drift tests of all domains and drafter versions; a new version gets a new test.

    Args:
        fall: the fall of the acceptance rate to detect.
        records: mean number of a domain's records between two false alarms.
    """

    def __init__(self, fall: float, records: int) -> None:
        self._fall, self._records = fall, records
        self._tests: OrderedDict[tuple[str, str, int], Cusum] = OrderedDict()

    def add(self, trace: Trace) -> Drift | None:
        """Add a new record and return an alarm, if any.

        After an alarm the level is estimated again, so a fall is reported once.
        """
        key = trace.domain, trace.drafter_domain, trace.drafter_version
        test = self._tests.setdefault(key, Cusum(self._fall, self._records))
        self._tests.move_to_end(key)
        while len(self._tests) > _MAX_TESTS:
            self._tests.popitem(last=False)
        if test.is_calm:
            test.began = trace.created
        now = test.add(*tested_tokens(trace), trace.weight)
        if now is None:
            return None
        del self._tests[key]
        return Drift(trace.domain, trace.drafter_version, test.level, now, test.began)
