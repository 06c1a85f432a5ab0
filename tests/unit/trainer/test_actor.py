from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from osd.config import Settings
from tests.waiting import wait_until
from trainer import app
from trainer.actor import Orders, RemoteWorkers, Trainer
from trainer.distributed import DistributedTrainer


def test_an_error_that_nobody_foresaw_is_told_in_the_status_and_tried_again(tmp_path):
    settings = Settings(home=tmp_path, target={"source": str(tmp_path / "nowhere")})  # type: ignore[arg-type]
    trainer = Trainer(settings, "redis://127.0.0.1:1")
    wait_until(lambda: trainer.status()["failure"])
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
    group.resume()
    assert not group.report(new, {}, False).paused
    group.stop()
    assert group.report(new, {}, False).stopped


@pytest.mark.parametrize(
    ("kind", "enabled", "wanted", "said"),
    [
        ("eagle", True, True, ""),
        ("eagle", False, False, ""),
        ("none", True, False, ""),
        ("recall", False, False, ""),
        ("recall", True, False, "drafter.kind recall has nothing to train, there is no trainer"),
    ],
)
def test_where_there_is_nothing_to_train_there_is_no_trainer_and_the_log_says_so_once(
    kind, enabled, wanted, said, caplog
):
    settings = Settings(drafter={"kind": kind}, trainer={"enabled": enabled})
    with caplog.at_level("INFO"):
        assert app.wanted(settings) is wanted
    assert [record.message for record in caplog.records] == [said] * bool(said)


def of(state: str, domains: list[str], failure: str = "") -> dict[str, Any]:
    others = {domain: {"state": state if domain in domains else "waiting"} for domain in ("code", "sql")}
    own = state if "general" in domains else "waiting"
    return {"state": own, "domains": domains, "extra_domains": others, "failure": failure}


def test_of_several_trainers_each_domain_is_told_by_the_one_that_has_it():
    assert app.merged("general", [of("a", ["code"]), of("b", ["general", "sql"], "OSError: full")]) == {
        "state": "b",
        "domains": ["code", "general", "sql"],
        "extra_domains": {"code": {"state": "a"}, "sql": {"state": "b"}},
        "failure": "OSError: full",
    }
    starting = {"state": "waiting", "failure": ""}
    assert app.merged("general", [starting, of("a", ["code"])])["extra_domains"]["code"] == {"state": "a"}
    alone = of("a", ["code", "general", "sql"])
    assert app.merged("general", [alone]) == alone


def test_the_first_trainer_has_the_name_that_the_only_one_has():
    assert app.names(1) == [app.NAME] == ["osd-trainer"]
    assert app.names(3) == ["osd-trainer", "osd-trainer-2", "osd-trainer-3"]
