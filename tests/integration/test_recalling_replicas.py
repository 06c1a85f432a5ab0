"""Recall tables of several replicas with a real Redis: sharing and purging."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from osd.capture.purge import Purges
from osd.capture.streams import stream_of
from osd.capture.trace import FIELD, Array
from osd.capture.trace import decode as decode_trace
from osd.capture.writer import RecallWriter
from osd.config import NoDrafterSettings
from osd.drafting.recall.snapshot import Snapshots
from osd.recall.backends import backend
from osd.recall.memory import KEPT, Observation, mark_of
from osd.target.identity import identify
from serving.replica import recall_keeper
from serving.replica.recall_keeper import RecallKeeper
from serving.served_model import TextTooLongError
from tests.command import purge
from tests.replicas import PROMPT, Replicas, blocked_request, decode, recall_settings
from tests.tiny import tokenizer
from tests.traces import small_trace


@pytest.fixture
def settings(tiny_target, tmp_path):
    return recall_settings(tiny_target, tmp_path, serving={"replicas": 2})


@pytest.fixture
def await_updates(monkeypatch, eventually):
    """Function that waits until every running replica has completed another update of its tables."""
    counts, update = Counter(), RecallKeeper.update

    def count_update(keeper):
        update(keeper)
        counts[keeper] += 1

    monkeypatch.setattr(RecallKeeper, "update", count_update)

    def wait():
        targets = {keeper: count + 2 for keeper, count in counts.items()}  # an update may be running now
        eventually(lambda: all(counts[keeper] >= count for keeper, count in targets.items()))

    return wait


@pytest.fixture
def replicas(settings, redis_url, monkeypatch):
    monkeypatch.setattr(recall_keeper, "_POLL_SECONDS", 0.05)
    with Replicas(settings, redis_url) as replicas:
        yield replicas


def used(replica, domain="general"):
    return sum(table.used() for table in replica.engine.pool.memories(domain).tables)


def contents(replica):
    return replica.engine.pool.memories("general").of("").contents()


@pytest.fixture
def add_purge(redis_url, eventually):
    """Function that adds a purge without the command, waits for answers, and returns the time of the purge."""

    def add_purge(request):
        with Purges(redis_url) as purges:
            purges.add(request)
            eventually(lambda: purges.answers(request))
            return purges.requests()[request]

    return add_purge


def test_purge_clears_replicas_and_snapshots(replicas, settings, redis_url, redis_client, eventually):
    stream = stream_of(settings.recalled.stream, "general")
    first, second = replicas.start("first"), replicas.start("second")
    decode(first, "chatcmpl-1f-0")()
    decode(second, "chatcmpl-1f-1", PROMPT[::-1])()
    assert used(first)
    assert used(second)
    replicas.end("second")
    assert Snapshots(settings.registry_dir).about("general") is not None
    second = replicas.start("second again")
    assert used(second)
    eventually(lambda: redis_client.xlen(stream) == 2)
    output = purge("chatcmpl-1f", settings.home, redis_url)
    assert redis_client.xlen(stream) == 0
    assert re.search(r"[1-9]\d* entries that may contain it removed from recall", output)
    assert used(first) == used(second) == 0
    assert used(replicas.start("new")) == 0, "it starts from the snapshot"


def entries_on_disk(settings, domain):
    """Return the number of entries in the latest snapshot of a domain."""
    snapshots, target = Snapshots(settings.registry_dir), settings.target.source
    about = snapshots.about(domain)
    table = backend().memory(about.entries)
    assert snapshots.restore(domain, table, identify(target, Path(target))) is not None
    return table.used()


def test_purge_reaches_all_snapshots_of_another_node(
    replicas, settings, redis_url, tmp_path_factory, await_updates, eventually
):
    """The table of the purged request has given way to a table of another tenant."""
    node = settings.model_copy(update={"home": tmp_path_factory.mktemp("node")})
    engine = settings.engine.model_copy(update={"domains": 1})
    other = replicas.start("other", home=node.home, engine=engine)
    decode(other, "chatcmpl-1f-0", domain=None, tenant="acme")()
    await_updates()
    decode(other, "chatcmpl-2e-0", PROMPT[::-1], domain=None, tenant="beta")()
    await_updates()
    assert "acme.general" not in other.engine.pool.all_memories()
    assert entries_on_disk(node, "acme.general") > 0
    output = purge("chatcmpl-1f", settings.home, redis_url)
    assert re.search(r"[1-9]\d* entries that may contain it removed from recall", output)
    assert entries_on_disk(node, "acme.general") == 0


def test_restored_table_is_purged(replicas, settings, add_purge, eventually, monkeypatch):
    """Another replica writes the snapshot after the purge, and has not applied the purge."""
    monkeypatch.setattr(recall_keeper, "_SAVE_SECONDS", 0.01)
    first = replicas.start("first")
    table = first.engine.pool.memories("general").backend.memory(first.engine.pool.memories("general").of("").entries)
    text = first.engine.pool.memories("general").backend.text(64)
    text.append([100, 101, 102, 103], certain=True)
    observation = Observation([], [], torch.tensor([[1, 2]]), torch.tensor([[-0.1, -3.0]]), [1])
    table.learn(text, observation, 0.0, mark_of("chatcmpl-1f-0"), int(time.time()))
    add_purge("chatcmpl-1f")
    target = identify(settings.target.source, Path(settings.target.source))
    Snapshots(settings.registry_dir).write("acme.general", table, target)
    decode(first, "chatcmpl-2e-0", tokens=1, capture=False, domain=None, tenant="acme")()
    eventually(lambda: entries_on_disk(settings, "acme.general") == 0)


def test_purge_applies_to_a_node_without_a_replica(replicas, settings, redis_url, tmp_path_factory):
    node = settings.model_copy(update={"home": tmp_path_factory.mktemp("node")})
    decode(replicas.start("first", home=node.home), "chatcmpl-1f-0", domain=None, tenant="acme")()
    replicas.end("first")
    assert entries_on_disk(node, "acme.general") > 0
    purge("chatcmpl-1f", settings.home, redis_url)
    replicas.start("second", home=node.home)
    assert entries_on_disk(node, "acme.general") == 0


def test_snapshot_with_a_running_purged_request_says_so(
    replicas, settings, add_purge, eventually, monkeypatch, tmp_path_factory
):
    """Another node's answer makes the replica write a snapshot after the purge."""
    monkeypatch.setattr(recall_keeper, "_SAVE_SECONDS", 0.01)
    monkeypatch.setattr("osd.drafting.recall.snapshot.CLOCK_MARGIN", 0.0)
    snapshots = Snapshots(settings.registry_dir)
    with blocked_request(replicas.start("first"), "chatcmpl-1f-0"):
        at = add_purge("chatcmpl-1f")
        answered = time.time()
        other = replicas.start("other", home=tmp_path_factory.mktemp("node"))
        decode(other, "chatcmpl-2e-0", PROMPT[::-1])()
        eventually(lambda: (about := snapshots.about("general")) is not None and about.created > answered)
        about = snapshots.about("general")
    assert not about.is_purged(at)


@pytest.mark.parametrize("kind", ["recall", "none"])
def test_purge_of_a_running_request_leaves_no_trace(replicas, add_purge, redis_client, settings, eventually, kind):
    first = replicas.start("first", drafter=settings.drafter if kind == "recall" else NoDrafterSettings())
    with blocked_request(first, "chatcmpl-1f-0"):
        add_purge("chatcmpl-1f")
    decode(first, "chatcmpl-2e-0")()
    streams = [settings.capture.stream, *([settings.recalled.stream] if kind == "recall" else [])]
    for stream in (stream_of(prefix, "general") for prefix in streams):
        (trace,) = eventually(lambda stream=stream: redis_client.xrange(stream))
        assert decode_trace(trace[1][FIELD]).request_id == "chatcmpl-2e-0"


def test_purge_reaches_the_snapshots_of_a_replica_without_a_drafter(replicas, settings, redis_url, tmp_path_factory):
    home = tmp_path_factory.mktemp("node")
    decode(replicas.start("first", home=home), "chatcmpl-1f-0")()
    replicas.end("first")
    replicas.start("second", home=home, drafter=NoDrafterSettings())
    output = purge("chatcmpl-1f", settings.home, redis_url)
    assert re.search(r"[1-9]\d* entries that may contain it removed from recall", output)
    assert entries_on_disk(settings.model_copy(update={"home": home}), "general") == 0


def test_purge_of_a_running_request_takes_effect_at_its_end(replicas, settings, redis_url, eventually):
    first = replicas.start("first")
    with blocked_request(first, "chatcmpl-1f-0"):
        purge("chatcmpl-1f", settings.home, redis_url)
    eventually(lambda: used(first) == 0)


def test_replica_drafts_from_answers_of_another_replica(replicas, eventually):
    first, second = replicas.start("first"), replicas.start("second")
    decode(first, "chatcmpl-1f-0")()
    first = first.engine.counters().speculation().accepted
    eventually(lambda: used(second) > 0)
    decode(second, "chatcmpl-2e-0")()
    second = second.engine.counters().speculation()
    assert second.accepted > first
    assert second.by_source["recall"].accepted > 0


def test_replica_does_not_learn_its_own_requests_again(replicas, await_updates, eventually):
    first, second = replicas.start("first"), replicas.start("second")
    decode(first, "chatcmpl-1f-0")()
    before = contents(first)
    eventually(lambda: used(second) > 0)
    await_updates()
    after = contents(first)
    assert torch.equal(before.entries, after.entries)
    assert torch.equal(before.weights, after.weights)


def trace_of(settings, name, prompt, **changed):
    """Return the trace of a request with five completion tokens, 1 to 5."""
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
    return pool.memories("general").of("").predict(text, 1)[0] == [1]


def test_unsuitable_traces_of_other_replicas_are_skipped(replicas, settings, redis_url, add_purge, eventually, ends):
    capture = settings.capture.model_copy(update={"keep_days": 1.0})
    first = replicas.start("first", capture=capture)
    add_purge("chatcmpl-1f")
    writer = ends.enter_context(closing(RecallWriter(redis_url, settings.recalled, "two", KEPT)))
    refused = [
        trace_of(settings, "chatcmpl-1f-0", [10, 11]),
        trace_of(settings, "of yesterday", [12, 13], created=time.time() - 90_000),
        trace_of(settings, "of another target", [14, 15], target="another"),
        trace_of(settings, "of another domain", [16, 17], drafter_domain="code"),
        trace_of(settings, "of a tenant", [26, 27], domain="acme.general"),
        trace_of(settings, "of no token", [18, 19], target_ids=Array.of(np.full((5, 1), -1, np.int32))),
        trace_of(settings, "of too many tokens", [20, 21] * 150),
        trace_of(settings, "of another vocabulary", [22, 23, 300]),
    ]
    for trace in [*refused, trace_of(settings, "the last first", [24, 25])]:
        assert writer.offer(trace)
    eventually(lambda: knows(first, [24, 25]))
    assert [knows(first, trace.prompt_ids.numpy().tolist()[:2]) for trace in refused] == [False] * len(refused)


def test_recall_is_shared_only_between_clients_and_replicas(
    replicas, settings, redis_url, await_updates, eventually, ends
):
    single = replicas.start("single", serving=settings.serving.model_copy(update={"replicas": 1}))
    recall = settings.drafter.recall.model_copy(update={"shared": False})
    unshared = replicas.start("unshared", drafter=settings.drafter.model_copy(update={"recall": recall}))
    sharing = replicas.start("sharing")
    writer = ends.enter_context(closing(RecallWriter(redis_url, settings.recalled, "two", KEPT)))
    assert writer.offer(trace_of(settings, "r", [24, 25]))
    eventually(lambda: knows(sharing, [24, 25]))
    await_updates()
    assert not knows(single, [24, 25])
    assert not knows(unshared, [24, 25])


def test_purge_without_replicas_clears_the_snapshot(replicas, settings, redis_url, redis_client):
    decode(replicas.start("first"), "chatcmpl-1f-0")()
    replicas.end("first")
    assert Snapshots(settings.registry_dir).about("general") is not None
    purge("chatcmpl-1f", settings.home, redis_url)
    assert used(replicas.start("two")) == 0


def test_replica_refuses_a_long_text_without_its_tokens(replicas):
    replica = replicas.start("one")
    text = "a" * 1_000_000
    with pytest.raises(TextTooLongError) as refused:
        replica.encode(text, False, 1000)
    assert refused.value.tokens == 200_000, "the longest token has five bytes"
    with pytest.raises(TextTooLongError):
        replica.encode_chat([{"role": "user", "content": text}], [], {}, 1000)
    assert len(replica.encode(text[:1001], False, 1000)) == 1001


def test_replica_encodes_as_its_tokenizer_does(replicas):
    replica = replicas.start("one")
    for text in ("", "Größe 你好 🙂\r\n\t\0", "<s>a</s><pad>", "ab " * 5000):
        for special in (False, True):
            assert replica.encode(text, special) == tokenizer()(text, add_special_tokens=special)["input_ids"]


def test_replica_holds_no_memory_of_an_encoded_text(replicas):
    replica = replicas.start("one")
    before = psutil.Process().memory_info().rss
    assert len(replica.encode("ab " * 300_000, False)) == 900_000
    assert psutil.Process().memory_info().rss - before < 100 << 20
