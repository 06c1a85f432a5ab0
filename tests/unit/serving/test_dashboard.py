from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osd.capture.streams import StreamState, Waiting
from osd.config import Settings
from osd.economy.effect import LEAST_TRIALS
from osd.registry.events import Events
from osd.registry.pointer import Rollout
from osd.registry.training import FundReport, Training, VersionEffect
from osd.registry.versions import Registry
from serving import dashboard
from serving.dashboard import data
from serving.dashboard.data import compose, minutes_to_speedup, speedup
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report
from serving.served_model import ServedModel

FOLDER = Path(dashboard.__file__).parent


def test_page_names_only_files_that_are_served(client):
    page = client.get("/dashboard")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["content-type"].startswith("text/html")
    assert "http" not in page.text.replace("http-equiv", "")
    paths = re.findall(r'(?:src|href)="([^#"]+)"', page.text)
    assert len(paths) >= 5
    for path in paths:
        assert path.startswith("/dashboard/")
        assert client.get(path).status_code == 200


def test_only_scripts_styles_and_images_are_served(client):
    for path in FOLDER.rglob("*"):
        if path.suffix in (".js", ".css", ".svg"):
            assert client.get(f"/dashboard/{path.relative_to(FOLDER)}").content == path.read_bytes()
    for path in ("__init__.py", "data.py", "../app.py", "..%2fapp.py", "vendor/LICENSE", "vendor/", "index.html.bak"):
        assert client.get(f"/dashboard/{path}").status_code == 404


def test_page_redirects_from_a_trailing_slash(client):
    assert client.get("/dashboard/").text == client.get("/dashboard").text


def test_root_redirects_to_the_page(client):
    redirect = client.get("/", follow_redirects=False)
    assert (redirect.status_code, redirect.headers["location"], redirect.content) == (307, "/dashboard", b"")
    assert client.get("/").text == client.get("/dashboard").text


def test_scripts_and_styles_load_nothing_from_other_servers():
    for path in FOLDER.rglob("*"):
        if path.parent.name == "vendor":
            continue
        if path.suffix in (".js", ".css"):
            assert not re.search(r"https?:|//[a-z]+\.|@import", path.read_text()), path.name


@pytest.mark.parametrize("path", ["/dashboard/data", "/dashboard/stream"])
@pytest.mark.parametrize("seconds", ["59", "3601", "-100", "x", "", "1e3", "9" * 5000])
def test_window_out_of_range_is_400(client, path, seconds):
    response = client.get(path, params={"seconds": seconds})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seconds"


def test_last_known_versions_stay_without_a_registry(tmp_path, monkeypatch):
    registry = Registry(tmp_path)
    registry.publish("general", {"weight": torch.zeros(1)}, {}, {})
    no_redis = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(data, "_FRESH_SECONDS", 0.0)
    with Events(no_redis) as events, closing(data.Feeds(Settings(), no_redis, registry, events)) as feeds:
        assert [version["number"] for version in feeds.read()["versions"]] == [1]
        monkeypatch.setattr(registry, "list", lambda domain: (_ for _ in ()).throw(OSError("no disk")))
        assert [version["number"] for version in feeds.read()["versions"]] == [1]


def test_unknown_domain_is_404(client, service):
    assert client.get("/dashboard/versions").json() == {"domain": "general"}
    assert client.get("/dashboard/versions", params={"domain": "general"}).json() == {"domain": "general"}
    for name in ("sql", "a/b", ""):
        answer = client.get("/dashboard/versions", params={"domain": name})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "domain"


def test_unreadable_versions_are_503(client, service, monkeypatch):
    async def fail(domain):
        raise ConnectionError

    monkeypatch.setattr(service, "dashboard_versions", fail)
    assert client.get("/dashboard/versions").status_code == 503


def test_data_has_the_state_and_the_history_of_the_window(client, service):
    now = int(time.time())
    for second in (now - 200, now - 30):
        service.history.add(second, "a", {"requests": 1}, {"running": 1})
    for seconds, requests in (("60", 1), ("300", 2)):
        data = client.get("/dashboard/data", params={"seconds": seconds}).json()
        assert data["totals"] == {"requests": 1}
        assert sum(data["history"]["counts"]["requests"]) == requests


def test_data_has_versions_in_service_and_live_acceptance():
    metrics, now = ReplicaMetrics(), time.time()
    counters = {
        ("version_drafted", "general", 2): 40,
        ("version_accepted", "general", 2): 30,
        ("version_drafted", "code", 2): 7,
    }
    metrics.push(Report("r1", now, 2, True, counters, canary=3, domains={"code": 2}))
    feeds = {
        "redis": True,
        "silence": 4.5,
        "rollout": Rollout(2, 3, 0.25, 1.0),
        "streams": {
            "code": StreamState(3, 900, None),
            "general": StreamState(9, 4000, Waiting(4, time.time() - 30)),
            "sql": StreamState(1, 100, Waiting(0, None)),
        },
        "events": [],
        "domains": ["general", "code"],
        "versions": [
            {"number": 1, "problem": None, "manifest": {}},
            {"number": 2, "problem": None, "manifest": {"parent": 1, "gate": {"acceptance": 0.5}}},
        ],
    }
    model, settings = ServedModel("tiny", "root", 64, 10, 1), Settings.model_validate({"serving": {"replicas": 3}})
    account = FundReport(effects=(VersionEffect(2, 1, 0.1, 0.01, 50),))
    training = {"general": Training(account=account, state="waiting", detail="the fund is empty")}
    totals = replace(metrics.totals(now), training=training, tried_since={"general": 7.0, "code": 8.0})
    data = compose(settings, model, totals, feeds)
    first, second = data["versions"]
    assert (first["in_service"], second["in_service"]) == (False, True)
    assert second["live"] == {"rounds": 0, "drafted": 40, "accepted": 30}
    assert second["manifest"]["gate"]["acceptance"] == 0.5
    assert (data["stable"], data["canary"], data["share"], data["pinned"]) == (2, 3, 0.25, False)
    assert data["replicas"][0]["version"] == 2
    assert data["replicas"][0]["canary"] == 3
    assert data["replicas"][0]["others"] == {"code": 2}
    assert (first["speedup"], second["speedup"]["log"]) == (None, 0.1)
    assert data["training"]["general"]["account"]["effects"][0]["before"] == 1
    assert (data["training"]["general"]["state"], data["training"]["general"]["detail"]) == (
        "waiting",
        "the fund is empty",
    )
    assert data["domains"] == ["general", "code"]
    assert data["trainer"] == {"needed": True, "silence": 4.5, "min_records": 12}
    assert (data["tried_since"], data["expected_replicas"], data["measures"]) == (7.0, 3, True)
    watched = compose(settings, model, totals, feeds, answers=False)
    assert (watched["expected_replicas"], watched["measures"]) == (1, False)
    assert (data["stream"]["redis"], data["stream"]["capacity"]) == (True, 512)
    streams = data["stream"]["domains"]
    assert streams["code"] == {"records": 3, "bytes": 900, "lag": None, "age": None}
    assert streams["sql"] == {"records": 1, "bytes": 100, "lag": 0, "age": 0.0}
    assert streams["general"] == {"records": 9, "bytes": 4000, "lag": 4, "age": pytest.approx(30, abs=5)}


def test_speedup_sums_replicas_and_needs_twelve_trials():
    metrics, now = ReplicaMetrics(), time.time()
    assert speedup(metrics.totals(now)) is None
    first = {"speedup_trials": 6, "speedup_drafted_seconds": 100.0, "speedup_plain_seconds": 180.0}
    first |= {"speedup_variance": 0.25, "guarded_replicas": 0}
    metrics.push(Report("a", now, 1, True, {"busy_seconds": 150.0, "measuring_seconds": 0.5}, gauges=first))
    single = speedup(metrics.totals(now))
    assert (single["estimate"], single["low"], single["high"]) == (pytest.approx(1.8), None, None)
    second = {**first, "speedup_drafted_seconds": 300.0, "speedup_plain_seconds": 420.0, "guarded_replicas": 1}
    metrics.push(Report("b", now, 1, True, {"busy_seconds": 350.0, "measuring_seconds": 1.5}, gauges=second))
    both = speedup(metrics.totals(now))
    assert (both["estimate"], both["price"]) == (pytest.approx(1.5), pytest.approx(0.004))
    assert (both["trials"], both["guarded"]) == (12, 1)
    assert 1.49 < both["low"] < 1.5 < both["high"] < 1.51


@pytest.mark.parametrize(
    ("trials", "spent", "minutes"),
    [(0, 0.0, None), (6, 0.6, 2.0), (6, 4.0, 18.0), (3, 0.6, 6.0), (LEAST_TRIALS, 9.0, 0.0)],
    ids=["no trial", "the pace limits", "the price limits", "few trials", "measured"],
)
def test_minutes_to_speedup_follow_pace_and_price(trials, spent, minutes):
    """Trials continue at their pace, unless half a percent of the busy time does not pay for them."""
    metrics, now = ReplicaMetrics(), time.time()
    gauges = {"speedup_trials": trials, "speedup_drafted_seconds": 100.0, "speedup_plain_seconds": 180.0}
    for replica in ("a", "b"):
        metrics.push(Report(replica, now, 1, True, {"busy_seconds": 120.0, "measuring_seconds": spent}, gauges))
        gauges = {**gauges, "speedup_trials": 0}
    result = minutes_to_speedup(Settings(), metrics.totals(now))
    assert result == (None if minutes is None else pytest.approx(minutes))
