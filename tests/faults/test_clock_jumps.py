"""The system clock is set while osd runs: waits, expiry and purges follow the elapsed time."""

from __future__ import annotations

import time

import pytest

from osd.capture.purge import Purges, RemovedData
from osd.config import TrainerSettings
from osd.drafting.recall.drafter import Recall
from osd.registry.events import Events
from osd.registry.lease import SILENT_SECONDS, Lease
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from osd.target.identity import identify
from serving.replica.recall_keeper import RecallKeeper
from tests.pointers import put
from tests.unit.engine.harness import prompts, running
from tests.unit.learning.toys import Toy
from trainer.rollout import DomainVersions, Promotion

pytestmark = [
    pytest.mark.fault(
        "the clock jumps by an hour, forward and back",
        "canaries, leases, purges and the age of recall's entries follow the elapsed time",
    )
]

HOUR = 3600.0
both_ways = pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forwards", "backwards"])


@pytest.fixture
def set_clock(monkeypatch):
    """Function that moves the wall clock by a number of seconds, and with it the file times that osd writes."""

    def jump(seconds: float) -> None:
        real = time.time
        monkeypatch.setattr("time.time", lambda: real() + seconds)

    return jump


@pytest.fixture
def promotion(redis_url, tmp_path):
    """Rollout of a domain with a new canary and a time limit of one minute."""
    registry, toy = Registry(tmp_path), Toy()
    for _ in range(2):
        registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(redis_url, tmp_path) as pointer, Events(redis_url) as events:
        put(pointer, "general", Rollout(1, 2, 0.5, time.time()))
        versions = DomainVersions("general", registry, pointer, events, Lease(PointerFiles(tmp_path), "general"))
        yield Promotion(versions, TrainerSettings(canary_share=0.5, canary_seconds=60), lambda config: Toy(), 20)


@both_ways
def test_canary_trial_lasts_its_elapsed_time(promotion, set_clock, jump, fault_result):
    assert promotion.load_stable() is not None
    began = time.monotonic()
    set_clock(jump)
    assert promotion.decide(time.monotonic()).action == "watch"
    assert promotion.decide(began + 60) is not None
    assert promotion.versions.rollout().canary is None
    fault_result.lost = "nothing"


@both_ways
def test_successor_keeps_the_time_limit_of_a_canary(promotion, set_clock, jump):
    set_clock(jump)
    promotion.load_stable()
    assert promotion.decide(time.monotonic() + 61).action == "roll_back"


@both_ways
def test_lease_expires_by_elapsed_time(tmp_path, set_clock, jump, monkeypatch, fault_result):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    files, rollout = PointerFiles(tmp_path), Rollout(1, None, 0.0, 1.0)
    first, second = Lease(files, "general"), Lease(files, "general")
    assert first.take(rollout)
    assert not second.take(rollout)
    set_clock(jump)
    for _ in range(3):
        now += SILENT_SECONDS / 2
        first.alive()
        assert not second.take(rollout)
    now += SILENT_SECONDS + 1
    assert second.take(rollout)
    fault_result.lost = "nothing"
    first.release()
    second.release()


@both_ways
def test_purge_removes_entries_from_before_the_jump(
    redis_url, tiny_target, tmp_path, set_clock, jump, eventually, fault_result
):
    with running(tiny_target, drafter=Recall()) as client:
        settings = client.engine.settings.model_copy(update={"home": tmp_path})
        keeper = RecallKeeper(settings, redis_url, "a", identify("tiny", tiny_target), client.engine)
        keeper.start()
        try:
            client.submit("purged", prompts([5])[0], 12, ignore_eos=True, capture=True)
            client.wait()
            table = client.engine.pool.memories("general").of("")
            assert table.used() > 0
            set_clock(jump)
            with Purges(redis_url) as purges:
                purges.add("purged")
                ((_, removed),) = eventually(lambda: purges.answers("purged")).items()
            assert isinstance(removed, RemovedData)
            assert removed.entries > 0
            assert table.used() == 0
        finally:
            keeper.close()
    fault_result.lost = "only the purged request"


def test_entries_after_a_backward_jump_are_not_older(tiny_target, set_clock, fault_result):
    """A full table drops the entries with the oldest renewal."""
    began = int(time.time())
    with running(tiny_target, drafter=Recall()) as client:
        table = client.engine.pool.memories("general").of("")
        client.submit("before", prompts([5])[0], 12, ignore_eos=True, capture=True)
        client.wait()
        first = table.used()
        set_clock(-HOUR)
        client.submit("after", prompts([5], seed=1)[0], 12, ignore_eos=True, capture=True)
        client.wait()
        assert table.used() > first > 0
        assert table.drop(before=began) == 0
    fault_result.lost = "nothing"
