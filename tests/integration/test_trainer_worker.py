"""Worker of the trainer with a real Redis, a real registry, and a drafter that learns in seconds."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import ACCEPTED, REJECTED
from osd.registry import lease as lease_module
from osd.registry.pointer_file import FencedError
from osd.registry.training import TrainingReports
from tests.killer import Killer
from tests.unit.learning.toys import Toy, make_trace, target_logits, with_drafts
from trainer import checkpoint as checkpoint_module
from trainer import worker as worker_module
from trainer.reporter import CostMeter


def pending(client):
    groups = client.xinfo_groups("osd:traces:domain:general")
    return groups[0]["pending"] if groups else None


def test_better_drafter_is_learned_and_put_in_service(make_loop):
    loop = make_loop()
    loop.begin()
    loop.publish(2)
    loop.stop()
    stable = loop.pointer.get("general").stable
    assert stable >= 3
    manifest = loop.registry.load("general", stable).manifest
    assert manifest["parent"] == stable - 1
    assert manifest["trained_on"]["records"] > 0
    assert manifest["trained_on"]["steps"] >= 50
    first, last = (loop.registry.load("general", number).manifest["gate"] for number in (2, stable))
    assert first["baseline_acceptance"] < first["acceptance"] <= last["acceptance"] + 0.005
    assert len(first["per_depth"]) == loop.settings.growth.lookahead
    reported = [event for event in loop.events.recent() if event["kind"] == "published"]
    assert [event["version"] for event in reported] == list(range(2, stable + 1))
    assert reported[0]["acceptance"] == first["acceptance"]
    assert any(event["kind"] == "train_step" and event["loss"] > 0 for event in loop.events.recent())


def test_counts_of_training_survive_a_lost_checkpoint(make_loop, eventually):
    loop = make_loop()
    worker = loop.begin()
    with TrainingReports(loop.url) as reports:
        eventually(lambda: worker.status()["published"] >= 1)
        eventually(lambda: (report := reports.get(["general"])) and report["general"].passed >= 1)
        loop.stop()
        before = reports.get(["general"])["general"]
        assert before.positions > before.steps > 0
        assert before.trained + before.held_out == before.records == 40
        assert before.replay_records == 40
        assert before.replay_bytes > 0
        (loop.settings.home_dir / "trainer" / "general.safetensors").unlink()
        successor = loop.start()
        loop.send(3)
        eventually(lambda: successor.status()["records"] > 0)
        eventually(lambda: reports.get(["general"])["general"].replay_records != 40)
        after = reports.get(["general"])["general"]
    assert successor.status()["steps"] < before.steps <= after.steps
    assert after.records >= 40


def test_status_names_a_version_before_its_cost_is_charged(make_loop, eventually, monkeypatch):
    statuses = []
    charge = CostMeter.start_version

    def published(meter):
        statuses.append((worker.status()["published"], worker.status()["version"]))
        charge(meter)

    monkeypatch.setattr(CostMeter, "start_version", published)
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    loop.stop()
    assert statuses[0] == (1, 2)


def test_records_are_acknowledged_after_a_checkpoint(make_loop, eventually, redis_client, monkeypatch, caplog):
    monkeypatch.setattr(worker_module, "CHECKPOINT_SECONDS", 0.1)
    loop = make_loop(steps_per_candidate=10_000)
    blocker = loop.settings.home_dir / "trainer"
    blocker.write_text("a file where the checkpoint's directory should be")
    worker = loop.begin(20)
    eventually(lambda: worker.status()["trained"] + worker.status()["held_out"] == 20)
    tried, save = [], checkpoint_module.save
    monkeypatch.setattr(checkpoint_module, "save", lambda *arguments: (tried.append(1), save(*arguments)))
    eventually(lambda: len(tried) > 2)
    assert caplog.text.count("the checkpoint cannot be written") == 1
    assert pending(redis_client) == 20
    blocker.unlink()
    eventually(lambda: pending(redis_client) == 0)
    assert (blocker / "general.safetensors").is_file()


def test_unusable_checkpoint_starts_from_the_stable_version(make_loop, eventually, caplog):
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin(20)
    # The successor would receive and train on records that were neither trained on nor held out.
    eventually(lambda: worker.status()["trained"] + worker.status()["held_out"] == 20)
    loop.stop()
    path = loop.settings.home_dir / "trainer" / "general.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    caplog.clear()
    successor = loop.start()
    eventually(lambda: successor.status()["version"] == 1)
    assert successor.status()["steps"] == 0
    assert caplog.text.count("training starts from version 1 instead of the checkpoint") == 1
    loop.send(20)
    eventually(lambda: successor.status()["steps"] > 5)


def test_cost_of_training_is_reported_and_kept(make_loop, eventually, redis_client):
    loop = make_loop()
    loop.begin()
    loop.publish(2)
    loop.stop()
    assert loop.registry.load("general", 2).manifest["cost"]["core_seconds"] >= 0
    with TrainingReports(loop.url) as reports:
        reported = reports.get(["general"])["general"].cpu_seconds
        assert reported > 0
        redis_client.delete("osd:training:general")
        loop.start()
        eventually(lambda: "general" in reports.get(["general"]))
        assert reports.get(["general"])["general"].cpu_seconds >= reported


def test_training_survives_an_outage_of_redis(make_loop, eventually, redis_server, monkeypatch):
    monkeypatch.setattr("trainer.capacity._BLIND_SECONDS", 600.0)  # on a slow machine too, training does not stop
    loop = make_loop(steps_per_candidate=40)
    worker = loop.begin(60)
    eventually(lambda: worker.status()["steps"] >= 5 and worker.status()["records"] == 60)
    redis_server.close()
    published = worker.status()["published"]
    eventually(lambda: worker.status()["published"] > published)
    stable = loop.pointer.get("general").stable
    assert stable > 1
    redis_server.start()
    # Redis is empty now: the trainer creates stream and group again, and writes the pointer.
    published = worker.status()["published"]
    loop.send(60)
    eventually(lambda: worker.status()["published"] > published)
    assert loop.pointer.get("general").stable == 1 + worker.status()["published"]


def test_enough_records_are_held_out_with_a_small_share(make_loop, eventually):
    loop = make_loop(held_out=0.01)
    worker = loop.begin(120)
    eventually(lambda: worker.status()["published"] >= 1)
    assert worker.status()["held_out"] * 30 >= 256


def perfect():
    toy = Toy()
    with torch.no_grad():
        toy.table.weight.copy_(torch.tensor(target_logits()).float())
        toy.read.weight.zero_()
        toy.read.bias.zero_()
    return toy


def test_worse_candidate_is_rejected_and_trained_further(make_loop, eventually):
    loop = make_loop(learning_rate=1.0)
    worker = loop.begin(40, perfect())
    eventually(lambda: worker.status()["rejected"] >= 2)
    loop.stop()
    assert loop.pointer.get("general").stable == 1
    assert [version.number for version in loop.registry.list("general")] == [1]
    reported = [event for event in loop.events.recent() if event["kind"] == "rejected"]
    assert (reported[0]["version"], reported[0]["parent"]) == (None, 1)
    assert "fell" in reported[0]["reason"]
    assert reported[0]["baseline_acceptance"] > reported[0]["acceptance"]
    assert worker.status()["steps"] >= 50


def test_candidate_is_compared_with_a_rolled_back_version(make_loop, eventually):
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    assert worker.pause()
    published = worker.status()["published"]
    newest = loop.pointer.get("general").stable
    loop.point(1)
    worker.resume()
    loop.send(40)
    eventually(lambda: worker.status()["published"] > published)
    manifest = loop.registry.load("general", newest + 1).manifest
    assert manifest["parent"] == 1


def test_damaged_stable_version_falls_back_to_the_previous(make_loop, eventually):
    loop = make_loop()
    loop.first_version()
    loop.first_version()
    (loop.settings.registry_dir / "general" / "2" / "model.safetensors").write_bytes(b"damaged")
    worker = loop.start()
    eventually(lambda: worker.status()["version"] == 1)


def test_training_without_new_records_ends_when_it_stops_helping(make_loop, eventually):
    loop = make_loop(steps_per_candidate=200)
    worker = loop.begin()
    eventually(lambda: "often enough" in worker.status()["detail"])
    # Eight passes over about 28 records of 30 tokens are fewer than 100 micro-steps, half of a candidate's.
    assert worker.status()["steps"] >= 400
    assert worker.status()["published"] >= 1
    steps = worker.status()["steps"]
    assert worker.pause()  # this returns after a turn without training
    assert worker.status()["steps"] == steps
    worker.resume()
    loop.send(10)
    eventually(lambda: worker.status()["steps"] > steps)


def live(name, version, rate, seed):
    """Return the trace of a request with drafts of ``version``; a share ``rate`` of them was accepted."""
    verdict = np.where(np.random.default_rng(seed).random(30) < rate, ACCEPTED, REJECTED).astype(np.int8)
    trace = make_trace(name, completion=30, seed=seed)
    trace = with_drafts(trace, trace.completion_ids.numpy(), verdict)
    return msgspec.structs.replace(trace, drafter_version=version)


@pytest.mark.parametrize(("rate", "kind", "stable"), [(0.6, "promoted", 2), (0.1, "rolled_back", 1)])
def test_canary_is_decided_by_live_acceptance(make_loop, eventually, rate, kind, stable):
    loop = make_loop(canary_share=0.5)
    worker = loop.begin()
    eventually(lambda: loop.pointer.get("general").canary == 2)
    assert loop.pointer.get("general").stable == 1
    assert loop.pointer.get("general").share == 0.5
    for n in range(200):
        assert loop.writer.offer(live(f"live-{n}", 1 + n % 2, rate if n % 2 else 0.3, n))
    action = {"promoted": "promote", "rolled_back": "roll_back"}[kind]
    eventually(lambda: worker.status()["canary"].get("action") == action)
    assert worker.status()["canary"]["canary"] == 2
    (reported,) = [event for event in loop.events.recent() if event["kind"] == kind]
    assert reported["version"] == stable
    assert reported["reason"]
    assert loop.pointer.get("general").stable == stable
    eventually(lambda: worker.status()["version"] == stable)


def test_drop_of_live_acceptance_is_reported_and_counted(make_loop, eventually):
    loop = make_loop(steps_per_candidate=10_000, trigger_records=1000, trigger_seconds=1000)
    loop.first_version()
    for n in range(100):
        assert loop.writer.offer(live(f"live-{n}", 1, 0.7 if n < 60 else 0.3, n))
    worker = loop.start()
    eventually(lambda: worker.status()["drifts"] == 1)
    assert worker.status()["drift"]["before"] > worker.status()["drift"]["now"] + 0.2
    eventually(lambda: any(event["kind"] == "drift" for event in loop.events.recent()))
    (reported,) = [event for event in loop.events.recent() if event["kind"] == "drift"]
    assert reported["version"] == 1
    assert reported["source"] == "general"


@pytest.mark.fault(
    "two trainers have the same domain",
    "one trains, and the other waits until the first ends",
    process="trainer: regular end of the first",
)
def test_second_trainer_of_a_domain_waits(make_loop, redis_url, ends, eventually):
    loop = make_loop()
    loop.first_version()

    def start():
        killer = Killer("tests.faults.toy_trainer", redis_url, loop.settings.model_dump_json())
        return ends.enter_context(closing(killer))

    def rollout():
        return loop.pointer.get("general")

    first = start()
    eventually(lambda: rollout().fence == 1)
    second = start()
    loop.send(40)
    eventually(lambda: rollout().stable > 1)
    assert rollout().fence == 1, "the second trainer waits"
    first.close()
    eventually(lambda: rollout().fence == 2)
    versions = rollout().stable
    loop.send(40)
    eventually(lambda: rollout().stable > versions)
    second.close()
    # Each version was put in service once, by one of the trainers, so no move of the pointer was lost.
    now = rollout()
    assert now.stable == len(loop.registry.list("general")) == now.moves


def test_replaced_trainer_ends_without_writing(make_loop, eventually, monkeypatch):
    first, second = make_loop(), make_loop()
    replaced, ended = first.begin(), []
    monkeypatch.setattr(threading, "excepthook", lambda failure: ended.append(failure.exc_value))
    eventually(lambda: replaced.status()["steps"] > 0)
    monkeypatch.setattr(lease_module, "SILENT_SECONDS", -1.0)  # as after a long silence
    successor = second.start()
    eventually(lambda: len(ended) == 1)
    (error,) = ended
    assert isinstance(error, FencedError)
    assert str(error) == "another trainer has taken over general: its number is 2, and this trainer, number 1, ends"
    assert first.pointer.get("general").fence == 2
    assert successor.pause()
    saved = Path(first.settings.home_dir, "trainer/general.safetensors")
    before = saved.exists() and saved.read_bytes()
    with pytest.raises(FencedError):
        replaced.checkpoint()
    assert (saved.exists() and saved.read_bytes()) == before
