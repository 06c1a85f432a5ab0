"""Recall tables of several vLLM processes, which share tokens through a real Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import numpy as np
import pytest
import redis
from redis.connection import Connection

from osd.admin import NotFoundError
from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.capture.purge import Member, Purges
from osd.capture.server import RedisServer
from osd.config import Settings
from osd.recall.backends import backend
from osd.redis_client import Backoff
from osd.vllm import RecallProposer, sharing
from osd.vllm.sharing import LONGEST, RECORDS, Sharing
from tests.unit.vllm.batch import VOCABULARY, Batch, config
from tests.waiting import wait_until

TOKENS = list(range(100, 140))
STREAM = "osd:vllm:first"


class Process:
    """Recall table of a process, and its sharing."""

    def __init__(self, url: str, key: str = "first"):
        kernels = backend()
        self.memory, self._text = kernels.memory(4096), kernels.text(64)
        self.sharing = Sharing(url, key, VOCABULARY, self.memory, kernels)
        self._texts = {number: kernels.text(64) for number in range(3)}

    def learn(self, request: int, tokens: list[int]) -> None:
        """Learn tokens as the proposer does."""
        self.sharing.learn(request, self._texts[request], [], np.array(tokens, np.int32), int(time.time()))

    def knows(self, context: list[int]) -> list[int]:
        self._text.clear()
        self._text.append(context, certain=False)
        return self.memory.predict(self._text, 1)[0]


@pytest.fixture
def process(ends: ExitStack) -> Callable[..., Process]:
    def make(*arguments: str) -> Process:
        process = Process(*arguments)
        ends.callback(process.sharing.close)
        return process

    return make


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sharing, "_PERIOD", 0.05)


def test_process_drafts_from_tokens_of_another_process(redis_url, process):
    first, second = process(redis_url), process(redis_url)
    for place in range(0, len(TOKENS), 4):
        first.sharing.share(1, ([5, 6, 7, 8, *TOKENS])[place : place + 4], TOKENS[place : place + 4])
    wait_until(lambda: second.knows(TOKENS[-5:-1]) == [TOKENS[-1]])
    assert second.knows([5, 6, 7, 8]) == [TOKENS[0]]
    assert first.memory.used() == 0, "it skips its own tokens"


def test_other_formats_and_invalid_entries_are_skipped(redis_url, redis_client, process):
    first, second, stranger = process(redis_url), process(redis_url), process(redis_url, "two")
    for content in (b"", b"abc", b"\xff" * 4000):
        redis_client.xadd(STREAM, {b"writer": b"x", b"said": content})
    redis_client.xadd(STREAM, {b"other": b"field"})
    first.sharing.share(1, [], TOKENS)
    wait_until(lambda: second.knows(TOKENS[:4]) == [TOKENS[4]])
    assert stranger.memory.used() == 0


def test_stream_is_bounded_and_expires(redis_url, redis_client, process, monkeypatch):
    assert RECORDS * LONGEST * 4 < 70e6
    monkeypatch.setattr(sharing, "RECORDS", 200)
    first = process(redis_url)
    for request in range(600):
        first.sharing.share(request, [], [request] * LONGEST)
    first.sharing.close()
    assert 200 <= redis_client.xlen(STREAM) <= 300
    assert 0 < redis_client.ttl(STREAM) <= 7 * 86_400


def test_processes_warn_once_and_share_again_after_redis(redis_url, redis_server, process, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "osd.vllm")
    first, second = process(redis_url), process(redis_url)
    first.sharing.share(1, [5], TOKENS)
    wait_until(lambda: second.knows([5]) == [TOKENS[0]])
    redis_server.close()
    for number in range(200):
        first.sharing.share(2, [6], [number + 200])
    wait_until(lambda: sum("tokens are not shared" in text for text in caplog.messages) == 2)
    tries, failed = [], Backoff.failed
    monkeypatch.setattr(Backoff, "failed", lambda backoff: tries.append(backoff) or failed(backoff))
    wait_until(lambda: len(tries) > 2)
    assert len(caplog.messages) == 2, "one warning per process"
    redis_server.start()
    first.sharing.share(3, [7], [300])
    wait_until(lambda: second.knows([7]) == [300])
    wait_until(lambda: second.knows([6]) != [])
    assert sum("tokens are shared" in text for text in caplog.messages) >= 1
    assert redis_url.split(":")[2].split("@")[0] not in caplog.text, "the password"


def test_proposals_and_their_thread_never_call_redis(redis_url, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    threads, send = set(), Connection.send_packed_command

    def record(connection, *arguments, **options):
        threads.add(threading.current_thread())
        return send(connection, *arguments, **options)

    monkeypatch.setattr(Connection, "send_packed_command", record)
    proposer = RecallProposer(config())
    Batch(proposer).run([1, 2, 3], TOKENS * 5)
    wait_until(lambda: threads)
    assert threading.current_thread() not in threads
    proposer.close()


def test_proposers_share_what_their_batches_decode(redis_url, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    first, second = RecallProposer(config()), RecallProposer(config())
    answer = [7 * place % 400 for place in range(60)]
    Batch(first).run([1, 2, 3], answer)
    first.close()
    with closing(second):
        wait_until(lambda: Batch(second).run([4, 2, 3], answer) > 2)


def test_stream_is_read_again_after_redis_lost_it(redis_server: RedisServer, redis_url, process):
    first, second = process(redis_url), process(redis_url)
    first.sharing.share(1, [5], TOKENS)
    wait_until(lambda: second.knows([5]) == [TOKENS[0]])
    with redis.Redis.from_url(redis_url) as client:
        client.delete(STREAM)
        client.xadd(STREAM, {b"writer": b"x", b"said": b"\1\0\0\0\1\0\0\0\6\0\0\0\7\0\0\0"}, id="1-1")
    wait_until(lambda: second.knows([6]) == [7])


def test_purge_empties_all_tables_and_the_stream(redis_url, redis_client, process, tmp_path):
    first, second = process(redis_url), process(redis_url)
    first.sharing.share(1, [5], TOKENS)
    wait_until(lambda: second.knows([5]) == [TOKENS[0]])
    first.learn(1, [300, 301])
    wait_until(lambda: len(members(redis_url)) == 2)
    removed = purge_request(Settings(home=tmp_path), redis_url, Actor.local(), "chatcmpl-1")
    assert (removed.entries > 0, removed.absent) == (True, [])
    assert first.memory.used() == second.memory.used() == 0
    assert not redis_client.exists(STREAM)
    first.learn(1, [302, 303])
    assert first.memory.used() == 0, "the request decoded during the purge"
    first.learn(2, [8, 9])
    wait_until(lambda: second.knows([8]) == [9])
    assert second.knows([302]) == []


def test_tokens_written_before_a_purge_was_seen_are_not_learned(redis_url, redis_client, process):
    first, second = process(redis_url), process(redis_url)
    wait_until(lambda: len(members(redis_url)) == 2)
    with Purges(redis_url) as purges:
        purges.add("chatcmpl-1")
        wait_until(lambda: len(purges.answers("chatcmpl-1")) == 2)
    redis_client.xadd(STREAM, {b"writer": b"x", b"said": b"\1\0\0\0\1\0\0\0\6\0\0\0\7\0\0\0"})
    first.sharing.share(1, [8], [9])
    wait_until(lambda: second.knows([8]) == [9])
    assert second.knows([6]) == []


def test_purges_before_the_start_remove_nothing(redis_url, redis_client, process):
    redis_client.zadd("osd:purges", {"old": time.time() - 2 * 86_400, "new": time.time() - 3600})
    first = process(redis_url)
    first.sharing.share(1, [5], TOKENS)
    first.sharing.close()
    second = process(redis_url)
    wait_until(lambda: second.knows([5]) == [TOKENS[0]])


def test_tokens_from_before_a_purge_are_not_learned_by_a_later_process(redis_url, redis_client, process, tmp_path):
    first = process(redis_url)
    first.sharing.share(1, [5], TOKENS)
    first.sharing.close()
    with pytest.raises(NotFoundError):  # the requests of the tokens are not known
        purge_request(Settings(home=tmp_path), redis_url, Actor.local(), "chatcmpl-1")
    assert not redis_client.exists(STREAM)
    redis_client.xadd(STREAM, {b"writer": b"x", b"said": b"\1\0\0\0\1\0\0\0\6\0\0\0\7\0\0\0"})
    redis_client.zadd("osd:purges", {"chatcmpl-1": time.time() - 2 * 86_400})
    second, third = process(redis_url), process(redis_url)
    second.sharing.share(1, [8], [9])
    wait_until(lambda: third.knows([8]) == [9])
    second.sharing.share(1, [9], [10])
    wait_until(lambda: third.knows([9]) == [10])
    assert third.knows([6]) == [], "it stays with the stream of the purge"


def members(url: str) -> list[Member]:
    with Purges(url) as purges:
        return [*purges.members()]
