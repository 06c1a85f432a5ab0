"""The clock of the machine is set while osd runs: what it waits for, keeps and forgets goes by time that passed."""

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
both_ways = pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])


@pytest.fixture
def set_clock(monkeypatch):
    """Sets the clock by so many seconds; file times go with it as far as osd writes them."""

    def jump(seconds: float) -> None:
        real = time.time
        monkeypatch.setattr("time.time", lambda: real() + seconds)

    return jump


@pytest.fixture
def promotion(redis_url, tmp_path):
    """A domain with a canary that has just begun, and what is to decide on it within a minute."""
    registry, toy = Registry(tmp_path), Toy()
    for _ in range(2):
        registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(redis_url, tmp_path) as pointer, Events(redis_url) as events:
        put(pointer, "general", Rollout(1, 2, 0.5, time.time()))
        service = DomainVersions("general", registry, pointer, events, Lease(PointerFiles(tmp_path), "general"))
        yield Promotion(service, TrainerSettings(canary_share=0.5, canary_seconds=60), lambda config: Toy(), 20)


@both_ways
def test_a_canary_is_on_trial_for_its_time_whatever_the_clock_says(promotion, set_clock, jump, aftermath):
    assert promotion.load_stable() is not None
    began = time.monotonic()
    set_clock(jump)
    assert promotion.decide(time.monotonic()).action == "watch"
    assert promotion.decide(began + 60) is not None
    assert promotion.versions.rollout().canary is None
    aftermath.lost = "nothing"


@both_ways
def test_a_trainer_that_takes_over_gives_a_canary_no_more_than_its_time(promotion, set_clock, jump):
    set_clock(jump)
    promotion.load_stable()
    assert promotion.decide(time.monotonic() + 61).action == "roll_back"


@both_ways
def test_lease_goes_by_time_that_passed_when_the_clock_is_set(tmp_path, set_clock, jump, monkeypatch, aftermath):
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
    aftermath.lost = "nothing"
    first.release()
    second.release()


@both_ways
def test_a_purge_reaches_what_was_recalled_before_the_clock_was_set(
    redis_url, tiny_target, tmp_path, set_clock, jump, eventually, aftermath
):
    with running(tiny_target, drafter=Recall()) as client:
        settings = client.engine.settings.model_copy(update={"home": tmp_path})
        keeper = RecallKeeper(settings, redis_url, "a", identify("tiny", tiny_target), client.engine)
        keeper.start()
        try:
            client.submit("hers", prompts([5])[0], 12, ignore_eos=True, capture=True)
            client.wait()
            table = client.engine.pool.memories("general").of("")
            assert table.used() > 0
            set_clock(jump)
            with Purges(redis_url) as purges:
                purges.ask("hers")
                ((_, removed),) = eventually(lambda: purges.answers("hers")).items()
            assert isinstance(removed, RemovedData)
            assert removed.entries > 0
            assert table.used() == 0
        finally:
            keeper.close()
    aftermath.lost = "only the purged request"


def test_what_is_learnt_after_the_clock_went_back_does_not_look_older_than_the_rest(tiny_target, set_clock, aftermath):
    """A full table gives up what was not renewed for longest."""
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
    aftermath.lost = "nothing"
