"""Data of the dashboard: versions and their measured effects, all replicas, the registry, the events, the stream."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError

from osd.admin.rollouts import Listed
from osd.capture.streams import StreamState, look
from osd.config import Settings
from osd.engine.counters import DOMAINS, OTHERS
from osd.redis_client import connect
from osd.registry.events import Events
from osd.registry.learnt import REQUESTS
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
    training: Training,
) -> dict[str, Any]:
    """A domain's ``versions``, those of them that replicas have ``running``, and its rollout, as JSON.

    A version's ``speedup`` over the version before is measured while it is in service or on trial, and None else.
    """
    live = {name: totals.by_label(f"version_{name}") for name in ("rounds", "drafted", "accepted")}
    effects = {} if training.account is None else {effect.number: effect for effect in training.account.measured}
    rows = []
    for version in versions:
        number = version["number"]
        counts = {name: by_version.get((domain, number), 0) for name, by_version in live.items()}
        effect = effects.get(number)
        measured = {"speedup": None if effect is None else msgspec.to_builtins(effect)}
        rows.append({**version, **measured, "in_service": number in running, "live": counts})
    return {"domain": domain, "versions": rows, **rollout_of(rollout)}


_FRESH_SECONDS = 1.0
_EVENTS = 240
_TABLE_SIZES = {"recall_entries": "entries", "recall_bytes": "bytes"}


class TrainingFeed(NamedTuple):
    """By domain the work of its trainer, the start of a canary's trial, and the state of its stream."""

    training: dict[str, Training]
    tried_since: dict[str, float]
    streams: dict[str, StreamState]


@dataclass(frozen=True)
class DomainFeed:
    """A domain; its ``versions`` and ``training`` are as of ``read_at``, a moment of ``time.monotonic``."""

    domain: str
    versions: list[dict[str, Any]]
    rollout: Rollout | None
    training: Training
    read_at: float


class Feeds:
    """Registry and Redis as the dashboard needs them; read at most once a second however many pages are open."""

    def __init__(self, settings: Settings, redis_url: str, registry: Registry, events: Events) -> None:
        self._domain, self._registry, self._events = settings.domain, registry, events
        self._pointer = Pointer(redis_url, registry.storage)
        self._redis, self._prefix = connect(redis_url), settings.capture.stream
        self._reports = TrainingReports(redis_url)
        self._domains = settings.trained_domains
        self._training, self._training_at = dict[str, Training](), 0.0
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
            if time.monotonic() - self._training_at > _FRESH_SECONDS:
                with contextlib.suppress(RedisError, OSError):
                    # A Redis that lost a report must not make a counter go backwards: the trainer reports again.
                    for domain, training in self._reports.get(self._domains).items():
                        before = self._training.get(domain, Training())
                        self._training[domain] = training.at_least(before)
                    rollouts = {domain: self._pointer.get(domain) for domain in self._domains}
                    self._tried_since = {
                        domain: rollout.changed for domain, rollout in rollouts.items() if rollout and rollout.canary
                    }
                    self._streams = self._look_at_streams()
                self._training_at = time.monotonic()
            return TrainingFeed(dict(self._training), dict(self._tried_since), dict(self._streams))

    def of(self, domain: str) -> DomainFeed:
        """Any domain's versions, its rollout and its training; the rollout as it is now. Blocks for a moment.

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
                training = self._reports.get([domain]).get(domain, Training())
                self._others[domain] = DomainFeed(domain, versions, None, training, now)
            return replace(self._others[domain], rollout=self._pointer.get(domain))

    def close(self) -> None:
        """Close the connections."""
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
    return shown(feed.domain, feed.versions, running, feed.rollout, totals, feed.training)


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
    training = totals.training.get(settings.domain, Training())
    counted = (row.key for row in REPLICA if row.kind == "counter" and not row.by)
    return {
        "time": time.time(),
        **shown(settings.domain, feeds["versions"], running, feeds["rollout"], totals, training),
        "domains": feeds["domains"],
        "model": asdict(model),
        "answers": answers,
        "drafter": settings.drafter.kind,
        "growth": settings.growth.kind,
        "governed": getattr(settings.growth, "governed", False),
        "capture": settings.capture.enabled,
        "display": display(),
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
