"""Dashboard of a trainer for a server behind a tap, in a real browser."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import expect

from deploy.assembly import StartError
from deploy.upstream_dashboard import UpstreamDashboard
from osd.capture.server import RedisServer
from osd.config import Settings
from osd.drafting.eagle.drafter import Eagle
from osd.http_protocol import MOST_HEAD_BYTES
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from osd.tap.agreement import agree
from osd.tap.app import Tap
from osd.tap.upstream import Upstream as TapUpstream
from osd.target.model import load_model
from serving.metrics.report import TracedDrafts
from tests.e2e.conftest import ADMIN_KEY
from tests.pointers import put
from tests.redis_servers import free_port
from tests.tiny import make_tiny
from tests.upstream import MODEL, Upstream, serving
from tests.vllm_metrics import vllm_metrics
from tests.waiting import HANG_SECONDS, background

TRACED = [TracedDrafts(domain="sql", version=2, requests=9, tested=[200, 100], accepted=[100, 25])]


@dataclass
class World:
    """A server, a tap in front of it, and the trainer's dashboard."""

    settings: Settings
    upstream: Upstream
    tap: str
    url: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("upstream")
    target = make_tiny(folder / "tiny")
    settings = Settings(
        home=folder / "home",
        target={"source": str(target)},
        drafter={"kind": "eagle"},
        serving={"admin_key": ADMIN_KEY},
        tap={"port": free_port(), "metrics_port": free_port(), "dashboard_port": free_port()},
    )
    drafter, registry = Eagle.from_target(load_model(target, "float32", "cpu"), 100), Registry(settings.registry_dir)
    for _ in range(2):
        registry.publish(settings.domain, drafter.weights(), drafter.config(), {})
    upstream = Upstream()
    upstream.metrics = vllm_metrics(version=1, rounds=100, accepted=(10, 2, 0))
    with RedisServer(max_memory_mb=64) as redis, serving(upstream.app) as upstream_url:
        with Pointer(redis.url, settings.registry_dir) as pointer:
            put(pointer, settings.domain, Rollout(1, None, 0.0, 1.0))
        server = TapUpstream(upstream_url)
        tap = Tap(settings, server, agree(server, settings, None, False), redis.url)
        with (
            background(tap.run, tap.stop),
            closing(UpstreamDashboard(settings, redis.url, target, lambda: TRACED)) as shown,
        ):
            yield World(settings, upstream, f"http://127.0.0.1:{settings.tap.port}", shown.url)


def test_server_behind_a_tap_is_shown_like_a_replica(world, browser, eventually):
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.goto(f"{world.url}#traffic")
    name = f"tap 127.0.0.1:{world.settings.tap.port}"
    row = page.locator(f'#replicas tr[data-key="{name}"]')
    expect(row).to_contain_text("v1", timeout=60_000)
    with httpx2.Client(base_url=world.tap) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    world.upstream.metrics = vllm_metrics(version=1, rounds=600, accepted=(310, 102, 50))
    page.goto(f"{world.url}#overview")
    expect(page.locator("#now-acceptance")).to_have_text("30.0 %", timeout=60_000)
    world.upstream.metrics = vllm_metrics(version=2, rounds=650, accepted=(340, 112, 55))
    expect(page.locator("#now-version")).to_have_text("v2", timeout=60_000)
    expect(page.locator('#nav a[href="#playground"]')).to_be_hidden()
    with httpx2.Client(base_url=world.url.removesuffix("/dashboard")) as client:
        eventually(lambda: client.get("/dashboard/data").json()["totals"]["traces_written"] == 1)
        data = client.get("/dashboard/data").json()
        (replica,) = data["replicas"]
        assert (replica["name"], replica["version"]) == (name, 2)
        assert (data["totals"]["requests"], data["totals"]["swaps"], data["totals"]["failed"]) == (1, 1, 0)
        (first, second) = data["versions"]
        assert first["live"] == {"rounds": 500, "drafted": 1500, "accepted": 450}, "drafts between the two reads"
        assert (first["in_service"], second["in_service"]) == (False, True)
        world.upstream.metrics = vllm_metrics(version=2, rounds=10, accepted=(6, 1, 0))  # as after a restart
        eventually(lambda: client.get("/dashboard/data").json()["versions"][1]["live"]["rounds"] == 10)
    assert problems == []
    page.close()


def test_traced_requests_show_acceptance_by_version_and_position(world, browser):
    page = browser.new_page()
    page.goto(f"{world.url}#traffic")
    row = page.locator('#traced tr[data-key="sql 2"]')
    for text in ("v2", "41.7 % of 300", "50 %, 25 %"):
        expect(row).to_contain_text(text, timeout=60_000)
    page.close()
    text = httpx2.get(f"{world.url.removesuffix('/dashboard')}/metrics").text
    assert 'osd_traced_accepted_tokens_total{domain="sql",position="1",version="2"} 25.0' in text


def test_admin_routes_of_the_tap_need_the_key(world):
    with httpx2.Client(base_url=world.url.removesuffix("/dashboard")) as client:
        locked = client.post("/admin/drafters/pin", json={})
        assert locked.status_code == 401
        assert "needs its admin key" in locked.json()["error"]["message"]
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert client.post("/admin/drafters/pin", json={"version": 2}, headers=key).status_code == 200
        versions = client.get("/dashboard/versions").json()
        assert (versions["stable"], versions["pinned"]) == (2, True)
        assert client.get("/dashboard/data", headers={"host": "evil.example"}).status_code == 403
        assert client.post("/v1/completions", json={}).status_code == 404


@pytest.mark.parametrize("name", ["port", "metrics_port", "dashboard_port"])
def test_too_large_head_is_431_on_every_port(world, name):
    address = ("127.0.0.1", getattr(world.settings.tap, name))
    with socket.create_connection(address, timeout=HANG_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * MOST_HEAD_BYTES)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")


def test_taken_port_error_names_the_setting(world):
    taken = world.settings.tap.dashboard_port
    with pytest.raises(StartError, match=rf"^tap\.dashboard_port {taken} on 127\.0\.0\.1 cannot be listened on"):
        UpstreamDashboard(world.settings, "redis://127.0.0.1:1/0", Path(world.settings.target.source))
