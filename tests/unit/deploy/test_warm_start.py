"""Warm start: requests before the first client, and the stored result."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from deploy import warm_start
from deploy.contradictions import check_settings
from deploy.warm_start import WarmStart
from deploy.warm_store import WarmStore
from osd.config import ConfigError, Settings
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.versions import Registry
from osd.traffic.prompt import Prompt
from tests.http_servers import answering
from tests.unit.traffic.test_prompts import USAGE, chunk, stream

CONFIG = {"kind": "toy"}


class Answering(BaseHTTPRequestHandler):
    """Handler that answers like a service and counts like its engine."""

    def do_GET(self) -> None:
        self._send(f'osd_requests_total{{domain="general"}} {float(self.server.received)}\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer key"
        self.server.received += body.get("n", 1)
        self.server.bodies.append(body)
        if "messages" not in body:
            self._send(json.dumps({"choices": [{"text": f"own {number}"} for number in range(body["n"])]}))
        else:
            time.sleep(0.01)
            self.wfile.write(stream(chunk("yes", "stop"), USAGE, "[DONE]").encode())

    def _send(self, text: str) -> None:
        self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


class Service:
    """Replacement of a started service: an HTTP server that counts requests, and a real registry."""

    def __init__(self, server: ThreadingHTTPServer, home: Path, target: Path) -> None:
        self.server = server
        self.server.received, self.server.bodies = 0, []
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.settings = Settings(home=home, serving={"api_key": "key"})
        self.directory = target
        self.registry = Registry(self.settings.registry_dir)

    def publish(self, manifest) -> None:
        self.registry.publish("general", {"w": torch.ones(2)}, CONFIG, manifest)

    def recall(self) -> None:
        (self.registry.root / "general" / SNAPSHOT).write_bytes(b"table")

    def stable(self) -> int:
        return self.registry.numbers("general")[-1]


@pytest.fixture
def service(tmp_path, tiny_target, monkeypatch):
    monkeypatch.setattr(warm_start, "_REPORT_SECONDS", 0.1)
    prompts = [Prompt(str(number), "test", (f"question {number}",)) for number in range(3)]
    monkeypatch.setattr(warm_start, "load_prompts", lambda file: prompts)
    with answering(Answering) as server:
        yield Service(server, tmp_path / "home", tiny_target)


def store(service):
    return WarmStore(service.settings.home_dir, service.directory)


def test_warm_start_without_clients_stores_its_result(service, eventually, tmp_path):
    service.publish({"parent": None, "trained_on": {}})
    warm = WarmStart(service, 2.0)
    eventually(lambda: len(service.server.bodies) > 10)
    service.publish({"parent": 1, "trained_on": {"records": 9}, "gate": {"acceptance": 0.4}})
    service.recall()
    eventually(lambda: "over" in warm.state)
    warm.close()
    kept = store(service).drafter(CONFIG)
    assert kept.manifest["warm_up"]["gate"] == {"acceptance": 0.4}
    assert kept.manifest["warm_up"]["requests"] > 5
    assert store(service).recall(service.settings.recall, tmp_path)
    requests = [body for body in service.server.bodies if "messages" in body]
    assert all(body["store"] is True for body in requests), "the service may learn even if it does not by default"
    assert {"own 1", "own 2"} <= {body["messages"][0]["content"] for body in requests}


def test_warm_start_with_a_client_request_stores_nothing(service, eventually, tmp_path):
    service.publish({"parent": None, "trained_on": {}})
    warm = WarmStart(service, 60.0)
    eventually(lambda: len(service.server.bodies) > 5)
    service.publish({"parent": 1, "trained_on": {"records": 9}})
    service.recall()
    service.server.received += 1
    eventually(lambda: "over" in warm.state)
    sent = len(service.server.bodies)
    time.sleep(0.3)
    assert len(service.server.bodies) == sent
    assert store(service).drafter(CONFIG) is None
    assert not store(service).recall(service.settings.recall, tmp_path)
    warm.close()


@pytest.mark.parametrize(
    "manifest", [{"trained_on": {"records": 9}}, {"trained_on": {}, "warm_up": {}, "imported": {}}, None]
)
def test_warm_start_of_a_trained_service_does_not_run(service, manifest):
    service.publish(manifest or {"trained_on": {}})
    if manifest is None:
        service.recall()
    warm = WarmStart(service, 60.0)
    time.sleep(0.2)
    assert (warm.state, service.server.bodies) == ("", [])
    warm.close()


def test_warm_start_ends_with_the_service(service, eventually):
    service.publish({"parent": None, "trained_on": {}})
    warm = WarmStart(service, 3600.0)
    eventually(lambda: service.server.bodies)
    warm.close()


@pytest.mark.parametrize(("more", "sentence"), [
    ({"drafter": {"kind": "none"}}, "trainer.warm_start: drafter.kind none learns nothing"),
    ({"capture": {"enabled": False}}, "trainer.warm_start learns from captured requests: set capture.enabled"),
    ({"serving": {"keys_file": "keys.yaml"}}, "trainer.warm_start has no key of serving.keys_file"),
])  # fmt: skip
def test_warm_start_with_unsuitable_settings_is_refused(more, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.yaml").write_text("- name: a\n  key: 0123456789abcdef\n")
    (tmp_path / "keys.yaml").chmod(0o600)
    with pytest.raises(ConfigError, match=sentence):
        check_settings(Settings(trainer={"warm_start": True}, **more))
