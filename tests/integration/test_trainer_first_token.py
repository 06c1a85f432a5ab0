"""A trainer that starts beside replicas lets them say their first token before it takes a core."""

from __future__ import annotations

import threading
import time

import pytest

from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from trainer import actor

SILENT, DECODING = ReplicaLoad(0, 0, 1, 0.0), ReplicaLoad(1, 0, 1, 40.0)


@pytest.fixture
def waiting(redis_url):
    """Waits in a thread; gives what tells it to stop."""
    started = []

    def start():
        stop = threading.Event()
        thread = threading.Thread(target=actor.await_first_token, args=(redis_url, stop), daemon=True)
        started.append((thread, stop))
        thread.start()
        return thread, stop

    yield start
    for thread, stop in started:
        stop.set()
        thread.join(5)


@pytest.fixture
def loads(redis_url):
    with ReplicaLoads(redis_url) as loads:
        yield loads


def test_it_waits_for_replicas_that_have_said_nothing_until_one_decodes(waiting, loads):
    loads.report("a", SILENT)
    loads.report("b", SILENT)
    thread, _ = waiting()
    thread.join(0.6)
    assert thread.is_alive()
    loads.report("b", DECODING)
    thread.join(1)
    assert not thread.is_alive()


def test_without_replicas_there_is_nobody_to_wait_for(waiting, loads):
    thread, _ = waiting()
    thread.join(1)
    assert not thread.is_alive()


def test_a_service_that_nobody_asks_does_not_keep_it_waiting(waiting, loads, monkeypatch):
    monkeypatch.setattr(actor, "_FIRST_TOKEN_SECONDS", 0.5)
    loads.report("a", SILENT)
    begun = time.monotonic()
    thread, _ = waiting()
    thread.join(1.5)
    assert not thread.is_alive()
    assert time.monotonic() - begun >= 0.5


def test_it_ends_with_the_trainer(waiting, loads):
    loads.report("a", SILENT)
    thread, stop = waiting()
    stop.set()
    thread.join(1)
    assert not thread.is_alive()
