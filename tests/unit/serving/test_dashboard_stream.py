"""Event stream of the dashboard: snapshots, changes, and resumption."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from starlette.testclient import TestClient

from serving.api.routes import create_app
from serving.dashboard import stream
from serving.dashboard.stream import Viewers, parts_of
from serving.http.errors import ApiError
from serving.http.running_requests import RunningRequests
from serving.metrics.history import HISTORY_SECONDS, MetricsHistory
from tests.unit.serving.browser import Browser, answered, until

STREAM = "/dashboard/stream"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Send an event every few milliseconds."""
    monkeypatch.setattr(stream, "_PERIOD", 0.02)


async def read(viewers: Viewers, count: int, seconds: int = 60, last: str | None = None) -> list[tuple[str, str, dict]]:
    """Return kind, id and data of the first ``count`` events of a stream."""
    received = []
    events = viewers.follow(seconds, last)
    async for event in events:
        fields = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
        if "data" in fields:
            received.append((fields["event"], fields["id"], json.loads(fields["data"])))
        if len(received) == count:
            break
    await events.aclose()
    return received


def add(history: MetricsHistory, second: int, tokens: int) -> None:
    history.add(
        second + 0.5, "a", {"completion_tokens": tokens, ("source_drafted", "recall"): 2}, {"running": 1, "waiting": 0}
    )


async def test_stream_sends_a_snapshot_and_then_changes(service, monkeypatch):
    now = int(time.time())
    for second in range(10):
        add(service.history, now - 12 + second, 5)

    viewers = Viewers(service)
    monkeypatch.setattr(Viewers, "_expire_cache", lambda self: (setattr(self, "_state", None), self._bins.clear()))
    events = viewers.follow(60, None)
    retry, first, second = [await anext(events) for _ in range(3)]
    service.counters = {"requests": 2}
    third = await anext(events)
    assert retry == b"retry: 500\n\n"
    assert first.startswith(b"event: snapshot\nid: 60-")
    whole = json.loads(first.split(b"data: ")[1])
    assert whole["bins"]["counts"]["completion_tokens"][:10] == [5.0] * 10
    assert whole["bins"]["counts"]["source_drafted|recall"][:10] == [2.0] * 10
    assert set(whole["state"]) == {"totals", "events", "steps", "funds"}
    assert second.startswith(b"event: update\n")
    assert json.loads(second.split(b"data: ")[1])["state"] == {}
    assert json.loads(third.split(b"data: ")[1])["state"] == {"totals": {"requests": 2}}


async def test_stream_resumes_after_the_last_bin(service):
    now = int(time.time())
    for second in range(10):
        add(service.history, now - 10 + second, second)
    ((kind, id, data),) = await read(Viewers(service), 1, last=f"60-{now - 5}")
    assert kind == "update"
    assert data["bins"]["time"][:4] == [now - 4, now - 3, now - 2, now - 1]
    assert data["bins"]["counts"]["completion_tokens"][:4] == [6.0, 7.0, 8.0, 9.0]
    assert int(id.split("-")[1]) >= now - 1
    assert "totals" in data["state"], "the state of the page is unknown"


@pytest.mark.parametrize(
    "last", ["", "x", "60-", "300-5", "60-9999999999999", "60-99999999999", "60--5", "٦٠-5", "60-5\n"]
)
async def test_stream_with_an_invalid_id_starts_with_a_snapshot(service, last):
    ((kind, _, _),) = await read(Viewers(service), 1, last=last)
    assert kind == "snapshot"


async def test_concurrent_viewers_share_reads(service, monkeypatch):
    monkeypatch.setattr(Viewers, "_expire_cache", lambda self: None)

    viewers = Viewers(service)
    streams = await asyncio.gather(*(read(viewers, 3) for _ in range(5)))
    assert [len(events) for events in streams] == [3] * 5
    assert service.reads == 1


def test_stream_ends_after_its_time_limit(service, monkeypatch):
    monkeypatch.setattr(stream, "STREAM_SECONDS", 0.1)
    add(service.history, int(time.time()) - 5, 1)
    client = TestClient(create_app(service), base_url="http://127.0.0.1")
    answer = client.get(STREAM, params={"seconds": "60"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.count("event: update") >= 2


def test_viewer_over_the_limit_gets_429(service, monkeypatch):
    monkeypatch.setattr(stream, "MAX_VIEWERS", 2)
    viewers = Viewers(service)
    viewers.enter()
    viewers.enter()
    with pytest.raises(ApiError) as refused:
        viewers.enter()
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "5")
    viewers.leave()
    viewers.enter()


async def test_drain_ends_streams_without_waiting_for_them(service):
    requests, app = RunningRequests(), create_app(service)
    app.add_middleware(requests.guard)
    browser = Browser(app, STREAM, None, method="GET")
    await until(lambda: b"snapshot" in browser.answer)
    assert await requests.drain(30) == 0
    await until(browser.task.done)
    late = await answered(app, STREAM, None, method="GET")
    assert (browser.status, late.status) == (200, 503)


def test_parts_separate_training_steps_from_events():
    events = [
        {"kind": "train_step", "time": 1.0, "loss": 0.5, "cpu_seconds": 3.0, "step": 9},
        {"kind": "fund", "time": 2.0, "fund": 4.0, "needed": 1.0, "cost": 9.0, "saved": 7.0, "certain": 5.0},
        {"kind": "swapped", "time": 3.0, "version": 2},
    ]
    parts = parts_of({"time": 5.0, "events": events, "domain": "general"})
    assert parts["steps"] == [[1.0, 0.5, 3.0]]
    assert parts["funds"] == [[2.0, 4.0, 1.0, 9.0, 7.0, 5.0]]
    assert parts["events"] == [events[2]]
    assert parts["domain"] == "general"
    assert "time" not in parts


def test_history_bounds_seconds_and_versions():
    history = MetricsHistory()
    for second in range(HISTORY_SECONDS + 500):
        history.add(float(second), "a", {("version_drafted", f"d{number}", 1): 1 for number in range(50)}, {})
    seconds = list(history.seconds)
    assert 960 + 176 <= len(seconds) <= 960 + 176 + 15  # seconds, bins, and the seconds of the next bin
    assert all(len(second.counts) <= 17 for second in seconds)
    assert sum(sum(second.counts.values()) for second in seconds) == pytest.approx(50 * HISTORY_SECONDS, rel=0.01)
