"""Isolation of tenants in a real replica, and rotation of keys."""

from __future__ import annotations

from contextlib import closing

import pytest
import yaml
from starlette.testclient import TestClient

from osd.capture.reader import TraceReader
from osd.registry.events import Events
from serving.api.routes import create_app
from tests.replicas import Replicas, recall_settings

TENANTS = {"sk-acme-1": "acme", "sk-blue-1": "blue", "sk-none-1": ""}
PROMPT = "the same words for all clients, and enough of them to fill a block"


@pytest.fixture
def settings(tiny_target, tmp_path):
    keys = tmp_path / "keys.yaml"
    entries = [{"name": f"key-{index}", "key": secret} for index, secret in enumerate(TENANTS)]
    for entry in entries:
        entry |= {"tenant": TENANTS[entry["key"]]} if TENANTS[entry["key"]] else {}
    keys.write_text(yaml.safe_dump(entries))
    keys.chmod(0o600)
    return recall_settings(tiny_target, tmp_path / "home", slots=4, serving={"keys_file": keys})


@pytest.fixture
def replicas(settings, redis_url):
    with Replicas(settings, redis_url) as replicas:
        yield replicas


@pytest.fixture
def replica(replicas):
    return replicas.start("a")


def ask(replica, secret, **fields):
    """Return the accepted draft tokens and the cached prompt tokens of an answer."""
    http = TestClient(create_app(replica), headers={"Authorization": f"Bearer {secret}"})
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "ignore_eos": True, **fields}
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    return accepted, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_no_recall_cache_trace_or_domain(replica, settings, redis_url):
    first = {secret: ask(replica, secret) for secret in TENANTS}
    second = {secret: ask(replica, secret) for secret in TENANTS}
    assert len(set(first.values())) == 1, "no tenant profits from requests of another"
    assert {cached for _, cached in first.values()} == {0}
    for secret in TENANTS:
        assert second[secret][0] > first[secret][0], "each tenant profits from its own request"
        assert second[secret][1] > 0
    ask(replica, "sk-acme-1", osd={"domain": "code"})

    for domain, expected in (("acme.code", 1), ("acme.general", 2), ("blue.general", 2), ("general", 2)):
        with closing(TraceReader(redis_url, settings.capture, domain, "test", "c")) as reader:
            traces = []
            while len(traces) < expected and (deliveries := reader.read(16, block_ms=5000)):
                traces += [delivery.record.domain for delivery in deliveries]
            assert traces == [domain] * expected
            assert reader.read(16, block_ms=0) == []

    tables = replica.engine.pool.all_memories()
    assert set(tables) == {"general", "acme.general", "blue.general"}
    assert len({id(table) for memories in tables.values() for table in memories.tables}) == 3


def test_tenant_has_its_own_snapshot_after_a_restart(replica, replicas, settings, eventually):
    first = ask(replica, "sk-acme-1")
    replicas.end("a")
    folders = {path.parent.name for path in settings.registry_dir.glob("*/recall.safetensors")}
    assert folders == {"general", "acme.general"}
    new = replicas.start("b")
    ask(new, "sk-acme-1", prompt="x", max_tokens=1)
    (table,) = new.engine.pool.all_memories()["acme.general"].tables
    eventually(lambda: table.used() > 10)
    assert ask(new, "sk-acme-1")[0] > first[0]
    assert ask(new, "sk-blue-1")[0] == first[0]


def test_key_rotation_ignores_a_broken_file(replica, settings, redis_url, eventually):
    http = TestClient(create_app(replica))

    def status(secret):
        return http.get("/v1/models", headers={"Authorization": f"Bearer {secret}"}).status_code

    file = settings.serving.keys_file
    assert [status(secret) for secret in ("sk-acme-1", "sk-acme-2")] == [200, 401]
    file.write_text("[{name: key-0, key: sk-acme-2, tenant: acme}]")
    eventually(lambda: status("sk-acme-2") == 200)
    assert status("sk-acme-1") == 401
    file.write_text("[{name: key-0")
    with Events(redis_url) as events:
        eventually(lambda: status("sk-acme-2") == 200 and [event["kind"] for event in events.recent()])
        (event,) = events.recent()
    assert event["kind"] == "keys_refused"
    assert "is not YAML" in event["reason"]
