"""``osd traces purge`` while a trainer runs."""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing, contextmanager

import pytest
from redis.exceptions import DataError

from osd.admin import purging
from osd.capture.purge import Member, PurgeFollower, Purges, RemovedData
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from tests.command import purge as purge_request
from tests.unit.learning.toys import make_trace
from tests.waiting import HANG_SECONDS, background
from trainer import checkpoint
from trainer.budget import TrainingBudget


def purge(loop, request, codes=(0,)):
    return purge_request(request, loop.settings.home, loop.url, codes)


def test_purge_answers_name_the_members_that_gave_them(redis_url, redis_client):
    with Purges(redis_url) as purges:
        trainer, replica = Member("trainer", "acme.code"), Member("replica", "host:8000")
        for member in (trainer, replica):
            purges.alive(member)
        assert purges.members().keys() == {trainer, replica}
        redis_client.pexpire("osd:trainer:acme.code", 86_400_000 - 42_000)
        assert (purges.silence(trainer) or 0) >= 42
        assert purges.silence(Member("trainer", "sql")) is None
        purges.add("a")
        purges.answer("a", trainer, RemovedData(records=2, learnt=True))
        purges.answer("a", replica, RemovedData(entries=3))
        assert purges.answers("a") == {trainer: RemovedData(2, True), replica: RemovedData(entries=3)}
        for key, limit in (("osd:purged:a", 86_400_000), ("osd:replica:host:8000", 86_400_000)):
            assert 0 < redis_client.pttl(key) <= limit
        redis_client.hset("osd:purged:a", "stranger:b", b"{}")
        with pytest.raises(DataError, match="stranger:b is no trainer and no replica"):
            purges.answers("a")


def test_purged_request_is_refused_for_a_day(redis_url, redis_client):
    with Purges(redis_url) as purges:
        now = time.time()
        month = 30 * 86_400
        redis_client.zadd("osd:purges", {"gone": now - month - 1, "old": now - 86_401, "recent": now - 86_000})
        assert set(purges.requests()) == {"recent"}
        purges.add("new")
        assert redis_client.zrange("osd:purges", 0, -1) == [b"old", b"recent", b"new"]


def test_first_update_forgets_all_purges_of_a_month(redis_url, redis_client):
    redis_client.zadd("osd:purges", {"old": time.time() - 20 * 86_400, "recent": time.time() - 100})
    forgotten = []
    follower = PurgeFollower(Purges(redis_url), Member("replica", "r1"), lambda name, at: forgotten.append(name))
    with closing(follower):
        follower.update()
        assert forgotten == ["old", "recent"]
        follower.update()
        assert forgotten == ["old", "recent"]
        assert follower.requests.keys() == {"recent"}
        assert not follower.has_new_requests()


def test_old_purge_is_tried_again_after_an_error(redis_url, redis_client):
    redis_client.zadd("osd:purges", {"old": time.time() - 20 * 86_400})
    member, tries = Member("replica", "r1"), []

    def forget(name, at):
        tries.append(name)
        if len(tries) == 1:
            raise OSError("the disk is full")
        return RemovedData()

    with Purges(redis_url) as purges, closing(PurgeFollower(Purges(redis_url), member, forget)) as follower:
        follower.update()
        assert follower.updated == 0
        follower.update()
        assert purges.answers("old").keys() == {member}
        assert follower.updated > 0


def test_member_answers_after_it_has_forgotten(redis_url, caplog):
    member, is_full = Member("replica", "r1"), True

    def forget(name, at):
        if name == "a" and is_full:
            raise OSError("the disk is full")
        return RemovedData(entries=1)

    with Purges(redis_url) as purges, closing(PurgeFollower(Purges(redis_url), member, forget)) as follower:
        for request in ("a", "b"):
            purges.add(request)
        for _ in range(2):
            follower.update()
        assert (purges.answers("a").keys(), purges.answers("b").keys()) == (set(), {member})
        assert [record.message for record in caplog.records] == [
            "a purged request cannot be removed yet, trying again: the disk is full"
        ]
        assert follower.requests.keys() == {"a", "b"}, "later records of both are refused"
        is_full = False
        follower.update()
        assert purges.answers("a").keys() == {member}


def test_member_that_ends_is_no_member_any_more(redis_url):
    with Purges(redis_url) as purges:
        follower = PurgeFollower(Purges(redis_url), Member("replica", "r1"), lambda name, at: RemovedData())
        follower.alive()
        assert purges.members().keys() == {("replica", "r1")}
        follower.close()
        assert purges.members() == {}


def memory(worker):
    return {request for request, _ in worker.intake.replay.record_keys()}


@contextmanager
def serving(loop):
    """Report a replica with waiting requests during the context."""
    over = threading.Event()

    def serve():
        while not over.wait(0.05):
            loads.report("replica", ReplicaLoad(3, 5, 4, 100.0, 20.0))

    with ReplicaLoads(loop.url) as loads, background(serve, over.set):
        yield


def test_purge_removes_a_request_and_names_its_versions(make_loop, eventually, redis_client):
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    name = next(iter(worker.intake.replay.record_keys("train")))[0]
    before = redis_client.xlen("osd:traces:domain:general")
    output = purge(loop, name)
    assert f"{name}: 1 record removed from the streams, 1 from the memory of trainers" in output
    assert "versions of general that have learned from it: 2" in output
    assert redis_client.xlen("osd:traces:domain:general") == before - 1
    assert name not in memory(worker)
    loop.writer.offer(make_trace(name))
    loop.send(3)
    eventually(lambda: worker.status()["records"] == 43)
    assert name not in memory(worker)


def test_purge_of_a_held_out_request_names_no_version(make_loop, eventually):
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    name = next(iter(worker.intake.replay.record_keys("held_out")))[0]
    output = purge(loop, name)
    assert "no version has learned from it" in output
    assert name not in memory(worker)


def training(make_loop, eventually):
    """Return a loop with a running trainer, and the trainer."""
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin()
    eventually(lambda: worker.status()["steps"] > 3)
    return loop, worker


def test_paused_trainer_forgets_a_purged_request(make_loop, eventually):
    loop, worker = training(make_loop, eventually)
    assert worker.pause()
    name = next(iter(worker.intake.replay.record_keys("train")))[0]
    purge(loop, name)
    assert name not in memory(worker)
    assert worker.intake.recalled.forget(name) == 0, "the n-gram cache of the trainer forgot the request too"


def test_yielding_trainer_forgets_a_purged_request(make_loop, eventually, monkeypatch):
    monkeypatch.setattr(purging, "ALIVE_SECONDS", 1.5)
    loop, worker = training(make_loop, eventually)
    with serving(loop):
        eventually(lambda: worker.status()["state"] == "yielding")
        time.sleep(1.8)  # longer than the validity of a heartbeat
        for _ in range(2):
            name = next(iter(worker.intake.replay.record_keys("train")))[0]
            purge(loop, name)
            assert name not in memory(worker)
            assert worker.pause()


def test_trainer_yielding_in_a_micro_step_forgets_a_request(make_loop, eventually, monkeypatch):
    """The patched budget lets micro-steps start under load, so that the trainer yields inside a micro-step."""

    def begin(spare, idle, patience=0.0):
        idle()
        return not spare.ended.is_set()

    monkeypatch.setattr(TrainingBudget, "wait", begin)
    loop, worker = training(make_loop, eventually)
    with serving(loop):
        eventually(lambda: worker.status()["state"] == "yielding")
        name = next(iter(worker.intake.replay.record_keys("train")))[0]
        purge(loop, name)
        assert name not in memory(worker)


def test_request_purged_without_a_trainer_is_never_trained_on(make_loop, eventually):
    loop = make_loop(steps_per_candidate=10_000)
    loop.first_version()
    loop.send(20)
    purge(loop, "request-3")
    loop.writer.offer(make_trace("request-3"))
    worker = loop.start()
    eventually(lambda: worker.status()["records"] == 19)
    assert "request-3" not in memory(worker)


def test_purge_of_an_unknown_request_is_an_error(make_loop):
    loop = make_loop()
    loop.first_version()
    assert "there is no request chatcmpl-unknown in a stream, in a trainer's memory" in purge(
        loop, "chatcmpl-unknown", codes=(2,)
    )


@pytest.fixture
def silent_loop(make_loop):
    """Loop with one record and no trainer, in which the replica ``r1`` sent its last heartbeat."""
    loop = make_loop()
    loop.first_version()
    loop.send(1)
    with Purges(loop.url) as members:
        members.alive(Member("replica", "r1"))
    return loop


def test_purge_names_members_that_do_not_answer(silent_loop, monkeypatch):
    monkeypatch.setattr(purging, "ANSWER_SECONDS", 0.2)
    with Purges(silent_loop.url) as members:
        members.alive(Member("trainer", "elsewhere"))
    assert "the replica r1 and the trainer elsewhere did not answer" in purge(silent_loop, "request-0", codes=(1,))


def test_purge_names_a_replica_that_hangs_during_it(silent_loop, monkeypatch):
    monkeypatch.setattr(purging, "ALIVE_SECONDS", 0.5)
    monkeypatch.setattr(purging, "ANSWER_SECONDS", 1.5)
    assert "the replica r1 did not answer" in purge(silent_loop, "request-0", codes=(1,))


def test_purge_names_a_replica_that_vanished_before_it(silent_loop, monkeypatch):
    monkeypatch.setattr(purging, "ALIVE_SECONDS", 0.0)
    monkeypatch.setattr(purging, "HEARTBEAT_SECONDS", 0.2)
    absence = "the replica r1 is absent and has not answered"
    assert f"{absence}; it forgets the request when it returns" in purge(silent_loop, "request-0")
    assert absence in purge(silent_loop, "request-unknown", codes=(2,))


def test_member_is_absent_after_a_backward_clock_jump(silent_loop, redis_client, monkeypatch):
    monkeypatch.setattr(purging, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(purging, "HEARTBEAT_SECONDS", 0.2)
    replica = Member("replica", "r1")
    redis_client.pexpire("osd:replica:r1", 86_400_000 + 3_600_000)  # as after a jump of an hour
    with Purges(silent_loop.url) as purges:
        assert purges.members() == {replica: math.inf}
        assert purges.silence(replica) is None
        assert "the replica r1 is absent and has not answered" in purge(silent_loop, "request-0")
        purges.alive(replica)
        assert 0 <= purges.members()[replica] < HANG_SECONDS


@pytest.mark.parametrize("jump", [3_600_000, -3_600_000], ids=["forwards", "backwards"])
def test_purge_waits_for_the_heartbeat_after_a_clock_jump(silent_loop, redis_client, jump):
    member, over = Member("replica", "r1"), threading.Event()

    def live():
        follower = PurgeFollower(Purges(silent_loop.url), member, lambda name, at: RemovedData(entries=7))
        with closing(follower):
            follower.alive()
            redis_client.pexpire("osd:replica:r1", 86_400_000 - jump)  # as after a jump of an hour
            begun.set()
            while not over.wait(1.0):
                follower.alive()
                follower.update()

    begun = threading.Event()
    with background(live, over.set):
        begun.wait()
        output = purge(silent_loop, "request-unknown")
    assert "absent" not in output
    assert "7 entries that may contain it" in output
    assert "no record of request-unknown was found: check the id" in output


def test_request_can_be_purged_again(make_loop, eventually, monkeypatch):
    monkeypatch.setattr(purging, "ANSWER_SECONDS", 5.0)
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin(20)
    eventually(lambda: worker.status()["records"] == 20)
    for _ in range(2):
        purge(loop, "request-3", codes=(0, 2))
        loop.writer.offer(make_trace("request-3"))
    assert "did not answer" not in purge(loop, "request-3", codes=(0, 2))


def test_checkpoint_holds_weights_and_no_requests(make_loop, eventually):
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin(20)
    eventually(lambda: worker.status()["steps"] > 5)
    loop.stop()
    tensors, state = checkpoint.load(loop.settings.home_dir / "trainer" / "general.safetensors") or ({}, {})
    assert all(name.startswith(("drafter.", "optimizer.")) for name in tensors)
    assert "request-" not in str(state)
