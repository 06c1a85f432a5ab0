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
from osd.registry.events import Events
from osd.registry.pointer import Rollout
from osd.registry.training import Account, Training, VersionEffect
from osd.registry.versions import Registry
from serving import dashboard
from serving.dashboard import data
from serving.dashboard.data import compose, speedup
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report
from serving.service import ServedModel

FOLDER = Path(dashboard.__file__).parent


def test_every_file_that_the_page_names_is_served_and_nothing_from_elsewhere(client):
    page = client.get("/dashboard")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["content-type"].startswith("text/html")
    assert "http" not in page.text.replace("http-equiv", "")
    paths = re.findall(r'(?:src|href)="([^#"]+)"', page.text)
    assert len(paths) >= 5
    for path in paths:
        assert path.startswith("/dashboard/")
        assert client.get(path).status_code == 200


def test_every_script_and_style_of_the_folder_is_reachable_and_nothing_else(client):
    for path in FOLDER.rglob("*"):
        if path.suffix in (".js", ".css", ".svg"):
            assert client.get(f"/dashboard/{path.relative_to(FOLDER)}").content == path.read_bytes()
    for path in ("__init__.py", "data.py", "../app.py", "..%2fapp.py", "vendor/LICENSE", "vendor/", "index.html.bak"):
        assert client.get(f"/dashboard/{path}").status_code == 404


def test_the_page_is_also_found_with_a_slash(client):
    assert client.get("/dashboard/").text == client.get("/dashboard").text


def test_no_script_or_style_reaches_out_of_the_server():
    for path in FOLDER.rglob("*"):
        if path.parent.name == "vendor":
            continue
        if path.suffix in (".js", ".css"):
            assert not re.search(r"https?:|//[a-z]+\.|@import", path.read_text()), path.name


@pytest.mark.parametrize("path", ["/dashboard/data", "/dashboard/stream"])
@pytest.mark.parametrize("seconds", ["59", "3601", "-100", "x", "", "1e3", "9" * 5000])
def test_a_window_out_of_range_is_refused(client, path, seconds):
    response = client.get(path, params={"seconds": seconds})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seconds"


def test_versions_last_seen_stay_while_the_disk_does_not_say(tmp_path, monkeypatch):
    registry = Registry(tmp_path)
    registry.publish("general", {"weight": torch.zeros(1)}, {}, {})
    nobody = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(data, "_FRESH_SECONDS", 0.0)
    with Events(nobody) as events, closing(data.Feeds(Settings(), nobody, registry, events)) as feeds:
        assert [version["number"] for version in feeds.read()["versions"]] == [1]
        monkeypatch.setattr(registry, "list", lambda domain: (_ for _ in ()).throw(OSError("no disk")))
        assert [version["number"] for version in feeds.read()["versions"]] == [1]


def test_a_domain_that_is_not_there_is_said_to_be_none(client, service):
    assert client.get("/dashboard/versions").json() == {"domain": "general"}
    assert client.get("/dashboard/versions", params={"domain": "general"}).json() == {"domain": "general"}
    for name in ("sql", "a/b", ""):
        answer = client.get("/dashboard/versions", params={"domain": name})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "domain"


def test_versions_that_cannot_be_read_now_are_not_said_to_be_none(client, service, monkeypatch):
    async def gone(domain):
        raise ConnectionError

    monkeypatch.setattr(service, "dashboard_versions", gone)
    assert client.get("/dashboard/versions").status_code == 503


def test_data_holds_the_state_and_the_history_of_the_window(client, service):
    now = int(time.time())
    for second in (now - 200, now - 30):
        service.past.add(second, "a", {"requests": 1}, {"running": 1})
    for seconds, requests in (("60", 1), ("300", 2)):
        data = client.get("/dashboard/data", params={"seconds": seconds}).json()
        assert data["totals"] == {"requests": 1}
        assert sum(data["history"]["counts"]["requests"]) == requests


def test_the_data_says_which_versions_are_in_service_and_how_they_do_live():
    metrics, now = ReplicaMetrics(), time.time()
    counters = {
        ("version_drafted", "general", 2): 40,
        ("version_accepted", "general", 2): 30,
        ("version_drafted", "code", 2): 7,
    }
    metrics.push(Report("r1", now, 2, True, counters, canary=3, others={"code": 2}))
    feeds = {
        "redis": True,
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
    model = ServedModel("tiny", "root", 64, 10, 1)
    training = {"general": Training(account=Account(effects=(VersionEffect(2, 1, 0.1, 0.01, 50),)))}
    data = compose(Settings(), model, replace(metrics.totals(now), training=training), feeds)
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
    assert data["domains"] == ["general", "code"]
    assert (data["stream"]["redis"], data["stream"]["capacity"]) == (True, 512)
    streams = data["stream"]["domains"]
    assert streams["code"] == {"records": 3, "bytes": 900, "lag": None, "age": None}
    assert streams["sql"] == {"records": 1, "bytes": 100, "lag": 0, "age": 0.0}
    assert streams["general"] == {"records": 9, "bytes": 4000, "lag": 4, "age": pytest.approx(30, abs=5)}


def test_speedup_adds_up_over_replicas_and_has_bounds_from_twelve_trials_on():
    metrics, now = ReplicaMetrics(), time.time()
    assert speedup(metrics.totals(now)) is None
    one = {"speedup_trials": 6, "speedup_drafted_seconds": 100.0, "speedup_plain_seconds": 180.0}
    one |= {"speedup_variance": 0.25, "guarded_replicas": 0}
    metrics.push(Report("a", now, 1, True, {"busy_seconds": 150.0, "measuring_seconds": 0.5}, gauges=one))
    alone = speedup(metrics.totals(now))
    assert alone is not None
    assert (alone["estimate"], alone["low"], alone["high"]) == (pytest.approx(1.8), None, None)
    two = {**one, "speedup_drafted_seconds": 300.0, "speedup_plain_seconds": 420.0, "guarded_replicas": 1}
    metrics.push(Report("b", now, 1, True, {"busy_seconds": 350.0, "measuring_seconds": 1.5}, gauges=two))
    both = speedup(metrics.totals(now))
    assert both is not None
    assert (both["estimate"], both["price"]) == (pytest.approx(1.5), pytest.approx(0.004))
    assert (both["trials"], both["guarded"]) == (12, 1)
    assert 1.49 < both["low"] < 1.5 < both["high"] < 1.51
