"""Replicas that recall, with a real Redis: what one forgets, all of them and their snapshots forget."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from osd.capture.purge import Member, Purges
from osd.capture.streams import stream_of
from osd.capture.trace import Array
from osd.capture.writer import RecallWriter
from osd.config import Settings
from osd.drafting.recall.snapshot import Snapshots
from osd.recall.memory import KEPT
from osd.target.identity import identify
from serving.replica import recall_keeper
from serving.replica.recall_keeper import RecallKeeper
from tests.command import here
from tests.replicas import PROMPT, Replicas, decode
from tests.traces import small_trace
from tests.waiting import HANG_SECONDS


@pytest.fixture
def settings(tiny_target, tmp_path):
    return Settings(
        home=tmp_path,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "recall", "recall": {"megabytes": 1}},
        growth={"kind": "best_first", "governed": False},
        engine={"slots": 2, "context": 256, "threads": 1, "max_draft": 24},
        serving={"replicas": 2},
    )


@pytest.fixture
def look_again(monkeypatch, eventually):
    """Wait until every replica that runs has looked at Redis once more from beginning to end."""
    counts, look = Counter(), RecallKeeper.look

    def counted(keeper):
        look(keeper)
        counts[keeper] += 1

    monkeypatch.setattr(RecallKeeper, "look", counted)

    def wait():
        wanted = {keeper: count + 2 for keeper, count in counts.items()}  # one look may be under way
        eventually(lambda: all(counts[keeper] >= count for keeper, count in wanted.items()))

    return wait


@pytest.fixture
def replicas(settings, redis_url, monkeypatch):
    monkeypatch.setattr(recall_keeper, "_POLL_SECONDS", 0.05)
    with Replicas(settings, redis_url) as replicas:
        yield replicas


def end(replicas, redis_client, name):
    """End a replica and let the five seconds pass in which purges still wait for it."""
    replicas.end(name)
    redis_client.delete(f"osd:replica:{name}")


def used(replica, domain="general"):
    return sum(table.used() for table in replica.engine.pool.memories(domain).tables)


def contents(replica):
    return replica.engine.pool.memories("general").of("").contents()


def purge(settings, redis_url, request):
    result = here("traces", "purge", "--request", request, home=settings.home, redis_url=redis_url)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_purged_request_is_forgotten_by_every_replica_and_by_the_snapshot(
    replicas, settings, redis_url, redis_client, eventually
):
    told = stream_of(settings.recalled.stream, "general")
    one, other = replicas.start("one"), replicas.start("other")
    decode(one, "chatcmpl-1f-0")()
    decode(other, "chatcmpl-1f-1", PROMPT[::-1])()
    assert used(one)
    assert used(other)
    end(replicas, redis_client, "other")
    assert Snapshots(settings.registry_dir).about("general") is not None
    other = replicas.start("other again")
    assert used(other)
    eventually(lambda: redis_client.xlen(told) == 2)
    said = purge(settings, redis_url, "chatcmpl-1f")
    assert redis_client.xlen(told) == 0
    assert re.search(r"[1-9]\d* entries that may contain it removed from recall", said)
    assert used(one) == used(other) == 0
    assert used(replicas.start("new")) == 0, "it starts with the snapshot"


def test_a_request_that_is_purged_while_it_is_decoded_is_forgotten_when_it_has_ended(
    replicas, settings, redis_url, eventually
):
    one, begun, go_on = replicas.start("one"), threading.Event(), threading.Event()

    def told(update):
        begun.set()
        go_on.wait(HANG_SECONDS)

    wait = decode(one, "chatcmpl-1f-0", tokens=100, told=told)
    assert begun.wait(HANG_SECONDS)
    purge(settings, redis_url, "chatcmpl-1f")
    go_on.set()
    wait()
    eventually(lambda: used(one) == 0)


def test_a_replica_drafts_what_another_said(replicas, eventually):
    one, other = replicas.start("one"), replicas.start("other")
    decode(one, "chatcmpl-1f-0")()
    first = one.engine.counters().speculation().accepted
    eventually(lambda: used(other) > 0)
    decode(other, "chatcmpl-2e-0")()
    second = other.engine.counters().speculation()
    assert second.accepted > first
    assert second.by_source["recall"].accepted > 0


def test_replica_does_not_learn_its_own_requests_again(replicas, look_again, eventually):
    one, other = replicas.start("one"), replicas.start("other")
    decode(one, "chatcmpl-1f-0")()
    before = contents(one)
    eventually(lambda: used(other) > 0)
    look_again()
    after = contents(one)
    assert torch.equal(before.entries, after.entries)
    assert torch.equal(before.weights, after.weights)


def written(settings, name, prompt, **changed):
    """The trace of a request for five tokens, 1 to 5."""
    drawn = np.arange(1, 6, dtype=np.int32)
    fields = {
        "request_id": name,
        "target": identify(settings.target.source, Path(settings.target.source)).label,
        "created": time.time(),
        "prompt_ids": Array.of(np.array(prompt, np.int32)),
        "completion_ids": Array.of(drawn),
        "target_ids": Array.of(drawn[:, None]),
        "target_logp": Array.of(np.full((5, 1), np.log(0.9), np.float16)),
        "target_tail": Array.of(np.full(5, np.log(0.1), np.float16)),
        "draft_ids": Array.of(np.full((5, 1), -1, np.int32)),
        "draft_logp": Array.of(np.zeros((5, 1), np.float16)),
        "draft_tail": Array.of(np.zeros(5, np.float16)),
        "drafted": Array.of(np.full(5, -1, np.int32)),
        "verdict": Array.of(np.zeros(5, np.uint8)),
        "source": Array.of(np.full(5, -1, np.int8)),
        "hidden": None,
    }
    return small_trace(**{**fields, **changed})


def knows(replica, prompt):
    pool = replica.engine.pool
    text = pool.memories("general").backend.text(16)
    text.append(prompt, certain=False)
    return pool.memories("general").of("").says(text, 1)[0] == [1]


def test_what_may_not_be_learnt_of_others_is_not(replicas, settings, redis_url, eventually, ends):
    capture = settings.capture.model_copy(update={"keep_days": 1.0})
    one = replicas.start("one", capture=capture)
    with Purges(redis_url) as purges:
        purges.ask("chatcmpl-1f")
        eventually(lambda: Member("replica", "one") in purges.answers("chatcmpl-1f"))
    writer = ends.enter_context(closing(RecallWriter(redis_url, settings.recalled, "two", KEPT)))
    refused = [
        written(settings, "chatcmpl-1f-0", [10, 11]),
        written(settings, "of yesterday", [12, 13], created=time.time() - 90_000),
        written(settings, "of another target", [14, 15], target="another"),
        written(settings, "of another domain", [16, 17], drafter_domain="code"),
        written(settings, "of a tenant", [26, 27], domain="acme.general"),
        written(settings, "of no token", [18, 19], target_ids=Array.of(np.full((5, 1), -1, np.int32))),
        written(settings, "of too many tokens", [20, 21] * 150),
        written(settings, "of another vocabulary", [22, 23, 300]),
    ]
    for trace in [*refused, written(settings, "the last one", [24, 25])]:
        assert writer.offer(trace)
    eventually(lambda: knows(one, [24, 25]))
    assert [knows(one, trace.prompt_ids.numpy().tolist()[:2]) for trace in refused] == [False] * len(refused)


def test_replica_that_is_alone_or_keeps_clients_apart_learns_from_no_other(
    replicas, settings, redis_url, look_again, eventually, ends
):
    alone = replicas.start("alone", serving=settings.serving.model_copy(update={"replicas": 1}))
    recall = settings.drafter.recall.model_copy(update={"shared": False})
    apart = replicas.start("apart", drafter=settings.drafter.model_copy(update={"recall": recall}))
    listens = replicas.start("listens")
    writer = ends.enter_context(closing(RecallWriter(redis_url, settings.recalled, "two", KEPT)))
    assert writer.offer(written(settings, "r", [24, 25]))
    eventually(lambda: knows(listens, [24, 25]))
    look_again()
    assert not knows(alone, [24, 25])
    assert not knows(apart, [24, 25])


def test_request_purged_while_no_replica_runs_is_gone_from_the_snapshot(replicas, settings, redis_url, redis_client):
    decode(replicas.start("one"), "chatcmpl-1f-0")()
    end(replicas, redis_client, "one")
    assert Snapshots(settings.registry_dir).about("general") is not None
    purge(settings, redis_url, "chatcmpl-1f")
    assert used(replicas.start("two")) == 0
