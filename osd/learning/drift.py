"""Drift: when does acceptance fall below its own level, and not merely fluctuate?"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.metrics import acceptance_rate

_WARM_RECORDS = 40
"""Records that the level of a version in a domain is estimated from."""

_WARM_TESTED = 200
"""Tested draft tokens that they must have at least."""

_KNOWN = 64
"""Pairs of domain and version that are followed at the same time."""


def tested_tokens(trace: Trace) -> tuple[int, int]:
    """Accepted draft tokens of a request, and those that were tested: the accepted ones and each round's first miss."""
    verdict = trace.verdict.numpy()
    return int((verdict == ACCEPTED).sum()), int((verdict != NOT_DRAFTED).sum())


@dataclass(frozen=True)
class Drift:
    """An alarm: acceptance of ``version`` in ``domain`` was ``before`` and has fallen to about ``now``.

    ``since`` is when the first record was made that seems to belong to the fall, in seconds of the epoch; 0 where there
    was none.
    """

    domain: str
    version: int
    before: float
    now: float
    since: float = 0.0


class Cusum:
    """A CUSUM test of the acceptance rate against a fall by ``fall`` (Page 1954).

    A record that stands for several of the traffic counts as often, and phi grows as much.

    The level p0 and the dispersion phi are estimated from the first records: draft tokens of one request are not
    independent, and phi is how much more records differ than coin flips would (at least 1). Each further record, with
    a of t tested tokens accepted, adds its log likelihood ratio of p1 = p0 - fall against p0, divided by phi, to a sum
    that never falls below zero. An alarm is a sum above log(``records``): with a known level, the mean number of
    records between two false alarms is then at least ``records`` (Lorden 1971). So that it holds with an estimated one
    too, p0 is taken two standard errors below the estimate.
    """

    def __init__(self, fall: float, records: int) -> None:
        self._fall = fall
        self._threshold = math.log(records)
        self._warm: list[tuple[int, int, float]] = []
        self._gains: tuple[float, float] | None = None
        self._sum = 0.0
        self._since = (0.0, 0.0)  # accepted and tested since the sum was last zero
        self.level = 0.0
        self.began = 0.0  # when the first record was made that speaks for a fall, set by whoever adds records

    def add(self, accepted: int, tested: int, weight: float = 1.0) -> float | None:
        """Take in a record; after an alarm, the rate since the fall seems to have begun, else None."""
        if not tested:
            return None
        if self._gains is None:
            self._warm.append((accepted, tested, weight))
            if len(self._warm) >= _WARM_RECORDS and sum(t for _, t, _ in self._warm) >= _WARM_TESTED:
                self._settle()
            return None
        self._since = (self._since[0] + weight * accepted, self._since[1] + weight * tested)
        self._sum += weight * (accepted * self._gains[0] + (tested - accepted) * self._gains[1])
        if self._sum <= 0:
            self._sum, self._since = 0.0, (0.0, 0.0)
        return acceptance_rate(*self._since) if self._sum > self._threshold else None

    @property
    def calm(self) -> bool:
        """Whether nothing speaks for a fall now."""
        return self._sum == 0

    def _settle(self) -> None:
        accepted, tested, weight = np.array(self._warm, float).T
        accepted, tested = weight * accepted, weight * tested
        rate = (accepted.sum() + 0.5) / (tested.sum() + 1.0)
        chance = rate * (1 - rate)
        # Pearson's statistic over its degrees of freedom.
        phi = max(float(((accepted - rate * tested) ** 2 / (tested * chance)).sum() / (len(tested) - 1)), 1.0)
        self.level = float(rate)
        p0 = max(self.level - 2 * math.sqrt(phi * chance / tested.sum()), self.level / 2)
        p1 = max(p0 - self._fall, p0 / 4)
        self._gains = math.log(p1 / p0) / phi, math.log((1 - p1) / (1 - p0)) / phi


class DriftWatch:
    """A test for each domain of requests and drafter version; a new version has a level of its own.

    A ``fall`` of the acceptance rate is found quickly; two false alarms are ``records`` of a domain apart on average.
    """

    def __init__(self, fall: float, records: int) -> None:
        self._fall, self._records = fall, records
        self._tests: OrderedDict[tuple[str, str, int], Cusum] = OrderedDict()

    def add(self, trace: Trace) -> Drift | None:
        """Take in a record as it arrives. After an alarm the level is estimated anew: a fall is reported once."""
        key = trace.domain, trace.drafter_domain, trace.drafter_version
        test = self._tests.setdefault(key, Cusum(self._fall, self._records))
        self._tests.move_to_end(key)
        while len(self._tests) > _KNOWN:
            self._tests.popitem(last=False)
        if test.calm:
            test.began = trace.created
        now = test.add(*tested_tokens(trace), trace.weight)
        if now is None:
            return None
        del self._tests[key]
        return Drift(trace.domain, trace.drafter_version, test.level, now, test.began)
