from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from osd.config import Settings
from osd.sealed import seal
from tests.waiting import wait_until
from trainer import app
from trainer.actor import Orders, RemoteWorkers, Trainer
from trainer.distributed import DistributedTrainer


def test_unexpected_error_is_reported_and_retried(tmp_path):
    settings = Settings(home=tmp_path, target={"source": str(tmp_path / "nowhere")})
    trainer = Trainer(seal(settings, "redis://127.0.0.1:1"))
    wait_until(lambda: trainer.status()["failure"])
    assert "TargetError: target.source: there is no directory" in trainer.status()["failure"]
    assert trainer.status()["state"] == "waiting"
    assert trainer.pause()
    trainer.resume()
    assert trainer.stop()


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(DistributedTrainer, "train", lambda group: time.sleep(0.01))
    trainer = DistributedTrainer(seal(Settings(home=tmp_path), "redis://127.0.0.1:1"))
    yield trainer
    assert trainer.stop()


def test_status_names_the_rank_error_that_ended_a_group(group):
    group.join()
    assert group.status()["failure"] == ""
    group.fail("rank 1: RuntimeError: Connection closed by peer")
    group.join()
    assert group.status()["failure"] == "rank 1: RuntimeError: Connection closed by peer"
    group.join()
    assert group.status()["failure"] == "a process of the group died"


def test_pause_waits_until_the_group_reports_rest():
    running = Orders(0, 0, paused=False, stopped=False)
    workers = RemoteWorkers(running)
    assert not workers.pause(timeout=0)
    orders = workers.report(running, {"state": "training"}, True)  # a report on older orders does not count
    assert orders.paused
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(workers.pause, 0.2)
        while workers.orders == orders:
            time.sleep(0.001)
        workers.report(orders, {"state": "training"}, True)
        assert pausing.result() is False
        pausing = pool.submit(workers.pause, 30)
        while not pausing.done():
            orders = workers.report(orders, {"state": "paused"}, True)
        assert pausing.result() is True
    assert workers.status() == {"state": "paused"}
    workers.resume()
    assert not workers.report(orders, {"state": "paused"}, True).paused


def test_new_group_inherits_orders_and_the_old_group_stops(group):
    old = group.join()
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(group.pause)
        assert group.report(old, {}, False).paused
        new = group.join()
        assert pausing.result()  # a dead group counts as resting
    assert new.paused
    assert group.report(old, {"state": "training"}, False).stopped
    assert group.status()["state"] == "waiting"
    group.resume()
    assert not group.report(new, {}, False).paused
    group.stop()
    assert group.report(new, {}, False).stopped


@pytest.mark.parametrize(("kind", "enabled", "needed", "message"), [
    ("eagle", True, True, ""),
    ("eagle", False, False, ""),
    ("none", True, False, ""),
    ("recall", False, False, ""),
    ("recall", True, False, "drafter.kind recall cannot be trained, so no trainer starts"),
])  # fmt: skip
def test_needs_trainer_is_false_for_untrainable_drafters(kind, enabled, needed, message, caplog):
    settings = Settings(drafter={"kind": kind}, trainer={"enabled": enabled})
    with caplog.at_level("INFO"):
        assert app.needs_trainer(settings) is needed
    assert [record.message for record in caplog.records] == [message] * bool(message)


def status_of(state: str, domains: list[str], failure: str = "") -> dict[str, Any]:
    extra = {domain: {"state": state if domain in domains else "waiting"} for domain in ("code", "sql")}
    main = state if "general" in domains else "waiting"
    return {"state": main, "domains": domains, "extra_domains": extra, "failure": failure}


def test_merged_status_uses_the_trainer_of_each_domain():
    statuses = [status_of("a", ["code"]), status_of("b", ["general", "sql"], "OSError: full")]
    assert app.merge_statuses("general", statuses) == {
        "state": "b",
        "domains": ["code", "general", "sql"],
        "extra_domains": {"code": {"state": "a"}, "sql": {"state": "b"}},
        "failure": "OSError: full",
    }
    starting = {"state": "waiting", "failure": ""}
    merged = app.merge_statuses("general", [starting, status_of("a", ["code"])])
    assert merged["extra_domains"]["code"] == {"state": "a"}
    single = status_of("a", ["code", "general", "sql"])
    assert app.merge_statuses("general", [single]) == single


def test_first_actor_has_the_name_of_a_single_trainer():
    assert app.actor_names(1) == [app.ACTOR_NAME] == ["osd-trainer"]
    assert app.actor_names(3) == ["osd-trainer", "osd-trainer-2", "osd-trainer-3"]
