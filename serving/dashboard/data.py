"""What the dashboard shows: versions and what they earned, all replicas, the registry, the events and the stream."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError

from osd.admin.rollouts import Listed
from osd.capture.streams import StreamState, look
from osd.config import Settings
from osd.engine.counters import DOMAINS, OLDER, OTHERS
from osd.redis_client import connect
from osd.registry.events import Events
from osd.registry.learnt import REQUESTS
from osd.registry.ledger import Ledger, Spent
from osd.registry.pointer import Pointer, Rollout
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry, VersionInfo
from serving.dashboard.charts import display
from serving.metrics.report import Totals
from serving.metrics.table import REPLICA, measured
from serving.service import Model


def version_of(info: VersionInfo | Listed) -> dict[str, Any]:
    """A version as JSON."""
    # What a version has learnt from is a long list, and nothing to look at.
    manifest = {name: value for name, value in info.manifest.items() if name != REQUESTS}
    return {"number": info.number, "problem": info.problem, "manifest": manifest}


def rollout_of(rollout: Rollout | None) -> dict[str, Any]:
    """A rollout as JSON; None is a domain that has none."""
    absent = {"stable": None, "canary": None, "share": 0.0, "pinned": False}
    return {name: getattr(rollout, name, value) for name, value in absent.items()}


def shown(
    domain: str,
    versions: Sequence[dict[str, Any]],
    running: Collection[int | None],
    rollout: Rollout | None,
    totals: Totals,
    spent: Spent,
) -> dict[str, Any]:
    """A domain's ``versions``, those of them that replicas have ``running``, its rollout and its ledger, as JSON.

    A version's ``training`` are the seconds that it took, None where nobody says, ``payback`` as in the ledger.
    """
    live = {name: totals.by_label(f"version_{name}") for name in ("rounds", "drafted", "accepted")}
    rows = []
    for version in versions:
        counts = {name: by_version.get((domain, version["number"]), 0) for name, by_version in live.items()}
        took = {"training": spent.by_version.get(version["number"]), "payback": spent.payback(version["number"])}
        rows.append({**version, **took, "in_service": version["number"] in running, "live": counts})
    return {
        "domain": domain,
        "versions": rows,
        "ledger": ledger(totals, domain, spent),
        **rollout_of(rollout),
    }


def ledger(totals: Totals, domain: str, spent: Spent) -> dict[str, Any]:
    """Seconds saved in serving against seconds ``spent`` on training, by version of ``domain`` and in ``total``.

    Versions that are not counted apart any more are the one named "older", with what was spent on them.
    ``saved`` is ``plain - decode``, see ``osd.engine.savings``: seconds of the engine, on all the cores that it has.
    ``training`` are CPU seconds of the trainer and what rounds lost beside it, in all ``slowed``; those since the last
    version count in the total only. ``net`` is ``saved - training``. ``payback`` are the seconds in service after which
    a version, or everything, is expected to have paid; None where it never does, or nobody knows.
    """
    tokens, plain, decode = (
        {labels[1]: value for labels, value in totals.by_label(f"version_{name}").items() if labels[0] == domain}
        for name in ("tokens", "plain_seconds", "decode_seconds")
    )
    by_version = _apart(spent, tokens)
    rows = []
    for version in sorted({*tokens, *by_version}, key=lambda version: -1 if version == OLDER else version):
        saved, training = plain.get(version, 0.0) - decode.get(version, 0.0), by_version.get(version, 0.0)
        rows.append({"version": version, "tokens": tokens.get(version, 0), "plain": plain.get(version, 0.0)})
        rows[-1] |= {"decode": decode.get(version, 0.0), "saved": saved, "training": training, "net": saved - training}
        rows[-1]["payback"] = None if isinstance(version, str) else spent.payback(version)
    total: dict[str, float | None] = {
        name: sum(row[name] for row in rows) for name in ("tokens", "plain", "decode", "saved")
    }
    total |= {"training": spent.total, "net": sum(row["saved"] for row in rows) - spent.total}
    total["payback"] = spent.payback_of_all
    return {"versions": rows, "unpublished": spent.unpublished, "slowed": spent.slowed, "total": total}


def _apart(spent: Spent, counted: Collection[str | int]) -> dict[str | int, float]:
    """Seconds of training by version; those of versions that serving may count among the older ones are theirs."""
    newest = max((version for version in counted if isinstance(version, int)), default=0)
    found: defaultdict[str | int, float] = defaultdict(float)
    if spent.older:
        found[OLDER] = spent.older
    for version, seconds in spent.by_version.items():
        found[OLDER if OLDER in counted and version not in counted and version < newest else version] += seconds
    return found


_FRESH_SECONDS = 1.0
_EVENTS = 240
_TABLE_SIZES = {"recall_entries": "entries", "recall_bytes": "bytes"}


class TrainingFeed(NamedTuple):
    """What the trainer ``spent``; by domain what it has done, since when a canary is tried, what streams hold."""

    spent: Spent
    training: dict[str, Training]
    tried_since: dict[str, float]
    streams: dict[str, StreamState]


@dataclass(frozen=True)
class DomainFeed:
    """A domain; its ``versions`` and what was ``spent`` are as of ``read_at``, a moment of ``time.monotonic``."""

    domain: str
    versions: list[dict[str, Any]]
    rollout: Rollout | None
    spent: Spent
    read_at: float


class Feeds:
    """Registry and Redis as the dashboard needs them; read at most once a second however many pages are open."""

    def __init__(self, settings: Settings, redis_url: str, registry: Registry, events: Events) -> None:
        self._domain, self._registry, self._events = settings.domain, registry, events
        self._pointer = Pointer(redis_url, registry.storage)
        self._redis, self._prefix = connect(redis_url), settings.capture.stream
        self._ledger = Ledger(redis_url)
        self._reports = TrainingReports(redis_url)
        self._domains = settings.trained_domains
        self._spent, self._training, self._spent_at = Spent(), dict[str, Training](), 0.0
        self._tried_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._latest: dict[str, Any] = {}
        self._versions: list[dict[str, Any]] = []
        self._known: list[str] = []
        self._others: dict[str, DomainFeed] = {}
        self._streams: dict[str, StreamState] = {}

    def read(self) -> dict[str, Any]:
        """``versions``, ``domains``, ``events``, ``rollout``, and the ``streams`` of each domain, None without Redis.

        Blocks for a moment.
        """
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_SECONDS:
                self._latest = self._gather()
                self._read_at = time.monotonic()
            return self._latest

    def trainer(self) -> TrainingFeed:
        """What the trainer says, and what waits for it.

        As last known when Redis is gone; may block.
        """
        with self._lock:
            if time.monotonic() - self._spent_at > _FRESH_SECONDS:
                with contextlib.suppress(RedisError, OSError):
                    # A Redis that lost it must not make a counter go backwards: the trainer tells it again.
                    self._spent = max(self._spent, self._ledger.get(self._domain), key=lambda spent: spent.total)
                    for domain, training in self._reports.get(self._domains).items():
                        before = self._training.get(domain, Training())
                        self._training[domain] = training.at_least(before)
                    rollouts = {domain: self._pointer.get(domain) for domain in self._domains}
                    self._tried_since = {
                        domain: rollout.changed for domain, rollout in rollouts.items() if rollout and rollout.canary
                    }
                    self._streams = self._look_at_streams()
                self._spent_at = time.monotonic()
            return TrainingFeed(self._spent, dict(self._training), dict(self._tried_since), dict(self._streams))

    def of(self, domain: str) -> DomainFeed:
        """Any domain's versions, its rollout and what was spent on it; the rollout as it is now. Blocks for a moment.

        Raises:
            ValueError: there is no such domain.
            redis.exceptions.RedisError: Redis does not answer.
            OSError: the disk does not give it.
        """
        with self._lock:
            now = time.monotonic()
            self._others = {name: one for name, one in self._others.items() if now - one.read_at <= _FRESH_SECONDS}
            if domain not in self._others:
                versions = [version_of(info) for info in self._registry.list(domain)]
                if not versions:
                    raise ValueError(f"there is no domain {domain}")
                self._others[domain] = DomainFeed(domain, versions, None, self._ledger.get(domain), now)
            return replace(self._others[domain], rollout=self._pointer.get(domain))

    def close(self) -> None:
        """Close the connections."""
        self._ledger.close()
        self._reports.close()
        self._redis.close()
        self._pointer.close()

    def _gather(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # those last seen stay while the disk does not say
            self._versions = [version_of(info) for info in self._registry.list(self._domain)]
            self._known = [name for name in self._registry.domains() if name != self._domain]
        seen = {"versions": self._versions, "domains": [self._domain, *self._known]}
        try:
            rollout = self._pointer.get(self._domain)
            # Those of other domains stand between them.
            told = self._events.recent(_EVENTS * len(self._domains))
            events = [event for event in told if event["domain"] == self._domain]
            return {**seen, "redis": True, "rollout": rollout, "events": events, "streams": self._look_at_streams()}
        except (RedisError, OSError):
            return {**seen, "redis": False, "rollout": None, "events": [], "streams": None}

    def _look_at_streams(self) -> dict[str, StreamState]:
        """The streams of the domains that were captured last; all others, which clients may name, are one."""
        found = list(look(self._redis, self._prefix).items())
        states, others = dict(found[: DOMAINS - 1]), [state for _, state in found[DOMAINS - 1 :]]
        if others:
            records, size = sum(state.records for state in others), sum(state.bytes for state in others)
            states[OTHERS] = StreamState(records, size, None)
        return states


def compose_domain(settings: Settings, totals: Totals, feed: DomainFeed) -> dict[str, Any]:
    """What the dashboard shows of the versions of any domain: the JSON of ``/dashboard/versions``."""
    own = feed.domain == settings.domain
    running = {report.version if own else report.others.get(feed.domain) for report in totals.replicas}
    return shown(feed.domain, feed.versions, running, feed.rollout, totals, feed.spent)


def speedup(totals: Totals) -> dict[str, Any] | None:
    """The measured speed-up with its interval, None before any trial.

    ``price`` is the share of busy seconds that measuring cost, ``low`` and ``high`` are None before they are known, and
    ``guarded`` counts replicas in which drafting is off.
    """
    found = measured(totals)
    if found.effect is None:
        return None
    low, high = (None, None) if math.isinf(found.effect.width) else found.effect.interval
    busy = totals.counters.get("busy_seconds", 0.0)
    figures = {"estimate": math.exp(found.effect.log), "low": low, "high": high}
    return {**figures, "price": found.spent / busy if busy else 0.0, "guarded": found.guarded, "trials": found.trials}


def _recall(totals: Totals) -> dict[str, Any]:
    """How large the tables of all replicas are, by domain, and what was found in them, by source and order."""
    tables: dict[str, Counter[str]] = {}
    for report in totals.replicas:
        for name, value in report.gauges.items():
            if isinstance(name, tuple) and (size := _TABLE_SIZES.get(str(name[0]))):
                tables.setdefault(str(name[1]), Counter())[size] += value  # pyright: ignore[reportArgumentType]
    accepted = totals.by_label("recall_accepted")
    orders = [
        {"source": source, "order": order, "drafted": drafted, "accepted": accepted.get((source, order), 0)}
        for (source, order), drafted in totals.by_label("recall_drafted").items()
    ]
    return {"tables": tables, "orders": orders}


def _streams(states: Mapping[str, StreamState]) -> dict[str, dict[str, float | None]]:
    """Of each domain the records and bytes on its stream, and how many wait for a trainer, the oldest for how long."""
    return {
        domain: {
            "records": state.records,
            "bytes": state.bytes,
            "lag": None if state.waiting is None else state.waiting.records,
            "age": None if state.waiting is None else state.waiting.age,
        }
        for domain, state in states.items()
    }


def compose(
    settings: Settings, model: Model, totals: Totals, feeds: dict[str, Any], answers: bool = True
) -> dict[str, Any]:
    """What the dashboard shows of now: the JSON of ``/dashboard/data`` without its history.

    ``answers`` says whether what serves the dashboard answers requests too.
    """
    running = {report.version for report in totals.replicas}
    counted = (row.key for row in REPLICA if row.kind == "counter" and not row.by)
    return {
        "time": time.time(),
        **shown(settings.domain, feeds["versions"], running, feeds["rollout"], totals, totals.spent),
        "domains": feeds["domains"],
        "model": asdict(model),
        "answers": answers,
        "drafter": settings.drafter.kind,
        "growth": settings.growth.kind,
        "governed": getattr(settings.growth, "governed", False),
        "capture": settings.capture.enabled,
        "display": display(settings.domain),
        "speedup": speedup(totals),
        "totals": {key: totals.counters.get(key, 0) for key in counted},
        "replicas": [
            {
                "name": report.replica,
                "version": report.version,
                "canary": report.canary,
                "others": dict(report.others),
                "speculation": report.speculation,
                **{name: value for name, value in report.gauges.items() if isinstance(name, str)},
            }
            for report in totals.replicas
        ],
        "training": {domain: msgspec.to_builtins(one) for domain, one in totals.training.items()},
        "recall": _recall(totals),
        "events": feeds["events"],
        "stream": {
            "redis": feeds["redis"],
            "capacity": settings.capture.max_records,
            "domains": _streams(feeds["streams"] or {}),
        },
    }
