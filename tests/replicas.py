"""Complete replicas without Ray: the engine with everything around it, Redis and the registry."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager

import pytest

from osd.config import Settings
from osd.engine.request import Request, SamplingParams
from serving.replica.replica import Replica
from tests.unit.engine.harness import prompts
from tests.waiting import HANG_SECONDS

PROMPT = tuple(prompts([21], seed=6)[0])


def recall_settings(target, home, slots=2, **more):
    """Return the settings of replicas with recall and without a governor, which depends on the machine."""
    return Settings(
        home=home,
        target={"source": str(target), "dtype": "float32"},
        drafter={"kind": "recall", "recall": {"megabytes": 1}},
        growth={"kind": "best_first", "governed": False},
        engine={"slots": slots, "context": 256, "threads": 1, "max_draft": 24},
        **more,
    )


class Replicas:
    """Starter of replicas; at the end of the context it stops them and restores the settings of the process."""

    def __init__(self, settings, redis_url):
        self._settings, self._url, self._running = settings, redis_url, {}
        self._interval = sys.getswitchinterval()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end_all()

    def start(self, name, **changed):
        replica = Replica(self._settings.model_copy(update=changed), self._url, name, None)
        self._running[name] = replica
        return replica

    def end(self, name):
        self._running.pop(name).close()

    def end_all(self):
        for name in list(self._running):
            self.end(name)
        sys.setswitchinterval(self._interval)


def decode(
    replica, name, prompt=PROMPT, tokens=24, capture=True, on_progress=lambda update: None, domain="general", tenant=""
):
    """Decode a request; return a function that waits for its end."""
    ended = threading.Event()

    def on_update(update):
        on_progress(update)
        if update.finish_reason is not None:
            ended.set()

    sampling = SamplingParams(temperature=0.0)
    request = Request(name, prompt, tokens, sampling, ignore_eos=True, capture=capture, domain=domain, tenant=tenant)
    replica.submit(request, on_update)
    return lambda: ended.wait(HANG_SECONDS) or pytest.fail("the request does not end")


@contextmanager
def blocked_request(replica, name, updates=1, **options):
    """Run a request that stops after some updates until the end of the context."""
    may_continue, stops, seen = threading.Event(), threading.Event(), []

    def block(update):
        seen.append(update)
        if len(seen) >= updates:
            stops.set()
            may_continue.wait(HANG_SECONDS)

    wait = decode(replica, name, tokens=100, on_progress=block, **options)
    try:
        assert stops.wait(HANG_SECONDS)
        yield
    finally:
        may_continue.set()
    wait()
