"""Counters and history of all replicas, in one actor, so that every replica can answer with the totals.

A report holds a replica's counters since its start. The increments since the last report are added to the totals and
to the current second. Totals therefore never fall, even if a replica dies or a new one starts from zero. The number of
series is bounded: older versions of a domain are merged into one series, and so are older domains. Only the series of
merged versions and domains end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from osd.engine.counters import MAX_DOMAINS, MAX_VERSIONS, OLDER_VERSIONS, OTHER_DOMAINS
from osd.metrics import Labels, Name
from serving.metrics.history import Bins, MetricsHistory
from serving.metrics.report import Report, ServiceTotals, is_versioned
from serving.metrics.table import PROXY

ALIVE_SECONDS = 5.0
"""A replica is live until this many pauses between reports pass without a report; a pause is at least one second."""

_REPORT_SECONDS, _REPORTS_PER_SECOND = 1.0, 50.0
_REMEMBERED = 4096  # largest number of replicas, and of proxies


class ReplicaMetrics:
    """Totals and the last hour of all replicas, in memory."""

    def __init__(self) -> None:
        self._totals: Counter[Name] = Counter()
        self._last: dict[str, Report] = {}
        self._proxies: dict[str, dict[Name, float]] = {}
        self._separate: dict[str | int, dict[str | int, None]] = {}  # domains and versions with their own series
        self._history = MetricsHistory()
        self._pause, self._paced_at = _REPORT_SECONDS, 0.0

    def push(self, report: Report) -> float:
        """Add a report; the reports of a replica must arrive in order.

        Returns:
            Seconds until this replica should send its next report. The pauses limit the reports of all replicas
            together to about fifty per second.
        """
        before = self._last.get(report.replica)
        if before is not None and report.time < before.time:
            self._set_back(report.time)
        delta = _increments({} if before is None else before.counters, report.counters)
        if before is not None and before.version != report.version:
            self._history.add_swap(report.time, report.version)
        self._last[report.replica] = report
        self._totals.update(delta)
        self._merge_old(delta)
        self._history.add(report.time, report.replica, delta, report.gauges)
        if len(self._last) > _REMEMBERED:
            del self._last[min(self._last, key=lambda name: self._last[name].time)]
        return self._report_pause(report.time)

    def answered(self, proxy: str, counts: Mapping[Labels, int]) -> None:
        """Add the answers of a proxy; ``counts`` are all its answers so far, by path and status."""
        now = {name: value for row in PROXY for name, value in row.values(counts)}
        self._totals.update(_increments(self._proxies.pop(proxy, {}), now))
        self._proxies[proxy] = now  # the last entry is the most recent
        if len(self._proxies) > _REMEMBERED:
            del self._proxies[next(iter(self._proxies))]

    def totals(self, now: float) -> ServiceTotals:
        """Return the totals, and the reports of the replicas that are live at ``now``."""
        return ServiceTotals(dict(self._totals), sorted(self._live(now), key=lambda report: report.replica))

    def bins(self, now: float, seconds: int, since: int | None) -> Bins:
        """Return the history; see ``MetricsHistory.bins``."""
        return self._history.bins(now, seconds, since)

    def _live(self, now: float) -> list[Report]:
        return [report for report in self._last.values() if now - report.time < ALIVE_SECONDS * self._pause]

    def _report_pause(self, now: float) -> float:
        """Return the seconds between two reports of a replica; they are computed once a second."""
        if not 0 <= now - self._paced_at < _REPORT_SECONDS:
            self._paced_at = now
            self._pause = max(_REPORT_SECONDS, len(self._live(now)) / _REPORTS_PER_SECOND)
        return self._pause

    def _set_back(self, time: float) -> None:
        if ahead := self._history.set_back(time):
            self._last = {name: replace(report, time=report.time - ahead) for name, report in self._last.items()}

    def _merge_old(self, counted: Iterable[Name]) -> None:
        """Mark the domains and versions in ``counted`` as recent, and merge the oldest above the limits."""
        for key in counted:
            if not is_versioned(key) or key[1] == OTHER_DOMAINS:
                continue
            domain, version = key[1:3]
            self._separate[domain] = versions = self._separate.pop(domain, {})  # the last entry is the most recent
            if version != OLDER_VERSIONS:
                versions.pop(version, None)
                versions[version] = None
            if len(versions) > MAX_VERSIONS:
                self._merge((domain, next(iter(versions))), domain)
            if len(self._separate) > MAX_DOMAINS:
                self._merge((next(iter(self._separate)),), OTHER_DOMAINS)

    def _merge(self, oldest: tuple[str | int, ...], domain: str | int) -> None:
        """Merge a domain, or a domain and version, into the series of ``domain`` for older versions."""
        separate = self._separate if len(oldest) == 1 else self._separate[domain]
        del separate[oldest[-1]]
        for key in [key for key in self._totals if is_versioned(key) and key[1 : 1 + len(oldest)] == oldest]:
            self._totals[key[0], domain, OLDER_VERSIONS, *key[3:]] += self._totals.pop(key)


def _increments(before: Mapping[Name, float], now: Mapping[Name, float]) -> dict[Name, float]:
    """Return the increments between two reports of a replica; new names are included even if their value is 0."""
    delta: defaultdict[Name, float] = defaultdict(float)
    for key, value in now.items():
        if key not in before or value != before[key]:
            delta[key] = value - before.get(key, 0)
    domains = {key[1] for key in now if is_versioned(key)}
    for key in before.keys() - now.keys():
        if is_versioned(key):  # the replica merged this series; its counts are in the totals already
            delta[key[0], key[1] if key[1] in domains else OTHER_DOMAINS, OLDER_VERSIONS, *key[3:]] -= before[key]
    return delta
