"""``osd traces purge`` against a trainer at work."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from redis.exceptions import DataError

from osd.admin import forgetting
from osd.capture import purge as purges
from osd.capture.purge import Member, Purges, Removed
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from tests.command import here
from tests.unit.learning.toys import make_trace
from tests.waiting import background
from trainer import checkpoint
from trainer.budget import TrainingBudget


def purge(loop, request, codes=(0,)):
    """Purge a request; what the command says."""
    result = here("traces", "purge", "--request", request, home=loop.settings.home, redis_url=loop.url)
    assert result.exit_code in codes, result.output
    return result.output


def test_purge_answers_name_the_members_that_gave_them(redis_url, redis_client):
    with Purges(redis_url) as purges:
        trainer, replica = Member("trainer", "acme.code"), Member("replica", "host:8000")
        for member in (trainer, replica):
            purges.alive(member)
        assert purges.members() == {trainer, replica}
        purges.ask("a")
        purges.answer("a", trainer, Removed(records=2, learnt=True))
        purges.answer("a", replica, Removed(entries=3))
        assert purges.answers("a") == {trainer: Removed(2, True), replica: Removed(entries=3)}
        for key, most in (("osd:purged:a", 86_400_000), ("osd:replica:host:8000", 5000)):
            assert 0 < redis_client.pttl(key) <= most
        redis_client.hset("osd:purged:a", "stranger:b", b"{}")
        with pytest.raises(DataError, match="stranger:b is no trainer and no replica"):
            purges.answers("a")


def test_purged_request_is_refused_for_a_day(redis_url, redis_client):
    with Purges(redis_url) as purges:
        now = time.time()
        redis_client.zadd("osd:purges", {"old": now - 86_401, "recent": now - 86_000})
        assert set(purges.asked()) == {"recent"}
        purges.ask("new")
        assert redis_client.zrange("osd:purges", 0, -1) == [b"recent", b"new"]


def memory(worker):
    return {request for request, _ in worker.intake.replay.known()}


@contextmanager
def serving(loop):
    """Requests wait in a replica all the time."""
    over = threading.Event()

    def serve():
        while not over.wait(0.05):
            loads.report("replica", ReplicaLoad(3, 5, 4, 100.0, 20.0))

    with ReplicaLoads(loop.url) as loads, background(serve, over.set):
        yield


def test_a_request_is_removed_from_stream_memory_and_what_still_comes_and_its_versions_are_named(
    make_loop, eventually, redis_client
):
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    name = next(iter(worker.intake.replay.known("train")))[0]
    before = redis_client.xlen("osd:traces:domain:general")
    said = purge(loop, name)
    assert f"{name}: 1 records removed from the streams, 1 from the memory of trainers" in said
    assert "versions of general that have learnt from it: 2" in said
    assert redis_client.xlen("osd:traces:domain:general") == before - 1
    assert name not in memory(worker)
    loop.writer.offer(make_trace(name))
    loop.send(3)
    eventually(lambda: worker.status()["records"] == 43)
    assert name not in memory(worker)


def test_a_held_out_request_is_forgotten_and_no_version_has_learnt_from_it(make_loop, eventually):
    loop = make_loop()
    worker = loop.begin()
    eventually(lambda: worker.status()["published"] >= 1)
    name = next(iter(worker.intake.replay.known("held_out")))[0]
    said = purge(loop, name)
    assert "no version has learnt from it" in said
    assert name not in memory(worker)


def training(make_loop, eventually):
    """A loop whose trainer is at work, and that trainer."""
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin()
    eventually(lambda: worker.status()["steps"] > 3)
    return loop, worker


def test_a_paused_trainer_forgets_too(make_loop, eventually):
    loop, worker = training(make_loop, eventually)
    assert worker.pause()
    name = next(iter(worker.intake.replay.known("train")))[0]
    purge(loop, name)
    assert name not in memory(worker)
    assert worker.intake.recalled.forget(name) == 0, "what it recalls was forgotten with the records"


def test_a_trainer_that_stands_back_for_serving_forgets_too(make_loop, eventually, monkeypatch):
    monkeypatch.setattr(purges, "ALIVE_MS", 1500)
    loop, worker = training(make_loop, eventually)
    with serving(loop):
        eventually(lambda: worker.status()["state"] == "yielding")
        time.sleep(1.8)  # longer than a sign of life holds
        for _ in range(2):
            name = next(iter(worker.intake.replay.known("train")))[0]
            purge(loop, name)
            assert name not in memory(worker)
            assert worker.pause()


def test_a_trainer_that_stands_back_in_the_midst_of_a_micro_step_ends_it_to_forget(make_loop, eventually, monkeypatch):
    """It begins micro-steps whatever is served, so that it stands back within one."""

    def begin(spare, idle, patience=0.0):
        idle()
        return not spare.over.is_set()

    monkeypatch.setattr(TrainingBudget, "wait", begin)
    loop, worker = training(make_loop, eventually)
    with serving(loop):
        eventually(lambda: worker.status()["state"] == "yielding")
        name = next(iter(worker.intake.replay.known("train")))[0]
        purge(loop, name)
        assert name not in memory(worker)


def test_what_was_purged_while_no_trainer_ran_is_never_learnt_from(make_loop, eventually):
    loop = make_loop(steps_per_candidate=10_000)
    loop.first_version()
    loop.send(20)
    purge(loop, "request-3")
    loop.writer.offer(make_trace("request-3"))
    worker = loop.start()
    eventually(lambda: worker.status()["records"] == 19)
    assert "request-3" not in memory(worker)


def test_a_request_that_nobody_knows_is_an_error_that_says_so(make_loop, eventually):
    loop = make_loop()
    loop.first_version()
    assert "there is no request chatcmpl-unknown in a stream, in a trainer's memory" in purge(
        loop, "chatcmpl-unknown", codes=(2,)
    )


def test_a_trainer_that_does_not_answer_is_named(make_loop, monkeypatch):
    monkeypatch.setattr(forgetting, "ANSWER_SECONDS", 0.2)
    loop = make_loop()
    loop.first_version()
    loop.send(1)
    with Purges(loop.url) as elsewhere:
        elsewhere.alive(Member("trainer", "elsewhere"))
        elsewhere.alive(Member("replica", "r1"))
    assert "the replica r1 and the trainer elsewhere did not answer" in purge(loop, "request-0", codes=(2,))


def test_a_request_can_be_purged_again(make_loop, eventually, monkeypatch):
    monkeypatch.setattr(forgetting, "ANSWER_SECONDS", 5.0)
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin(20)
    eventually(lambda: worker.status()["records"] == 20)
    for _ in range(2):
        purge(loop, "request-3", codes=(0, 2))
        loop.writer.offer(make_trace("request-3"))
    assert "did not answer" not in purge(loop, "request-3", codes=(0, 2))


def test_a_checkpoint_holds_weights_and_no_record_of_any_request(make_loop, eventually):
    loop = make_loop(steps_per_candidate=10_000)
    worker = loop.begin(20)
    eventually(lambda: worker.status()["steps"] > 5)
    loop.stop()
    tensors, state = checkpoint.load(loop.settings.home_dir / "trainer" / "general.safetensors") or ({}, {})
    assert all(name.startswith(("drafter.", "optimizer.")) for name in tensors)
    assert "request-" not in str(state)
