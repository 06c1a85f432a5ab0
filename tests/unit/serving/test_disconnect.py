from __future__ import annotations

import asyncio
import json

import pytest

from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.api import generation
from serving.api.routes import create_app
from tests.unit.serving.browser import Browser, answered, until

LEAVE = {"disconnect": Browser.leave, "cancel": lambda browser: browser.task.cancel(), "its proxy dies": Browser.die}


@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_the_sequences(service, stream, started, how):
    service.script = lambda request: [Update(request.id, (1,), "a")] if started else None
    browser = Browser(create_app(service), "/v1/completions", {"prompt": "hi", "n": 2, "stream": stream})
    await until(lambda: len(service.submitted) == 2 and (len(browser.sent) == 3 or not (started and stream)))
    assert service.cancelled == []
    LEAVE[how](browser)
    await until(browser.task.done)
    assert set(service.cancelled) == {request.id for request in service.submitted}


@pytest.mark.parametrize("timeout", [None, 0.05], ids=["disconnect", "time limit"])
async def test_blocked_reader_does_not_delay_cancellation(service, timeout):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    slow = Browser(create_app(service), "/v1/completions", {"prompt": "hi", "stream": True, "timeout": timeout})
    slow.unblocked.clear()
    await until(lambda: slow.sent)
    if timeout is None:
        slow.leave()
    await until(lambda: service.cancelled)
    assert not slow.task.done()
    slow.unblocked.set()
    await until(slow.task.done)


async def test_stuck_reader_is_cancelled_and_leaves_the_queue(make_service, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.1)

    service = make_service(max_queue=1)
    app = create_app(service)
    service.script = lambda request: [Update(request.id, (1,), "a"), Update(request.id, (1,), "b")]
    stuck = Browser(app, "/v1/completions", {"prompt": "hi", "stream": True})
    stuck.unblocked.clear()
    await until(lambda: service.cancelled)
    assert not stuck.task.done()
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    second = await answered(app, "/v1/completions", {"prompt": "hi"})
    assert second.status == 200, "the place in the queue is free"
    stuck.unblocked.set()
    await until(stuck.task.done)


async def test_reader_of_a_slow_engine_is_not_cancelled(service, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.05)

    service.script = lambda request: [Update(request.id, (1,), "a")]
    waiting = Browser(create_app(service), "/v1/completions", {"prompt": "hi", "stream": True})
    await until(lambda: len(waiting.sent) == 2)
    await asyncio.sleep(0.2)
    assert service.cancelled == []
    waiting.leave()
    await until(waiting.task.done)


async def test_finished_request_leaves_no_task(service):
    app, before = create_app(service), asyncio.all_tasks()
    for stream in (False, True):
        done = Browser(app, "/v1/completions", {"prompt": "hi", "stream": stream})
        await until(lambda task=done.task: task.done())
        assert done.status == 200
    assert service.cancelled == []
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before


async def test_full_queue_is_429_until_a_client_leaves(make_service):
    service = make_service(max_queue=2)
    app = create_app(service)
    service.script = lambda request: None
    first = Browser(app, "/v1/completions", {"prompt": "hi", "n": 2})
    await until(lambda: len(service.submitted) == 2)
    refused = await answered(app, "/v1/completions", {"prompt": "hi", "stream": True})
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused.sent[0]["headers"]
    assert json.loads(refused.sent[1]["body"])["error"]["code"] == "queue_full"
    assert len(service.submitted) == 2
    first.leave()
    await until(first.task.done)
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    following = await answered(app, "/v1/completions", {"prompt": "hi", "n": 2})
    assert following.status == 200
