"""Replicas that recall, with a real Redis: what one forgets, all of them and their snapshots forget."""

from __future__ import annotations

import re
import sys
import threading

import pytest
from typer.testing import CliRunner

from osd.cli.app import app
from osd.config import Settings
from osd.drafters.recall.snapshot import Snapshots
from osd.engine.request import Request, SamplingParams
from serving.replica import Replica

PROMPT = tuple(range(40, 60))


class NoMetrics:
    """Metrics that nobody else has."""

    def push(self, report):
        pass

    async def totals(self):
        return None

    async def history(self, seconds):
        return None


@pytest.fixture
def settings(tiny_target, tmp_path):
    return Settings(
        home=tmp_path,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "recall", "recall": {"megabytes": 1}},
        growth={"kind": "best_first", "governed": False},
        engine={"slots": 2, "context": 256, "threads": 1, "max_draft": 24},
        serving={"replicas": 2},
    )


class Replicas:
    """Starts replicas, and ends those that still run."""

    def __init__(self, settings, redis_url):
        self._settings, self._url, self._running = settings, redis_url, {}

    def start(self, name, **changed):
        replica = Replica(self._settings.model_copy(update=changed), self._url, name, NoMetrics())
        self._running[name] = replica
        return replica

    def end(self, name):
        self._running.pop(name).close()

    def end_all(self):
        for name in list(self._running):
            self.end(name)


@pytest.fixture
def replicas(settings, redis_url):
    interval = sys.getswitchinterval()
    replicas = Replicas(settings, redis_url)
    yield replicas
    replicas.end_all()
    sys.setswitchinterval(interval)


def decode(replica, name, prompt=PROMPT, tokens=24, capture=True, told=lambda update: None):
    """Decode a request; returns what waits for its end."""
    ended = threading.Event()

    def on_update(update):
        told(update)
        if update.finish_reason is not None:
            ended.set()

    sampling = SamplingParams(temperature=0.0)
    replica.submit(Request(name, prompt, tokens, sampling, ignore_eos=True, capture=capture), on_update)
    return lambda: ended.wait(30) or pytest.fail("the request does not end")


def used(replica, domain="general"):
    return sum(table.used() for table in replica.engine.pool.memories(domain).tables)


def purge(settings, redis_url, request):
    arguments = ["traces", "purge", "--request", request]
    for key, value in {"home": settings.home, "redis_url": redis_url}.items():
        arguments += ["--set", f"{key}={value}"]
    return CliRunner().invoke(app, arguments)


def test_a_purged_request_is_forgotten_by_every_replica_and_by_the_snapshot(replicas, settings, redis_url):
    one, other = replicas.start("one"), replicas.start("other")
    decode(one, "chatcmpl-1f-0")()
    decode(other, "chatcmpl-1f-1", PROMPT[::-1])()
    assert used(one)
    assert used(other)
    replicas.end("other")
    assert Snapshots(settings.registry_dir).about("general") is not None
    other = replicas.start("other again")
    assert used(other)
    result = purge(settings, redis_url, "chatcmpl-1f")
    assert result.exit_code == 0, result.output
    assert re.search(r"[1-9]\d* entries that it may have touched dropped from what is recalled", result.output)
    assert used(one) == used(other) == 0
    assert used(replicas.start("new")) == 0, "it starts with the snapshot"


def test_a_request_that_is_purged_while_it_is_decoded_is_forgotten_when_it_has_ended(
    replicas, settings, redis_url, eventually
):
    one, begun, go_on = replicas.start("one"), threading.Event(), threading.Event()

    def told(update):
        begun.set()
        go_on.wait(30)

    wait = decode(one, "chatcmpl-1f-0", tokens=100, told=told)
    assert begun.wait(30)
    result = purge(settings, redis_url, "chatcmpl-1f")
    assert result.exit_code == 0, result.output
    go_on.set()
    wait()
    eventually(lambda: used(one) == 0)


def test_what_is_purged_while_nothing_runs_is_gone_from_the_snapshot(replicas, settings, redis_url):
    decode(replicas.start("one"), "chatcmpl-1f-0")()
    replicas.end("one")
    assert Snapshots(settings.registry_dir).about("general") is not None
    result = purge(settings, redis_url, "chatcmpl-1f")
    assert result.exit_code == 0, result.output
    assert used(replicas.start("two")) == 0
