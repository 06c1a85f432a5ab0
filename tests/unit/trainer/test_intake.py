"""Intake of records: which records train the drafter, which are finished at once, and which are forgotten."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from osd.capture.purge import PurgeFollower, RemovedData
from osd.capture.reader import DeliveredRecord, Place
from osd.capture.streams import Waiting
from osd.capture.trace import Array
from osd.config import BestFirstSettings, Settings
from osd.learning.online import LocalExecutor, empty_replay
from osd.registry.lease import Lease
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Version
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace
from trainer import intake as module
from trainer.executor import TargetContext
from trainer.intake import Intake
from trainer.reporter import CostMeter, TrainingReporter
from trainer.rollout import DomainVersions


class Stream:
    """Stream that delivers the records of ``sent``, each at the place of its number, and stores acknowledgements."""

    def __init__(self):
        self.sent, self.acknowledged, self.purged, self.answers, self.refused = [], [], {}, [], []

    def read(self, count, wait_ms):
        batch, self.sent = self.sent[:count], self.sent[count:]
        return batch

    def ack(self, places):
        self.acknowledged += [place.id for place in places]

    def refuse(self, place, reason):
        self.refused.append(reason)
        self.ack([place])

    def waiting(self):
        return Waiting(3, time.time())

    def sweep(self):
        pass

    def alive(self, member):
        pass

    def requests(self, seconds=None):
        return dict(self.purged)

    def answer(self, request, member, removed):
        self.answers.append((request, removed))


class Scene:
    """Intake that reads from a stream in memory, with its learner."""

    def __init__(self, monkeypatch, tmp_path, **trainer):
        self.stream, self.observed, self.number = Stream(), [], 0
        monkeypatch.setattr(module, "TraceReader", lambda *arguments, **keywords: self.stream)
        monkeypatch.setattr(module, "PurgeFollower", lambda purges, *rest: PurgeFollower(self.stream, *rest))
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
        settings = Settings(home=tmp_path, target={"source": "toy"}, trainer={"held_out": 0.3, **trainer})
        versions = DomainVersions("general", None, None, None, Lease(PointerFiles(tmp_path), "general"))
        self.reporter = TrainingReporter(versions, CostMeter(lambda: 0.0), None)
        context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
        self.intake = Intake(
            settings, "redis://127.0.0.1:1", context, self.reporter,
            lambda trace, learner: self.observed.append(trace.request_id),
        )  # fmt: skip
        self.learner = context.learner(
            Version(1, Toy().weights(), Toy().config(), {}), settings, self.intake.replay, None
        )

    def send(self, *traces):
        """Deliver records and acknowledge finished ones; return all acknowledged places so far."""
        for trace in traces:
            self.number += 1
            self.stream.sent.append(DeliveredRecord(Place("general", str(self.number)), trace))
        while self.intake.read(self.learner):
            pass
        self.intake.acknowledge()
        return self.stream.acknowledged


@pytest.fixture
def scene(monkeypatch, tmp_path):
    return lambda **trainer: Scene(monkeypatch, tmp_path, **trainer)


def change(**changes):
    return msgspec.structs.replace(make_trace("odd"), **changes)


NAN = Array.of(np.full((8, VOCABULARY), np.nan, np.float16))


@pytest.mark.parametrize(("trace", "settings", "refused", "observed"), [
    (make_trace("odd", target="another"), {}, 1, []),
    (make_trace("odd", hidden=False), {}, 1, []),
    (change(target_logp=NAN), {}, 1, []),
    (change(states_weight=0.0, hidden=None), {}, 0, ["odd"]),
    (make_trace("odd", domain="elsewhere"), {}, 0, []),
    (make_trace("odd", domain="acme.general"), {"domains": "all"}, 0, []),
    (change(created=time.time() - 90_000), {"replay_days": 1.0}, 0, []),
])  # fmt: skip
def test_unusable_record_is_finished_at_once(scene, trace, settings, refused, observed):
    setup, recalled = scene(**settings), []
    setup.learner.add_without_states = lambda trace: recalled.append(trace.request_id)
    assert setup.send(trace) == ["1"]
    assert (setup.reporter.state.refused, setup.observed, setup.learner.counters.records) == (refused, observed, 0)
    assert recalled == observed, "recall learns from a record without states"


def test_record_that_raises_any_error_is_refused_alone(scene):
    setup = scene(held_out=0.01)
    add = setup.learner.add

    def fails(trace):
        if trace.request_id == "odd":
            raise RecursionError("private text")
        return add(trace)

    setup.learner.add = fails
    assert setup.send(make_trace("odd"), make_trace("even"), make_trace("late", target="another")) == ["1", "3"]
    assert setup.intake.replay.record_keys() == [("even", 0)]
    assert setup.reporter.state.refused == 2
    assert setup.stream.refused == ["RecursionError", f"its target is another, not {TARGET.label}"]


def test_record_is_finished_after_training_or_when_held_out(scene):
    setup = scene(domains="all", replay_days=1.0)
    young = [change(request_id=f"r{n}", created=time.time(), domain="code") for n in range(9)]
    finished = setup.send(*young, *young)
    held = {request for request, _ in setup.intake.replay.record_keys("held_out")}
    trained = [n for n in range(9) if f"r{n}" not in held]
    assert 0 < len(held) < 9
    assert {int(place) for place in finished} == {
        n + 1 + again for n in range(9) for again in (0, 9) if n not in trained
    }
    assert setup.observed == [trace.request_id for trace in young], "a repeated record is not observed again"
    fresh, late = setup.learner.step(10**6, LocalExecutor()).fresh, len(finished)
    setup.intake.finish(fresh)
    assert setup.intake.finished == 2 * len(trained)
    assert len(setup.send(young[trained[0]])) == late + 2 * len(trained) + 1
    assert (setup.reporter.state.lag, setup.reporter.state.refused) == (3, 0)


def test_purged_request_is_forgotten_and_refused(scene):
    setup = scene(held_out=0.01)
    setup.send(make_trace("d"), make_trace("b"))
    assert not setup.intake.must_forget()
    setup.stream.purged = {"d": 5.0}
    assert setup.intake.must_forget()
    assert setup.intake.replay.record_keys() == [("d", 0), ("b", 0)]
    setup.intake.forget_purged()
    assert setup.send(make_trace("d", segment=1)) == ["1", "3"]
    assert setup.intake.replay.record_keys() == [("b", 0)]
    setup.reporter.trained_requests.add(["b"])
    setup.stream.purged["b"] = 6.0
    setup.intake.forget_purged()
    assert setup.stream.answers == [("d", RemovedData(1, False)), ("b", RemovedData(1, True))]
    setup.stream.purged.clear()
    setup.intake.forget_purged()
    assert setup.send(make_trace("d")) == ["1", "3", "2"]
    assert setup.intake.replay.record_keys() == [("d", 0)]


def test_evicted_or_expired_record_is_finished(scene, monkeypatch):
    setup = scene(held_out=0.01, anchors=0.0, replay_days=1.0)
    monkeypatch.setattr(module, "_EXPIRE_SECONDS", 0.0)
    now = time.time()
    young = [change(request_id=f"r{n}", created=now, prompt_ids=Array.of(np.zeros(900, np.int32))) for n in range(3)]
    young = [msgspec.structs.replace(trace, hidden=make_trace(prompt=900).hidden) for trace in young]
    assert setup.send(*young[:2]) == []
    setup.intake.resize(1024, 1)
    assert setup.send() == ["1"]
    assert setup.send(young[2]) == ["1", "2"]
    monkeypatch.setattr(module.time, "time", lambda: now + 90_000)
    assert setup.send() == ["1", "2", "3"]
    assert setup.intake.replay.record_keys() == []


def test_record_weight_includes_records_without_states(scene):
    setup = scene()
    setup.send(change(states_weight=5.0, weight=2.0))
    replay = setup.intake.replay
    assert [trace.weight for trace in (*replay.held_out(100), *replay.sample(100).traces)] == [10.0]


def test_missing_returns_why_training_waits(scene):
    setup = scene(held_out=0.01, min_records=2)
    setup.send(make_trace("d"), make_trace("b", target="another"))
    assert setup.intake.missing(setup.learner) == "1 of 2 records to start with, 1 were refused"
    setup.send(make_trace("b"))
    assert setup.intake.missing(setup.learner) == ""
    setup.intake.finish(setup.learner.step(100, LocalExecutor()).fresh)
    setup.learner.trigger.on_resume()
    assert setup.intake.missing(setup.learner) == "every record was trained on often enough, waiting for new records"


def test_gather_sleeps_then_reads_all_records(scene):
    setup, slept = scene(), []
    setup.send()
    setup.stream.sent = [DeliveredRecord(Place("general", str(n)), make_trace(f"r{n}")) for n in range(40)]
    setup.intake.gather(setup.learner, 60.0, slept.append)
    assert setup.learner.counters.records == 40
    setup.intake.gather(setup.learner, 60.0, slept.append)
    assert slept[0] < 60.0 < slept[1] + 30.0


def test_learner_starts_with_the_weights_of_the_version():
    settings, weights = Settings(growth=BestFirstSettings()), Toy().weights()
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    version = SimpleNamespace(config=None, weights=weights)
    learner = context.learner(version, settings, empty_replay(settings.trainer), None)
    assert learner.gate.depth == settings.growth.lookahead
    assert all(value.equal(weights[name]) for name, value in learner.distiller.drafter.weights().items())
