"""Events in a real Redis server."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import redis

from osd.registry import events as module
from osd.registry.events import Events


@pytest.fixture
def events(redis_url: str, ends: ExitStack) -> Events:
    return ends.enter_context(Events(redis_url))


def test_events_are_returned_in_order_and_milestones_logged(events: Events, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    before = time.time()
    events.add("published", "code", 2, acceptance=0.5)
    events.add("train_step", "code", loss=1.25)
    events.add("swapped", "code", 2, replica="r1")
    recent = events.recent()
    times = [event.pop("time") for event in recent]
    assert recent == [
        {"kind": "published", "domain": "code", "version": 2, "acceptance": 0.5},
        {"kind": "train_step", "domain": "code", "version": None, "loss": 1.25},
        {"kind": "swapped", "domain": "code", "version": 2, "replica": "r1"},
    ]
    assert before <= times[0] <= times[1] <= times[2] <= time.time()
    assert [record.msg % record.args for record in caplog.records] == [
        "version 2 of code: published", "version 2 of code: swapped",
    ]  # fmt: skip


def test_long_text_of_an_event_is_cut(events: Events):
    events.add("rejected", "code", 2, reason="x" * 100_000)
    assert events.recent()[0]["reason"] == "x" * module.MAX_TEXT


def test_recent_events_are_limited_by_count_and_kind(events: Events):
    for version in (1, 2, 3):
        events.add("swapped", "code", version)
        events.add("train_step", "code")
    assert [event["version"] for event in events.recent(2, steps=False)] == [2, 3]
    assert len(events.recent(2)) == 4
    assert events.recent(0) == []
    assert [event["version"] for event in events.recent(1, steps=False)] == [3]


def test_event_lists_are_bounded_and_steps_keep_a_swap(events: Events, redis_client: redis.Redis, monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS", 5)
    events.add("swapped", "code", 7)
    for number in range(20):
        events.add("train_step", "code", step=number)
    recent = events.recent()
    assert [event["kind"] for event in recent] == ["swapped"] + 5 * ["train_step"]
    assert recent[-1]["step"] == 19
    assert sum(redis_client.llen(key) for key in redis_client.keys("osd:events*")) == 6


@pytest.mark.parametrize(("kind", "figures", "reason"), [
    ("exploded", {}, "^event kind 'exploded': must be one of published, rejected"),
    ("swapped", {"time": 3.0}, "^event figure 'time'"),
])  # fmt: skip
def test_invalid_event_is_refused(events: Events, kind, figures, reason):
    with pytest.raises(ValueError, match=reason):
        events.add(kind, "code", 1, **figures)


def test_invalid_event_list_in_redis_is_an_error(events: Events, redis_client: redis.Redis):
    redis_client.lpush("osd:events", b"{")
    with pytest.raises(redis.RedisError, match=r"^event list: "):
        events.recent()


def test_event_without_redis_is_logged_as_lost(caplog: pytest.LogCaptureFixture):
    with Events("redis://127.0.0.1:1") as events:
        events.try_add("swapped", "code", 2)
    assert "event swapped of version 2 is lost" in caplog.text
