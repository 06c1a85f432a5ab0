"""Counters and history of all replicas, kept in one actor so that any replica can answer for all.

A report carries a replica's counters since it started. What changed since the replica's last report is added to
the totals and to the second in which it changed: a replica that dies leaves its counts behind, and a new one starts
from zero without making any total go backwards. Of the drafter versions of a domain those that were counted last are
kept apart, and all others together, and so are the domains: no count falls but those of what joins the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from osd.engine.counters import APART, DOMAINS, OLDER, OTHERS
from osd.metrics import Labels, Name
from serving.metrics.history import Bins, MetricsHistory
from serving.metrics.report import Report, Totals, is_versioned
from serving.metrics.table import PROXY

ACTOR = "replica_metrics"
"""Name of the actor that keeps the metrics of all replicas."""

ALIVE_SECONDS = 5.0
"""A replica that has not reported for so long is gone; for so many of their pauses, where they pause for longer."""

_REPORT_SECONDS, _REPORTS_A_SECOND = 1.0, 50.0
_KNOWN = 4096  # replicas, and proxies


class ReplicaMetrics:
    """Totals and the last hour of all replicas, in memory."""

    def __init__(self) -> None:
        self._totals: Counter[Name] = Counter()
        self._last: dict[str, Report] = {}
        self._proxies: dict[str, dict[Name, float]] = {}
        self._apart: dict[str | int, dict[str | int, None]] = {}
        self._past = MetricsHistory()
        self._pause, self._paced_at = _REPORT_SECONDS, 0.0

    def push(self, report: Report) -> float:
        """Take one report; reports of one replica come in order. Returns in how many seconds it is to send the next.

        However many replicas there are, about fifty reports come in each second.
        """
        before = self._last.get(report.replica)
        if before is not None and report.time < before.time:
            self._set_back(report.time)
        delta = _since({} if before is None else before.counters, report.counters)
        if before is not None and before.version != report.version:
            self._past.swapped(report.time, report.version)
        self._last[report.replica] = report
        self._totals.update(delta)
        self._fold(delta)
        self._past.add(report.time, report.replica, delta, report.gauges)
        if len(self._last) > _KNOWN:
            del self._last[min(self._last, key=lambda name: self._last[name].time)]
        return self._pace(report.time)

    def answered(self, proxy: str, counts: Mapping[Labels, int]) -> None:
        """Take all that a proxy has answered so far, by path and status."""
        now = {name: value for row in PROXY for name, value in row.values(counts)}
        self._totals.update(_since(self._proxies.pop(proxy, {}), now))
        self._proxies[proxy] = now  # behind all others
        if len(self._proxies) > _KNOWN:
            del self._proxies[next(iter(self._proxies))]

    def totals(self, now: float) -> Totals:
        """Everything counted so far, and who is alive at ``now``."""
        return Totals(dict(self._totals), sorted(self._living(now), key=lambda report: report.replica))

    def bins(self, now: float, seconds: int, since: int | None) -> Bins:
        """The last ``seconds``, and of these only the bins after the one at ``since``."""
        return self._past.bins(now, seconds, since)

    def _living(self, now: float) -> list[Report]:
        return [report for report in self._last.values() if now - report.time < ALIVE_SECONDS * self._pause]

    def _pace(self, now: float) -> float:
        """Seconds between two reports of a replica, reckoned anew once a second."""
        if not 0 <= now - self._paced_at < _REPORT_SECONDS:
            self._paced_at = now
            self._pause = max(_REPORT_SECONDS, len(self._living(now)) / _REPORTS_A_SECOND)
        return self._pause

    def _set_back(self, time: float) -> None:
        if ahead := self._past.set_back(time):
            self._last = {name: replace(report, time=report.time - ahead) for name, report in self._last.items()}

    def _fold(self, counted: Iterable[Name]) -> None:
        """Keep the domains, and of each the versions, that were ``counted`` last apart, so many of them."""
        for key in counted:
            if not is_versioned(key) or key[1] == OTHERS:
                continue
            domain, version = key[1:3]
            self._apart[domain] = apart = self._apart.pop(domain, {})  # behind all others
            if version != OLDER:
                apart.pop(version, None)
                apart[version] = None
            if len(apart) > APART:
                self._join((domain, next(iter(apart))), domain)
            if len(self._apart) > DOMAINS:
                self._join((next(iter(self._apart)),), OTHERS)

    def _join(self, oldest: tuple[str | int, ...], domain: str | int) -> None:
        """Count a domain, or a domain and a version, with the older ones of ``domain`` from now on."""
        apart = self._apart if len(oldest) == 1 else self._apart[domain]
        del apart[oldest[-1]]
        for key in [key for key in self._totals if is_versioned(key) and key[1 : 1 + len(oldest)] == oldest]:
            self._totals[key[0], domain, OLDER, *key[3:]] += self._totals.pop(key)


def _since(before: Mapping[Name, float], now: Mapping[Name, float]) -> dict[Name, float]:
    """What a replica counted between two reports; of what it had not heard of before also that this is 0 yet."""
    delta: defaultdict[Name, float] = defaultdict(float)
    for key, value in now.items():
        if key not in before or value != before[key]:
            delta[key] = value - before.get(key, 0)
    domains = {key[1] for key in now if is_versioned(key)}
    for key in before.keys() - now.keys():
        if is_versioned(key):  # the replica has added it to its older ones, and here it has been counted
            delta[key[0], key[1] if key[1] in domains else OTHERS, OLDER, *key[3:]] -= before[key]
    return delta
