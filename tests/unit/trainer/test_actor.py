from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from osd.config import Settings
from trainer.actor import Trainer
from trainer.distributed import DistributedTrainer, Orders, RemoteWorkers


def test_an_error_that_nobody_foresaw_is_told_in_the_status_and_tried_again(tmp_path):
    settings = Settings(home=tmp_path, target={"source": str(tmp_path / "nowhere")})  # type: ignore[arg-type]
    trainer = Trainer(settings, "redis://127.0.0.1:1")
    deadline = time.monotonic() + 30
    while not trainer.status()["failure"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "TargetError: target.source: there is no directory" in trainer.status()["failure"]
    assert trainer.status()["state"] == "waiting"
    assert trainer.pause()
    trainer.resume()
    assert trainer.stop()


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(DistributedTrainer, "train", lambda group: time.sleep(0.01))
    trainer = DistributedTrainer(Settings(home=tmp_path), "redis://127.0.0.1:1")
    yield trainer
    assert trainer.stop()


def test_the_end_of_a_group_is_what_a_rank_told_and_else_a_death(group):
    group.join()
    assert group.status()["failure"] == ""
    group.fail("rank 1: RuntimeError: Connection closed by peer")
    group.join()
    assert group.status()["failure"] == "rank 1: RuntimeError: Connection closed by peer"
    group.join()
    assert group.status()["failure"] == "a process of the group died"


def test_a_group_is_at_rest_when_it_says_so_after_it_was_told_to_pause():
    running = Orders(0, 0, paused=False, stopped=False)
    workers = RemoteWorkers(running)
    assert not workers.pause(timeout=0)
    told = workers.report(running, {"state": "training"}, True)  # of before it knew, so it says nothing
    assert told.paused
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(workers.pause, 0.2)
        while workers.orders == told:
            time.sleep(0.001)
        workers.report(told, {"state": "training"}, True)
        assert pausing.result() is False
        pausing = pool.submit(workers.pause, 30)
        while not pausing.done():
            told = workers.report(told, {"state": "paused"}, True)
        assert pausing.result() is True
    assert workers.status() == {"state": "paused"}
    workers.resume()
    assert not workers.report(told, {"state": "paused"}, True).paused


def test_a_new_group_takes_over_what_is_wanted_and_the_old_one_ends(group):
    old = group.join()
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(group.pause)
        assert group.report(old, {}, False).paused
        new = group.join()
        assert pausing.result()  # what is gone trains nothing
    assert new.paused
    assert group.report(old, {"state": "training"}, False).stopped
    assert group.status()["state"] == "waiting"
    group.stop()
    assert group.report(new, {}, False).stopped
