from __future__ import annotations

import asyncio
import json

import pytest

from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.api import generation
from serving.api.routes import create_app
from tests.unit.serving.browser import Browser, until


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequences_and_its_places(service, stream, how):
    app = create_app(service)
    service.script = lambda request: None
    gone = Browser(app, "/v1/completions", {"prompt": "hi", "n": 2, "stream": stream})
    await until(lambda: len(service.submitted) == 2)
    if how == "disconnect":
        gone.leave()
    else:
        gone.task.cancel()
    await until(lambda: gone.task.done())
    assert set(service.cancelled) == {request.id for request in service.submitted}


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_noticed(service, how):
    app = create_app(service)
    service.script = lambda request: [Update(request.id, (1,), "a")]
    gone = Browser(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True})
    await until(lambda: len(gone.sent) == 2)
    assert service.cancelled == []
    if how == "disconnect":
        gone.leave()
    else:
        gone.task.cancel()
    await until(lambda: gone.task.done())
    assert service.cancelled[0] == service.submitted[0].id


async def test_a_reader_that_blocks_does_not_delay_the_cancellation(service):
    app = create_app(service)
    service.script = lambda request: [Update(request.id, (1,), "a")]
    slow = Browser(app, "/v1/completions", {"prompt": "hi", "stream": True})
    slow.unblocked.clear()
    await until(lambda: slow.sent)
    slow.leave()
    await until(lambda: service.cancelled)
    assert not slow.task.done()
    slow.unblocked.set()
    await until(lambda: slow.task.done())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_proxy_that_dies_is_a_client_that_left(service, stream):
    app = create_app(service)
    service.script = lambda request: [Update(request.id, (1,), "a")]
    gone = Browser(app, "/v1/completions", {"prompt": "hi", "n": 2, "stream": stream})
    await until(lambda: len(service.submitted) == 2)
    gone.die()
    await until(lambda: gone.task.done())
    assert set(service.cancelled) == {request.id for request in service.submitted}


async def test_a_reader_that_takes_nothing_ends_its_request_and_leaves_the_queue(make_service, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.1)

    service = make_service(max_queue=1)
    app = create_app(service)
    service.script = lambda request: [Update(request.id, (1,), "a"), Update(request.id, (1,), "b")]
    stuck = Browser(app, "/v1/completions", {"prompt": "hi", "stream": True})
    stuck.unblocked.clear()
    await until(lambda: service.cancelled)
    assert not stuck.task.done()
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    other = Browser(app, "/v1/completions", {"prompt": "hi"})
    await until(lambda: other.task.done())
    assert other.status == 200, "the place in the queue is free"
    stuck.unblocked.set()
    await until(lambda: stuck.task.done())


async def test_a_reader_that_waits_for_a_slow_engine_is_no_reader_that_takes_nothing(service, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.05)

    service.script = lambda request: [Update(request.id, (1,), "a")]
    waiting = Browser(create_app(service), "/v1/completions", {"prompt": "hi", "stream": True})
    await until(lambda: len(waiting.sent) == 2)
    await asyncio.sleep(0.2)
    assert service.cancelled == []
    waiting.leave()
    await until(lambda: waiting.task.done())


async def test_a_finished_request_is_not_cancelled_and_leaves_no_task_behind(service):
    app, before = create_app(service), asyncio.all_tasks()
    for stream in (False, True):
        done = Browser(app, "/v1/completions", {"prompt": "hi", "stream": stream})
        await until(lambda task=done.task: task.done())
        assert done.status == 200
    assert service.cancelled == []
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before


async def test_a_full_queue_is_429_with_retry_after_until_somebody_leaves(make_service):
    service = make_service(max_queue=2)
    app = create_app(service)
    service.script = lambda request: None
    first = Browser(app, "/v1/completions", {"prompt": "hi", "n": 2})
    await until(lambda: len(service.submitted) == 2)
    refused = Browser(app, "/v1/completions", {"prompt": "hi", "stream": True})
    await until(lambda: refused.task.done())
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused.sent[0]["headers"]
    assert json.loads(refused.sent[1]["body"])["error"]["code"] == "queue_full"
    assert len(service.submitted) == 2
    first.leave()
    await until(lambda: first.task.done())
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    next_one = Browser(app, "/v1/completions", {"prompt": "hi", "n": 2})
    await until(lambda: next_one.task.done())
    assert next_one.status == 200
    too_many = Browser(app, "/v1/completions", {"prompt": "hi", "n": 3})
    await until(lambda: too_many.task.done())
    assert too_many.status == 400
