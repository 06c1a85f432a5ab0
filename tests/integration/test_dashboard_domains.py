"""Dashboard data of additional domains, with a real registry and a real Redis."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import torch

from osd.capture.purge import Member, Purges
from osd.config import Settings
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.training import FundReport, Training, TrainingReports, VersionEffect
from osd.registry.versions import Registry
from serving.dashboard import data
from serving.dashboard.data import compose_domain
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report
from tests.pointers import put


def test_dashboard_reads_a_domain_at_most_once_a_second(tmp_path, redis_url, monkeypatch):
    registry = Registry(tmp_path)
    for domain in ("general", "acme.code", "acme.code"):
        registry.publish(domain, {"weight": torch.zeros(1)}, {}, {"parent": None})
    reads, list_versions = [], registry.list
    with Purges(redis_url) as purges:
        purges.alive(Member("trainer", "general"))
    with Pointer(redis_url, tmp_path) as pointer, TrainingReports(redis_url) as reports:
        put(pointer, "acme.code", Rollout(1, 2, 0.1, 1.0))
        reports.set("acme.code", Training(account=FundReport(effects=(VersionEffect(2, 1, 0.1, 0.01),))))
    monkeypatch.setattr(registry, "list", lambda domain: reads.append(domain) or list_versions(domain))
    metrics, now = ReplicaMetrics(), time.time()
    counters = {("version_drafted", "acme.code", 1): 9, ("version_drafted", "general", 1): 5}
    metrics.push(Report("r1", now, 7, True, counters, domains={"acme.code": 1}))
    with Events(redis_url) as events, closing(data.Feeds(Settings(), redis_url, registry, events)) as feeds:
        results = [compose_domain(Settings(), metrics.totals(now), feeds.of("acme.code")) for _ in range(3)]
        assert reads == ["acme.code"]
        with pytest.raises(ValueError, match="the domain sql does not exist"):
            feeds.of("sql")
        assert feeds.read()["domains"] == ["general", "acme.code"]
        assert feeds.read()["silence"] is not None
        assert compose_domain(Settings(), metrics.totals(now), feeds.of("general"))["domain"] == "general"
    assert results[0] == results[2]
    assert (results[0]["domain"], results[0]["stable"], results[0]["canary"]) == ("acme.code", 1, 2)
    first, second = results[0]["versions"]
    assert (first["in_service"], first["live"]["drafted"]) == (True, 9)
    assert (second["in_service"], second["live"]["drafted"]) == (False, 0)
    assert (first["speedup"], second["speedup"]["log"]) == (None, 0.1)
