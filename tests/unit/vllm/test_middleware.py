"""Middleware of vLLM with capture: start, consent and metrics, with a fake server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from osd.registry.pointer_file import PointerFiles
from osd.vllm import capture_control, rollout
from osd.vllm.middleware import PRIVATE, OsdMiddleware


class Engine:
    """Fake of vLLM's client of its engine, with two workers; the first captures."""

    def __init__(self, folder: Path, answers: list[str | None] | None = None) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(model=str(folder)))
        self.answers = ["", None] if answers is None else answers
        self.counts: list[dict[str, int]] = []
        self.extra: list[dict[str, Any]] = []
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        if method == "osd_capture_start":
            if not self.answers:
                raise AttributeError("no osd_capture_start")
            return self.answers
        return [self.counts.pop(0) if self.counts else {}, {}]

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.extra.append(params.extra_args)


def unregister() -> None:
    for name in [name for name in REGISTRY._names_to_collectors if name.startswith("osd_")]:
        if name in REGISTRY._names_to_collectors:
            REGISTRY.unregister(REGISTRY._names_to_collectors[name])


@pytest.fixture
def export(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OSD_VLLM_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("OSD_VLLM_CAPTURE", "1")
    monkeypatch.setenv("OSD_REDIS_URL", "redis://127.0.0.1:1/0")
    PointerFiles(tmp_path / "registry")
    monkeypatch.setattr(rollout, "_PERIOD", 0.01)
    monkeypatch.setattr(capture_control, "_POLL_SECONDS", 0.01)
    unregister()
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "osd.json").write_text(json.dumps({"domain": "general", "version": 3, "drafter": {"kind": "eagle"}}))
    (folder / "model.safetensors").touch()
    return folder


def serve(engine: Engine, until: Any = lambda: True, body: bytes = b"{}", **scope: Any) -> list[Any]:
    """Start a server, send it a chat, run it until ``until`` returns true, and return the lifespan messages."""
    messages: list[Any] = []
    middleware: Any = None

    async def application(called, receive, send) -> None:
        if called["type"] == "http":
            await receive()
            return await engine.add_request("chatcmpl-a", [1], SimpleNamespace(extra_args=None, n=1))
        await middleware({"type": "http", "path": "/v1/chat/completions", **scope}, http_receive, send)
        while not until():
            await asyncio.sleep(0.005)

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def http_receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message) -> None:
        messages.append((message["type"], message.get("message")))

    middleware = OsdMiddleware(application)
    asyncio.run(
        middleware(
            {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}, receive, send
        )
    )
    return messages


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_capture_starts_before_the_first_request(export):
    engine = Engine(export)
    assert serve(engine) == []
    assert engine.calls[0] == "osd_capture_start"
    assert engine.extra[0]["osd_store"] is True
    assert sample("osd_capturing") == 1


def test_requests_without_store_follow_the_default_setting(export, monkeypatch):
    monkeypatch.setenv("OSD_SERVING__CAPTURE_DEFAULT", "false")
    for body, store in ((b"{}", False), (b'{"store": true}', True)):
        engine = Engine(export)
        serve(engine, body=body)
        assert engine.extra[0]["osd_store"] is store
        unregister()


def test_private_request_is_not_captured(export):
    engine = Engine(export)
    serve(engine, body=b'{"store": true}', state={PRIVATE: True})
    assert engine.extra[0]["osd_store"] is False


def test_counts_of_the_workers_become_metrics(export):
    engine = Engine(export)
    engine.counts = [{"requests": 2, "skipped store": 1}, {"requests": 1, "dropped ring": 4, "errors": 10, "off": 1}]
    serve(engine, lambda: sample("osd_capture_errors_total") == 10)
    assert sample("osd_capture_requests_total") == 3
    assert sample("osd_capture_skipped_total", reason="store") == 1
    assert sample("osd_capture_dropped_total", reason="ring") == 4
    assert sample("osd_capture_restarts_total") == 0
    assert sample("osd_capturing") == 0, "capture switched itself off"


@pytest.mark.parametrize(("answers", "reason"), [
    (["the model is unknown", None], "the model is unknown"),
    ([None, None], "no worker has the results of the model"),
    (
        [],
        "the workers need --worker-extension-cls osd.vllm.worker.Osd (no osd_capture_start)",
    ),
])  # fmt: skip
def test_server_runs_without_capture_if_no_worker_starts(export, caplog, answers, reason):
    engine = Engine(export, answers)
    assert serve(engine, lambda: "this server is not reported for now" in caplog.text) == [], "no Redis at this address"
    assert caplog.messages.count(f"capture is off: {reason}") == 1
    assert sample("osd_capturing") == 0
    assert not (engine.extra[0] or {}).get("osd_store")


def test_wrong_setting_of_the_service_only_prevents_capture(export, monkeypatch, caplog):
    monkeypatch.setenv("OSD_SERVING__CAPTURE_DEFAULT", "perhaps")
    engine = Engine(export)
    assert serve(engine) == []
    assert any(line.startswith("capture is off: serving.capture_default") for line in caplog.messages)
    assert "osd_capture_start" not in engine.calls


def test_capture_is_off_by_default(export, monkeypatch):
    monkeypatch.delenv("OSD_VLLM_CAPTURE")
    engine = Engine(export)
    assert serve(engine) == []
    assert engine.extra == [None]
    assert "osd_capture_start" not in engine.calls


@pytest.mark.parametrize(("name", "value", "message"), [
    ("OSD_VLLM_CAPTURE", "yes", "OSD_VLLM_CAPTURE must be 0 or 1, not 'yes'"),
    ("OSD_REDIS_URL", "", "OSD_REDIS_URL must name the Redis of osd learn --capture"),
    ("OSD_VLLM_CAPTUER", "1", "OSD_VLLM_CAPTUER is not a setting of osd.vllm; its settings are OSD_VLLM_MEGABYTES"),
])  # fmt: skip
def test_server_runs_without_capture_after_a_wrong_setting(export, monkeypatch, caplog, name, value, message):
    monkeypatch.setenv(name, value)
    engine = Engine(export)
    assert serve(engine) == []
    assert sum(message in line for line in caplog.messages) == 1
    assert "osd_capture_start" not in engine.calls
    assert engine.extra == [None]
