"""What the dashboard shows: the history of all replicas beside the registry, the events and the stream."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.capture.stream import TraceReader
from osd.config import Settings
from osd.engine.counters import OLDER
from osd.histogram import REQUEST_HISTOGRAMS
from osd.registry.events import Events
from osd.registry.learnt import REQUESTS
from osd.registry.ledger import Ledger, Spent
from osd.registry.pointer import Pointer, Rollout
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry, VersionInfo
from serving.metrics_history import History
from serving.replica_metrics import Totals
from serving.service import Model

_FRESH_SECONDS = 1.0
_EVENTS = 240
_LATENCIES = ("time_to_first_token", "inter_token", "queue_time", "request_time")


class Feeds:
    """Registry and Redis as the dashboard needs them; read at most once a second however many pages are open."""

    def __init__(self, settings: Settings, redis_url: str, registry: Registry, events: Events) -> None:
        self._domain, self._registry, self._events = settings.domain, registry, events
        self._pointer = Pointer(redis_url, registry.storage)
        self._reader = TraceReader(
            redis_url, settings.capture, group=f"trainer-{settings.domain}", consumer="dashboard"
        )
        self._ledger = Ledger(redis_url)
        self._reports = TrainingReports(redis_url)
        self._domains = list(dict.fromkeys((settings.domain, *settings.trainer.extra_domains)))
        self._spent, self._training, self._spent_at = Spent(), dict[str, Training](), 0.0
        self._tried_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._latest: dict[str, Any] = {}
        self._versions: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        """``versions``, ``events``, ``rollout`` and ``lag``, the last two None without Redis. Blocks for a moment."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_SECONDS:
                self._latest = self._gather()
                self._read_at = time.monotonic()
            return self._latest

    def trainer(self) -> tuple[Spent, dict[str, Training], dict[str, float]]:
        """What the trainer spent, and by domain what it has done, and since when a canary is tried where one is.

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
                self._spent_at = time.monotonic()
            return self._spent, dict(self._training), dict(self._tried_since)

    def close(self) -> None:
        """Close the connections."""
        self._ledger.close()
        self._reports.close()
        self._reader.close()
        self._pointer.close()

    def _gather(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # those last seen stay while the disk does not say
            self._versions = [_version(info) for info in self._registry.list(self._domain)]
        versions = self._versions
        try:
            rollout = self._pointer.get(self._domain)
            events = [event for event in self._events.recent(_EVENTS) if event["domain"] == self._domain]
            lag = self._reader.lag()
            return {"redis": True, "versions": versions, "rollout": rollout, "events": events, "lag": lag}
        except (RedisError, OSError):
            return {"redis": False, "versions": versions, "rollout": None, "events": [], "lag": None}


def _version(info: VersionInfo) -> dict[str, Any]:
    # What a version has learnt from is a long list, and nothing to look at.
    manifest = {name: value for name, value in info.manifest.items() if name != REQUESTS}
    return {"number": info.number, "problem": info.problem, "manifest": manifest}


def ledger(totals: Totals, domain: str) -> dict[str, Any]:
    """Seconds saved in serving against seconds spent training, by version of ``domain`` and in ``total``.

    Versions that are not counted apart any more are the one named "older".
    ``saved`` is ``plain - decode``, see ``osd.engine.savings``: seconds of the engine, on all the cores that it has.
    ``training`` are CPU seconds of the trainer and what rounds lost beside it, in all ``slowed``; those since the last
    version count in the total only. ``net`` is ``saved - training``. ``payback`` are the seconds in service after which
    a version, or everything, is expected to have paid; None where it never does, or nobody knows.
    """
    tokens, plain, decode = (
        {labels[1]: value for labels, value in totals.by_label(f"version_{name}").items() if labels[0] == domain}
        for name in ("tokens", "plain_seconds", "decode_seconds")
    )
    spent: dict[str | int, float] = {**totals.spent.by_version}
    rows = []
    for version in sorted({*tokens, *spent}, key=lambda version: -1 if version == OLDER else version):
        saved, training = plain.get(version, 0.0) - decode.get(version, 0.0), spent.get(version, 0.0)
        rows.append({"version": version, "tokens": tokens.get(version, 0), "plain": plain.get(version, 0.0)})
        rows[-1] |= {"decode": decode.get(version, 0.0), "saved": saved, "training": training, "net": saved - training}
        rows[-1]["payback"] = None if isinstance(version, str) else totals.spent.payback(version)
    total: dict[str, float | None] = {
        name: sum(row[name] for row in rows) for name in ("tokens", "plain", "decode", "saved")
    }
    total |= {"training": totals.spent.total, "net": sum(row["saved"] for row in rows) - totals.spent.total}
    total["payback"] = totals.spent.payback_of_all
    unpublished, slowed = totals.spent.unpublished, totals.spent.slowed
    return {"versions": rows, "unpublished": unpublished, "slowed": slowed, "total": total}


def with_history(state: dict[str, Any], history: History) -> dict[str, Any]:
    """The JSON of ``/dashboard/data``."""
    return {**state, "history": asdict(history)}


def _recall(totals: Totals) -> dict[str, Any]:
    """How large the tables of all replicas are, by domain, and what was found in them, by source and order."""
    tables: dict[str, dict[str, int]] = {}
    for report in totals.replicas:
        for domain, size in report.tables.items():
            known = tables.setdefault(domain, {"entries": 0, "bytes": 0})
            known["entries"] += size.entries
            known["bytes"] += size.bytes
    accepted = totals.by_label("recall_accepted")
    orders = [
        {"source": source, "order": order, "drafted": drafted, "accepted": accepted.get((source, order), 0)}
        for (source, order), drafted in totals.by_label("recall_drafted").items()
    ]
    return {"tables": tables, "orders": orders}


def compose(settings: Settings, model: Model, totals: Totals, feeds: dict[str, Any]) -> dict[str, Any]:
    """What the dashboard shows of now: the JSON of ``/dashboard/data`` without its history."""
    live = {name: totals.by_label(f"version_{name}") for name in ("rounds", "drafted", "accepted")}
    running = {report.version for report in totals.replicas}
    rollout: Rollout | None = feeds["rollout"]
    versions = []
    for version in feeds["versions"]:
        counts = {name: by_version.get((settings.domain, version["number"]), 0) for name, by_version in live.items()}
        versions.append({**version, "in_service": version["number"] in running, "live": counts})
    names = (
        "requests",
        "failed",
        "completion_tokens",
        "swaps",
        "rejected_versions",
        "traces_written",
        "traces_dropped",
    )
    return {
        "time": time.time(),
        "domain": settings.domain,
        "model": asdict(model),
        "drafter": settings.drafter.kind,
        "growth": settings.growth.kind,
        "governed": getattr(settings.growth, "governed", False),
        "capture": settings.capture.enabled,
        "bounds": {name: REQUEST_HISTOGRAMS[name] for name in _LATENCIES},
        "totals": {name: totals.counters.get(name, 0) for name in names},
        "replicas": [
            {
                "name": report.replica,
                "version": report.version,
                "canary": report.canary,
                "others": dict(report.others),
                "speculation": report.speculation,
                "running": report.load.running,
                "waiting": report.load.waiting,
                "swap_stall_seconds_max": report.swap_stall_seconds_max,
            }
            for report in totals.replicas
        ],
        "versions": versions,
        "ledger": ledger(totals, settings.domain),
        "training": {domain: msgspec.to_builtins(one) for domain, one in totals.training.items()},
        "recall": _recall(totals),
        "stable": rollout.stable if rollout else None,
        "canary": rollout.canary if rollout else None,
        "share": rollout.share if rollout else 0.0,
        "pinned": rollout.pinned if rollout else False,
        "events": feeds["events"],
        "stream": {"redis": feeds["redis"], "lag": feeds["lag"], "capacity": settings.capture.max_records},
    }
