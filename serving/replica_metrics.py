"""Counters and history of all replicas, kept in one actor so that any replica can answer for all.

A report carries a replica's counters since it started. What changed since the replica's last report is added to
the totals and to the second in which it changed: a replica that dies leaves its counts behind, and a new one starts
from zero without making any total go backwards. Of the drafter versions of a domain those that were counted last are
kept apart, and all others together, and so are the domains: no count falls but those of what joins the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from osd.capture.waiting import StreamState
from osd.engine.counters import APART, DOMAINS, OLDER, OTHERS, EngineLoad
from osd.registry.ledger import Spent
from osd.registry.training import Training
from serving.metrics_history import MOST_BINS, Bins, History, MetricsHistory, Name

ACTOR = "replica_metrics"
"""Name of the actor that keeps the metrics of all replicas."""

ALIVE_SECONDS = 5.0
"""A replica that has not reported for so long is gone; for so many of their pauses, where they pause for longer."""

_REPORT_SECONDS, _REPORTS_A_SECOND = 1.0, 50.0
_KNOWN = 4096  # replicas, and proxies


@dataclass(frozen=True)
class TableSize:
    """How much the recall tables of a domain hold: ``entries`` in use, and the ``bytes`` that they all have."""

    entries: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """What one replica says once a second, or as often as ``ReplicaMetrics.push`` asks for it.

    ``version`` is the stable one, and ``canary`` the one that drafts for a share of requests beside it; ``others`` are
    the versions of other domains that are at hand. ``counters`` never decrease; labels are (position) or (source) of
    draft tokens, (source, order) of those that were recalled, (number) of a histogram's bucket, or, of names that begin
    with "version_", first domain and version of the drafter, where "older" are those that the replica does not keep
    apart. ``tables`` are those of recall by domain.
    """

    replica: str
    time: float
    version: int
    speculation: bool
    load: EngineLoad
    swap_stall_seconds_max: float
    counters: Mapping[Name, float]
    canary: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, TableSize] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Counters summed over every replica that ever reported, and the last report of each living one.

    ``spent`` is what the trainer says of its CPU seconds, and ``training`` of its work, by domain. ``tried_since`` says
    by domain since when a canary is tried, where there is one, and ``streams`` what each domain's holds.
    """

    counters: Mapping[Name, float]
    replicas: list[Report]
    spent: Spent = field(default_factory=Spent)
    training: Mapping[str, Training] = field(default_factory=dict)
    tried_since: Mapping[str, float] = field(default_factory=dict)
    streams: Mapping[str, StreamState] = field(default_factory=dict)

    def by_label(self, name: str) -> dict[tuple[str | int, ...], float]:
        """The counter ``name`` by its labels, in order."""
        found = {key[1:]: value for key, value in self.counters.items() if isinstance(key, tuple) and key[0] == name}
        return dict(sorted(found.items(), key=lambda item: [(isinstance(label, int), label) for label in item[0]]))


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
        self._past.add(report.time, report.replica, delta, (report.load.running, report.load.waiting))
        if len(self._last) > _KNOWN:
            del self._last[min(self._last, key=lambda name: self._last[name].time)]
        return self._pace(report.time)

    def answered(self, proxy: str, counts: Mapping[tuple[str, int], int]) -> None:
        """Take all that a proxy has answered so far, by path and status."""
        now: dict[Name, float] = {("http_responses", *labels): count for labels, count in counts.items()}
        self._totals.update(_since(self._proxies.pop(proxy, {}), now))
        self._proxies[proxy] = now  # behind all others
        if len(self._proxies) > _KNOWN:
            del self._proxies[next(iter(self._proxies))]

    def totals(self, now: float) -> Totals:
        """Everything counted so far, and who is alive at ``now``."""
        return Totals(dict(self._totals), sorted(self._living(now), key=lambda report: report.replica))

    def history(self, now: float, seconds: int, bins: int = MOST_BINS) -> History:
        """The last ``seconds`` in at most ``bins`` bins, oldest first; the running second is left out."""
        # Of all time: a position that accepted nothing in this window is still one.
        totals = Totals(self._totals, [])
        positions, sources = totals.by_label("accepted_per_position"), totals.by_label("source_drafted")
        return self._past.history(now, seconds, bins, [place for (place,) in positions], [name for (name,) in sources])

    def bins(self, now: float, seconds: int, since: int | None) -> Bins:
        """The last ``seconds`` by what was counted, and of these only what came after the bin at ``since``."""
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
            if not _of_version(key) or key[1] == OTHERS:
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
        for key in [key for key in self._totals if _of_version(key) and key[1 : 1 + len(oldest)] == oldest]:
            self._totals[key[0], domain, OLDER, *key[3:]] += self._totals.pop(key)


def _of_version(key: Name) -> TypeGuard[tuple[str | int, ...]]:
    return isinstance(key, tuple) and str(key[0]).startswith("version_")


def _since(before: Mapping[Name, float], now: Mapping[Name, float]) -> dict[Name, float]:
    """What a replica counted between two reports; of what it had not heard of before also that this is 0 yet."""
    delta: defaultdict[Name, float] = defaultdict(float)
    for key, value in now.items():
        if key not in before or value != before[key]:
            delta[key] = value - before.get(key, 0)
    domains = {key[1] for key in now if _of_version(key)}
    for key in before.keys() - now.keys():
        if _of_version(key):  # the replica has added it to its older ones, and here it has been counted
            delta[key[0], key[1] if key[1] in domains else OTHERS, OLDER, *key[3:]] -= before[key]
    return delta
