"""Start of a trainer, which waits for the first token of the replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from trainer.actor import await_first_token

SILENT, DECODING = ReplicaLoad(0, 0, 1, 0.0), ReplicaLoad(1, 0, 1, 40.0)


class StopEvent:
    """Event that stops a trainer, with a clock that only its waits advance; ``then`` is called in each wait."""

    def __init__(self, then: Callable[[int], bool] = lambda count: False) -> None:
        self.count, self.seconds, self._then = 0, 0.0, then

    def wait(self, seconds: float) -> bool:
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        return self._then(self.count)


@pytest.fixture
def loads(redis_url):
    with ReplicaLoads(redis_url) as loads:
        yield loads


@pytest.fixture
def await_token(redis_url, monkeypatch):
    """Function that waits for a first token and returns the event with its number of waits."""

    def wait(then: Callable[[int], bool] = lambda count: False) -> StopEvent:
        event = StopEvent(then)
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: event.seconds)
            await_first_token(redis_url, event)
        return event

    return wait


def test_trainer_waits_until_one_of_the_replicas_decodes(await_token, loads):
    loads.report("a", SILENT)
    loads.report("b", SILENT)

    def decode(count: int) -> bool:
        loads.report("a", SILENT)
        loads.report("b", DECODING if count == 3 else SILENT)
        return False

    assert await_token(decode).count == 3


def test_trainer_without_replicas_does_not_wait(await_token):
    assert await_token().count == 0


def test_trainer_waits_five_seconds_without_requests(await_token, loads):
    loads.report("a", SILENT)
    event = await_token(lambda count: loads.report("a", SILENT) and False)
    assert event.seconds == pytest.approx(5.0, abs=0.5)


def test_stopped_trainer_ends_its_wait(await_token, loads):
    loads.report("a", SILENT)
    assert await_token(lambda count: True).count == 1
