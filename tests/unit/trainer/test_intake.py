"""Which records of the stream are learned from, which are done with at once, and which are forgotten."""

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
from osd.learning.online import Local, empty_replay
from osd.registry.lease import Lease
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Version
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace
from trainer import intake as module
from trainer.executor import TargetContext
from trainer.intake import Intake
from trainer.reporter import CostMeter, TrainingReporter
from trainer.rollout import Service


class Stream:
    """Delivers the records of ``sent``, each at the place of its number, and remembers which were acknowledged."""

    def __init__(self):
        self.sent, self.acknowledged, self.purged, self.answers = [], [], {}, []

    def read(self, count, wait_ms):
        taken, self.sent = self.sent[:count], self.sent[count:]
        return taken

    def ack(self, places):
        self.acknowledged += [place.id for place in places]

    def waiting(self):
        return Waiting(3, time.time())

    def sweep(self):
        pass

    def alive(self, member):
        pass

    def requests(self):
        return dict(self.purged)

    def answer(self, request, member, removed):
        self.answers.append((request, removed))


class Scene:
    """An intake that reads from a stream in memory, and its learner."""

    def __init__(self, monkeypatch, tmp_path, **trainer):
        self.stream, self.observed, self.number = Stream(), [], 0
        monkeypatch.setattr(module, "TraceReader", lambda *arguments, **keywords: self.stream)
        monkeypatch.setattr(module, "PurgeFollower", lambda purges, *rest: PurgeFollower(self.stream, *rest))
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
        settings = Settings(home=tmp_path, target={"source": "toy"}, trainer={"held_out": 0.3, **trainer})  # type: ignore[arg-type]
        service = Service("general", None, None, None, Lease(PointerFiles(tmp_path), "general"))
        self.reporter = TrainingReporter(service, CostMeter(lambda: 0.0), None)
        context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
        self.it = Intake(
            settings, "redis://127.0.0.1:1", context, self.reporter,
            lambda trace, learner: self.observed.append(trace.request_id),
        )  # fmt: skip
        self.learner = context.learner(Version(1, Toy().weights(), Toy().config(), {}), settings, self.it.replay, None)

    def send(self, *traces):
        """Deliver some records; returns what is acknowledged of all so far, if a checkpoint were written now."""
        for trace in traces:
            self.number += 1
            self.stream.sent.append(DeliveredRecord(Place("general", str(self.number)), trace))
        while self.it.read(self.learner):
            pass
        self.it.acknowledge()
        return self.stream.acknowledged


@pytest.fixture
def scene(monkeypatch, tmp_path):
    return lambda **trainer: Scene(monkeypatch, tmp_path, **trainer)


def change(**changes):
    return msgspec.structs.replace(make_trace("odd"), **changes)


NAN = Array.of(np.full((8, VOCABULARY), np.nan, np.float16))


@pytest.mark.parametrize(
    ("trace", "settings", "refused", "observed"),
    [
        (make_trace("odd", target="another"), {}, 1, []),
        (make_trace("odd", hidden=False), {}, 1, []),
        (change(target_logp=NAN), {}, 1, []),
        (change(states_weight=0.0, hidden=None), {}, 0, ["odd"]),
        (make_trace("odd", domain="elsewhere"), {}, 0, []),
        (make_trace("odd", domain="acme.general"), {"domains": "all"}, 0, []),
        (change(created=time.time() - 90_000), {"replay_days": 1.0}, 0, []),
    ],
)
def test_record_that_nobody_can_learn_from_is_done_with_at_once(scene, trace, settings, refused, observed):
    it, heard = scene(**settings), []
    it.learner.overheard = lambda trace: heard.append(trace.request_id)
    assert it.send(trace) == ["1"]
    assert (it.reporter.state.refused, it.observed, it.learner.counters.records) == (refused, observed, 0)
    assert heard == observed, "recall learns from a record without states"


def test_record_is_done_with_once_it_was_trained_on_or_held_out(scene):
    it = scene(domains="all", replay_days=1.0)
    young = [change(request_id=f"r{n}", created=time.time(), domain="code") for n in range(9)]
    done = it.send(*young, *young)
    held = {request for request, _ in it.it.replay.known("held_out")}
    trained = [n for n in range(9) if f"r{n}" not in held]
    assert 0 < len(held) < 9
    assert {int(place) for place in done} == {n + 1 + again for n in range(9) for again in (0, 9) if n not in trained}
    assert it.observed == [trace.request_id for trace in young], "a record that comes again is no evidence"
    fresh, late = it.learner.step(10**6, Local()).fresh, len(done)
    it.it.finish(fresh)
    assert it.it.finished == 2 * len(trained)
    assert len(it.send(young[trained[0]])) == late + 2 * len(trained) + 1
    assert (it.reporter.state.lag, it.reporter.state.refused) == (3, 0)


def test_purged_request_is_forgotten_and_refused_while_it_is_on_the_list(scene):
    it = scene(held_out=0.01)
    it.send(make_trace("d"), make_trace("b"))
    assert not it.it.wanted()
    it.stream.purged = {"d": 5.0}
    assert it.it.wanted()
    assert it.it.replay.known() == [("d", 0), ("b", 0)]
    it.it.look()
    assert it.send(make_trace("d", segment=1)) == ["1", "3"]
    assert it.it.replay.known() == [("b", 0)]
    it.reporter.learnt.add(["b"])
    it.stream.purged["b"] = 6.0
    it.it.look()
    assert it.stream.answers == [("d", RemovedData(1, False)), ("b", RemovedData(1, True))]
    it.stream.purged.clear()
    it.it.look()
    assert it.send(make_trace("d")) == ["1", "3", "2"]
    assert it.it.replay.known() == [("d", 0)]


def test_record_that_leaves_for_want_of_room_or_of_age_is_done_with(scene, monkeypatch):
    it = scene(held_out=0.01, anchors=0.0, replay_days=1.0)
    monkeypatch.setattr(module, "_EXPIRE_SECONDS", 0.0)
    now = time.time()
    young = [change(request_id=f"r{n}", created=now, prompt_ids=Array.of(np.zeros(900, np.int32))) for n in range(3)]
    young = [msgspec.structs.replace(trace, hidden=make_trace(prompt=900).hidden) for trace in young]
    assert it.send(*young[:2]) == []
    it.it.resize(1024, 1)
    assert it.send() == ["1"]
    assert it.send(young[2]) == ["1", "2"]
    monkeypatch.setattr(module.time, "time", lambda: now + 90_000)
    assert it.send() == ["1", "2", "3"]
    assert it.it.replay.known() == []


def test_record_stands_for_those_whose_states_were_left_out(scene):
    it = scene()
    it.send(change(states_weight=5.0, weight=2.0))
    assert [trace.weight for trace in (*it.it.replay.held_out(100), *it.it.replay.sample(100).traces)] == [10.0]


def test_missing_says_what_training_waits_for(scene):
    it = scene(held_out=0.01, min_records=2)
    it.send(make_trace("d"), make_trace("b", target="another"))
    assert it.it.missing(it.learner) == "1 of 2 records to begin with, 1 were refused"
    it.send(make_trace("b"))
    assert it.it.missing(it.learner) == ""
    it.it.finish(it.learner.step(100, Local()).fresh)
    it.learner.trigger.resumed()
    assert it.it.missing(it.learner) == "every record was trained on often enough, waiting for new ones"


def test_gather_sleeps_for_the_rest_of_the_time_and_reads_all(scene):
    it, slept = scene(), []
    it.send()
    it.stream.sent = [DeliveredRecord(Place("general", str(n)), make_trace(f"r{n}")) for n in range(40)]
    it.it.gather(it.learner, 60.0, slept.append)
    assert it.learner.counters.records == 40
    it.it.gather(it.learner, 60.0, slept.append)
    assert slept[0] < 60.0 < slept[1] + 30.0


def test_a_learner_begins_with_the_weights_of_the_version_and_the_gate_of_the_service():
    settings, weights = Settings(growth=BestFirstSettings()), Toy().weights()
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    version = SimpleNamespace(config=None, weights=weights)
    learner = context.learner(version, settings, empty_replay(settings.trainer), None)
    assert learner.gate.depth == settings.growth.lookahead
    assert all(value.equal(weights[name]) for name, value in learner.distiller.drafter.weights().items())
