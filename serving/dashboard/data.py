"""Data of the dashboard: versions and their measured effects, replicas, events and trace streams, as JSON."""

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

from osd.admin.rollouts import ListedVersion
from osd.capture.purge import Member, Purges
from osd.capture.streams import StreamState, stream_states
from osd.config import Settings
from osd.economy.effect import LEAST_TRIALS
from osd.economy.switchback import BEGIN_SECONDS
from osd.engine.counters import MAX_DOMAINS, OTHER_DOMAINS
from osd.redis_client import connect
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.trained_requests import REQUESTS
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry, VersionInfo
from serving.dashboard.charts import display
from serving.metrics.report import ServiceTotals
from serving.metrics.table import REPLICA, measured
from serving.served_model import ServedModel


def version_json(info: VersionInfo | ListedVersion) -> dict[str, Any]:
    """Return a version as JSON, without the long list of requests that it was trained on."""
    # The list of the requests that a version was trained on is long; pages do not show it.
    manifest = {name: value for name, value in info.manifest.items() if name != REQUESTS}
    return {"number": info.number, "problem": info.problem, "manifest": manifest}


def rollout_json(rollout: Rollout | None) -> dict[str, Any]:
    """Return a rollout as JSON; None stands for a domain without a pointer."""
    defaults = {"stable": None, "canary": None, "share": 0.0, "pinned": False}
    return {name: getattr(rollout, name, value) for name, value in defaults.items()}


def _domain_json(
    domain: str,
    versions: Sequence[dict[str, Any]],
    running: Collection[int | None],
    rollout: Rollout | None,
    totals: ServiceTotals,
    training: Training,
) -> dict[str, Any]:
    """Return a domain as JSON.

    Args:
        domain: name of the domain.
        versions: versions from ``version_json``.
        running: versions that replicas run.
        rollout: rollout of the domain, if any.
        totals: totals of the service, for the acceptance rate of each version.
        training: report of the domain's trainer. It holds the measured speed-up of a version over the version before
            it, while the version is in service or on trial.
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
    return {"domain": domain, "versions": rows, **rollout_json(rollout)}


_FRESH_SECONDS = 1.0
_EVENTS = 240
_TABLE_SIZES = {"recall_entries": "entries", "recall_bytes": "bytes"}


class TrainingFeed(NamedTuple):
    """State of training by domain: the trainer's report, the start of a canary's trial, and the trace stream."""

    training: dict[str, Training]
    tried_since: dict[str, float]
    streams: dict[str, StreamState]


@dataclass(frozen=True)
class DomainFeed:
    """State of one domain; ``versions`` and ``training`` were read at ``read_at``, a time of ``time.monotonic``."""

    domain: str
    versions: list[dict[str, Any]]
    rollout: Rollout | None
    training: Training
    read_at: float


class Feeds:
    """Data from the registry and Redis, read at most once a second for all open pages."""

    def __init__(self, settings: Settings, redis_url: str, registry: Registry, events: Events) -> None:
        self._domain, self._registry, self._events = settings.domain, registry, events
        self._pointer, self._purges = Pointer(redis_url, registry.storage), Purges(redis_url)
        self._redis, self._prefix = connect(redis_url), settings.capture.stream
        self._reports = TrainingReports(redis_url)
        self._domains = settings.trained_domains
        self._training, self._training_at = dict[str, Training](), 0.0
        self._tried_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._latest: dict[str, Any] = {}
        self._versions: list[dict[str, Any]] = []
        self._extra_domains: list[str] = []
        self._cache: dict[str, DomainFeed] = {}
        self._streams: dict[str, StreamState] = {}

    def read(self) -> dict[str, Any]:
        """Return the current data; this may block.

        The keys are ``versions``, ``domains``, ``events``, ``rollout``, ``redis`` (whether Redis answers), ``streams``
        by domain (None without Redis), and ``silence``, the seconds since the last heartbeat of the trainer (None
        without a trainer and without Redis).
        """
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_SECONDS:
                self._latest = self._gather()
                self._read_at = time.monotonic()
            return self._latest

    def trainer(self) -> TrainingFeed:
        """Return the state of training, or the last known state if Redis does not answer; this may block."""
        with self._lock:
            if time.monotonic() - self._training_at > _FRESH_SECONDS:
                with contextlib.suppress(RedisError, OSError):
                    # If Redis lost a report, counters must not fall until the trainer reports again.
                    for domain, training in self._reports.get(self._domains).items():
                        before = self._training.get(domain, Training())
                        self._training[domain] = training.at_least(before)
                    rollouts = {domain: self._pointer.get(domain) for domain in self._domains}
                    self._tried_since = {
                        domain: rollout.changed for domain, rollout in rollouts.items() if rollout and rollout.canary
                    }
                    self._streams = self._read_streams()
                self._training_at = time.monotonic()
            return TrainingFeed(dict(self._training), dict(self._tried_since), dict(self._streams))

    def of(self, domain: str) -> DomainFeed:
        """Return the state of any domain; the rollout is never older than this call. This may block.

        Raises:
            ValueError: the domain has no versions.
            redis.exceptions.RedisError: Redis does not answer.
            OSError: the registry cannot be read.
        """
        with self._lock:
            now = time.monotonic()
            self._cache = {name: feed for name, feed in self._cache.items() if now - feed.read_at <= _FRESH_SECONDS}
            if domain not in self._cache:
                versions = [version_json(info) for info in self._registry.list(domain)]
                if not versions:
                    raise ValueError(f"the domain {domain} does not exist")
                training = self._reports.get([domain]).get(domain, Training())
                self._cache[domain] = DomainFeed(domain, versions, None, training, now)
            return replace(self._cache[domain], rollout=self._pointer.get(domain))

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._reports, self._redis, self._pointer, self._purges):
            connection.close()

    def _gather(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # while the registry cannot be read, the last known versions stay
            self._versions = [version_json(info) for info in self._registry.list(self._domain)]
            self._extra_domains = [name for name in self._registry.domains() if name != self._domain]
        registry = {"versions": self._versions, "domains": [self._domain, *self._extra_domains]}
        try:
            rollout = self._pointer.get(self._domain)
            # Redis lists the events of all domains together.
            recent = self._events.recent(_EVENTS * len(self._domains))
            events = [event for event in recent if event["domain"] == self._domain]
            silence, streams = self._purges.silence(Member("trainer", self._domain)), self._read_streams()
            answers = {"redis": True, "rollout": rollout, "events": events, "streams": streams, "silence": silence}
        except (RedisError, OSError):
            answers = {"redis": False, "rollout": None, "events": [], "streams": None, "silence": None}
        return {**registry, **answers}

    def _read_streams(self) -> dict[str, StreamState]:
        """Return the streams of the most recent domains; the remaining domains are merged into one entry.

        The number of entries is bounded, because clients can name domains.
        """
        streams = list(stream_states(self._redis, self._prefix).items())
        states, merged = dict(streams[: MAX_DOMAINS - 1]), [state for _, state in streams[MAX_DOMAINS - 1 :]]
        if merged:
            records, size = sum(state.records for state in merged), sum(state.bytes for state in merged)
            states[OTHER_DOMAINS] = StreamState(records, size, None)
        return states


def compose_domain(settings: Settings, totals: ServiceTotals, feed: DomainFeed) -> dict[str, Any]:
    """Return the JSON of ``/dashboard/versions`` for any domain."""
    is_default = feed.domain == settings.domain
    running = {report.version if is_default else report.domains.get(feed.domain) for report in totals.replicas}
    return _domain_json(feed.domain, feed.versions, running, feed.rollout, totals, feed.training)


def speedup(totals: ServiceTotals) -> dict[str, Any] | None:
    """Return the measured speed-up as JSON, or None before the first estimate.

    ``low`` and ``high`` are the bounds of its 95 % interval, None until they are known. ``price`` is the share of busy
    seconds that the measurement cost. ``guarded`` is the number of replicas in which drafting is off.
    """
    result = measured(totals)
    if result.effect is None:
        return None
    low, high = (None, None) if math.isinf(result.effect.width) else result.effect.interval
    busy = totals.counters.get("busy_seconds", 0.0)
    return {
        "estimate": math.exp(result.effect.log),
        "low": low,
        "high": high,
        "price": result.spent / busy if busy else 0.0,
        "guarded": result.guarded,
        "trials": result.trials,
    }


def minutes_to_speedup(settings: Settings, totals: ServiceTotals) -> float | None:
    """Return the busy minutes of each replica until the speed-up has an interval; None before the first estimate.

    The rest of the trials take as long as the trials so far, or until ``economy.measure`` has paid for them if that is
    later.
    """
    trials, replicas = measured(totals).trials, len(totals.replicas)
    if not trials or not replicas:
        return None
    names = ("busy_seconds", "measuring_seconds")
    busy, spent = (sum(report.counters.get(name, 0.0) for report in totals.replicas) for name in names)
    rest = max(LEAST_TRIALS - trials, 0) / trials
    share = settings.economy.measure
    unpaid = rest * spent - (replicas * BEGIN_SECONDS + share * busy - spent)
    return max(rest * busy, unpaid / share if share and rest else 0.0) / replicas / 60


def _recall(totals: ServiceTotals) -> dict[str, Any]:
    """Return the size of the recall tables by domain, and their drafted and accepted tokens by source and order."""
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
    """Return for each domain the size of its stream, the number of waiting records, and the age of the oldest."""
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
    settings: Settings, model: ServedModel, totals: ServiceTotals, feeds: dict[str, Any], answers: bool = True
) -> dict[str, Any]:
    """Return the JSON of ``/dashboard/data`` without its history.

    Args:
        settings: settings of the service.
        model: the served model.
        totals: totals of the service.
        feeds: result of ``Feeds.read``.
        answers: whether the server of the dashboard also answers requests; otherwise there is no playground.
    """
    running = {report.version for report in totals.replicas}
    training = totals.training.get(settings.domain, Training())
    counted = (row.key for row in REPLICA if row.kind == "counter" and not row.by)
    return {
        "time": time.time(),
        **_domain_json(settings.domain, feeds["versions"], running, feeds["rollout"], totals, training),
        "domains": feeds["domains"],
        "model": asdict(model),
        "answers": answers,
        "engine": settings.engine.kind,
        "drafter": settings.drafter.kind,
        "growth": settings.growth.kind,
        "governed": getattr(settings.growth, "governed", False),
        "capture": settings.capture.enabled,
        "display": display(),
        "measures": settings.measures and answers and settings.engine.kind == "osd",
        "speedup": speedup(totals),
        "minutes_to_speedup": minutes_to_speedup(settings, totals),
        "trainer": {
            "needed": settings.trains,
            "silence": feeds["silence"],
            "min_records": settings.trainer.min_records,
        },
        "tried_since": totals.tried_since.get(settings.domain),
        "expected_replicas": settings.serving.replicas if answers else 1,
        "totals": {key: totals.counters.get(key, 0) for key in counted},
        "replicas": [
            {
                "name": report.replica,
                "version": report.version,
                "canary": report.canary,
                "others": dict(report.domains),
                "speculation": report.speculation,
                **{name: value for name, value in report.gauges.items() if isinstance(name, str)},
            }
            for report in totals.replicas
        ],
        "training": {domain: msgspec.to_builtins(training) for domain, training in totals.training.items()},
        "recall": _recall(totals),
        "traced": totals.traced,
        "events": feeds["events"],
        "stream": {
            "redis": feeds["redis"],
            "capacity": settings.capture.max_records,
            "domains": _streams(feeds["streams"] or {}),
        },
    }
