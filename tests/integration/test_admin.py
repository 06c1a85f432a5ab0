"""Actions of operators over HTTP, with a real registry and a real Redis server."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from starlette.testclient import TestClient

from osd.admin import purging
from osd.admin.audit import AuditLog
from osd.capture.purge import Member, Purges
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry
from serving.api.routes import create_app
from tests.command import run_cli
from tests.pointers import put
from tests.unit.serving.answers import error_of
from tests.unit.serving.scripted import ScriptedService

SECRET = "sk-ops-1"


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path / "home", serving={"admin_key": SECRET})


@pytest.fixture
def pointer(settings, redis_url):
    """Pointer of a registry with three versions in each of two domains; the second version is in service."""
    registry = Registry(settings.registry_dir)
    with Pointer(redis_url, settings.registry_dir) as pointer:
        for domain in ("general", "acme.code"):
            for number in range(1, 4):
                registry.publish(domain, {"w": torch.ones(1)}, {}, {"parent": number - 1 or None})
            put(pointer, domain, Rollout(stable=2, canary=None, share=0.0, changed=1.0))
        yield pointer


@pytest.fixture
def http(settings, redis_url, pointer):
    service = ScriptedService(settings)
    service.redis_url = redis_url
    return TestClient(create_app(service), base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {SECRET}"})


def test_version_is_rolled_back_pinned_and_unpinned(http, pointer, redis_url, settings):
    answer = http.post("/admin/drafters/rollback", json={})
    assert answer.json() == {"domain": "general", "version": 1, "previous": 2, "pinned": False}
    assert http.post("/admin/drafters/pin", json={"version": 3}).json()["pinned"] is True
    assert (pointer.get("general").stable, pointer.get("general").pinned) == (3, True)
    assert http.post("/admin/drafters/unpin", json={}).json()["pinned"] is False
    answer = http.post("/admin/drafters/rollback", json={"domain": "acme.code", "version": 3})
    assert answer.json() == {"domain": "acme.code", "version": 3, "previous": 2, "pinned": False}
    with Events(redis_url) as events:
        kinds = [event["kind"] for event in events.recent()]
    assert kinds == ["rolled_back", "pinned", "unpinned", "rolled_back"]
    done = [(entry["who"], entry["from"], entry["action"], entry["domain"], entry["version"], entry["outcome"])
            for entry in AuditLog(settings.home_dir).last(10)]  # fmt: skip
    who = ("key serving.admin_key", "testclient")
    assert done == [
        (*who, "rollback", "general", 1, "done"),
        (*who, "pin", "general", 3, "done"),
        (*who, "unpin", "general", 3, "done"),
        (*who, "rollback", "acme.code", 3, "done"),
    ]


def test_canary_is_promoted(http, pointer):
    put(pointer, "general", Rollout(stable=2, canary=3, share=0.1, changed=2.0))
    answer = http.post("/admin/drafters/promote", json={"domain": "general"}).json()
    assert (answer["version"], answer["previous"]) == (3, 2)
    now = pointer.get("general")
    assert (now.stable, now.canary) == (3, None)


def test_versions_of_every_domain_are_listed(http):
    domains = {entry["domain"]: entry for entry in http.get("/admin/drafters").json()["domains"]}
    assert domains.keys() == {"general", "acme.code"}
    assert (domains["general"]["stable"], domains["general"]["pinned"]) == (2, False)
    parents = {entry["number"]: entry["manifest"]["parent"] for entry in domains["general"]["versions"]}
    assert parents == {1: None, 2: 1, 3: 2}


@pytest.mark.parametrize(
    ("action", "body", "status", "message"),
    [
        ("rollback", {"version": 9}, 404, "There is no drafter version general/9."),
        ("pin", {"domain": "sql"}, 404, "Domain sql has no version in service."),
        ("promote", {}, 409, "Domain general has no canary; version 2 is in service."),
        ("unpin", {}, 409, "Version 2 of general is not pinned."),
        ("rollback", {"version": 0}, 400, "'version'"),
        ("pin", {"domain": "a/b"}, 400, "'domain'"),
        ("promote", {"version": 3}, 400, "'version' is not supported."),
    ],
)
def test_impossible_action_is_refused_and_changes_nothing(http, pointer, settings, action, body, status, message):
    before = pointer.all()
    assert message.lower() in error_of(http.post(f"/admin/drafters/{action}", json=body), status)["message"].lower()
    assert pointer.all() == before
    outcomes = [entry["outcome"] for entry in AuditLog(settings.home_dir).last(10)]
    assert len(outcomes) == (status != 400)
    assert all(outcome.startswith("refused: ") for outcome in outcomes)


def test_damaged_version_is_a_conflict(http, pointer, settings):
    (settings.registry_dir / "general" / "1" / "model.safetensors").write_bytes(b"x")
    error_of(http.post("/admin/drafters/rollback", json={}), 409)
    assert pointer.get("general").stable == 2


def test_domain_moved_by_another_process_is_a_conflict(http, pointer, monkeypatch):
    monkeypatch.setattr(Pointer, "replace", lambda *given, **more: False)
    assert "has just been moved" in error_of(http.post("/admin/drafters/pin", json={}), 409)["message"]


def test_action_that_cannot_be_logged_is_unavailable(http, pointer, settings):
    (settings.home_dir / "audit.jsonl").mkdir()
    error = error_of(http.post("/admin/drafters/rollback", json={}), 503)
    assert "audit log" in error["message"]
    assert pointer.get("general").stable == 2


def test_request_is_purged_over_http(http, settings, redis_url, make_trace, redis_client, monkeypatch):
    writer = TraceWriter(redis_url, settings.capture)
    assert writer.offer(make_trace("chatcmpl-1f-0"))
    writer.close()
    result = http.post("/admin/traces/purge", json={"request": "chatcmpl-1f"}).json()
    rest = {"remembered": 0, "entries": 0, "learning": [], "versions": {}, "absent": []}
    assert result == {"request": "chatcmpl-1f", "streamed": 1, **rest}
    assert redis_client.xlen("osd:traces:domain:general") == 0
    error_of(http.post("/admin/traces/purge", json={"request": "chatcmpl-2e"}), 404)
    monkeypatch.setattr(purging, "ANSWER_SECONDS", 0.1)
    with Purges(redis_url) as purges:
        purges.alive(Member("replica", "silent"))
    silent = error_of(http.post("/admin/traces/purge", json={"request": "chatcmpl-3d"}), 503)
    assert "the replica silent did not answer" in silent["message"].lower()


def test_list_says_why_the_trainer_waits(settings, pointer, redis_url):
    with TrainingReports(redis_url) as reports, Purges(redis_url) as purges:
        reports.set("general", Training(state="waiting", detail="5 of 12 records to start with"))
        for state in ("none runs", "waiting: 5 of 12 records to start with"):
            shown = run_cli("drafters", "list", "--domain", "general", home=settings.home, redis_url=redis_url).stdout
            assert f"trainer       {state}\n" in shown
            purges.alive(Member("trainer", "general"))


def test_actions_of_the_command_line_are_logged(settings, pointer, redis_url):
    command = partial(run_cli, home=settings.home, redis_url=redis_url)
    pin = json.loads(command("drafters", "pin", "--domain", "general", "--json").stdout)
    assert pin == {"domain": "general", "version": 2, "previous": 2, "pinned": True}
    assert command("drafters", "promote").exit_code == 2
    assert command("traces", "purge", "--request", "unknown").exit_code == 2
    pinned, promoted, purged = map(json.loads, command("audit", "--json").stdout.splitlines())
    assert pinned["who"].startswith("user ")
    assert pinned.items() >= {"from": "command line", "action": "pin", "version": 2, "outcome": "done"}.items()
    assert promoted["outcome"] == "refused: domain general has no canary; version 2 is in service"
    assert (purged["action"], purged["request"]) == ("purge", "unknown")
