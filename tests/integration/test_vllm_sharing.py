"""vLLM processes learn from each other through a real Redis, and go on alone without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest
import redis
from redis.connection import Connection

from osd.capture.server import RedisServer
from osd.recall.backends import backend
from osd.redis_client import Backoff
from osd.vllm import RecallProposer, sharing
from osd.vllm.sharing import LONGEST, RECORDS, Sharing
from tests.unit.vllm.batch import VOCABULARY, Batch, config
from tests.waiting import wait_until

SAID = list(range(100, 140))
STREAM = "osd:vllm:one"


class Process:
    """What one process remembers and shares."""

    def __init__(self, url: str, spoken: str = "one"):
        made = backend()
        self.memory, self._text = made.memory(4096), made.text(64)
        self.sharing = Sharing(url, spoken, VOCABULARY, self.memory, made)

    def knows(self, context: list[int]) -> list[int]:
        self._text.clear()
        self._text.append(context, certain=False)
        return self.memory.says(self._text, 1)[0]


@pytest.fixture
def process(ends: ExitStack) -> Callable[..., Process]:
    def make(*given: str) -> Process:
        made = Process(*given)
        ends.callback(made.sharing.close)
        return made

    return make


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sharing, "_PERIOD", 0.05)


def test_what_one_process_decodes_another_one_drafts(redis_url, process):
    one, other = process(redis_url), process(redis_url)
    for place in range(0, len(SAID), 4):
        one.sharing.share(1, ([5, 6, 7, 8, *SAID])[place : place + 4], SAID[place : place + 4])
    wait_until(lambda: other.knows(SAID[-5:-1]) == [SAID[-1]])
    assert other.knows([5, 6, 7, 8]) == [SAID[0]]
    assert one.memory.used() == 0, "what it said itself it has learnt when it said it"


def test_a_process_that_starts_learns_what_the_stream_holds(redis_url, process):
    one = process(redis_url)
    one.sharing.share(1, [5], SAID)
    one.sharing.close()
    late = process(redis_url)
    wait_until(lambda: late.knows(SAID[:4]) == [SAID[4]])


def test_whoever_speaks_otherwise_or_writes_nonsense_is_not_heard(redis_url, redis_client, process):
    one, other, stranger = process(redis_url), process(redis_url), process(redis_url, "two")
    for said in (b"", b"abc", b"\xff" * 4000):
        redis_client.xadd(STREAM, {b"writer": b"x", b"said": said})
    redis_client.xadd(STREAM, {b"other": b"field"})
    one.sharing.share(1, [], SAID)
    wait_until(lambda: other.knows(SAID[:4]) == [SAID[4]])
    assert stranger.memory.used() == 0


def test_the_stream_is_bounded_and_goes_when_nobody_writes(redis_url, redis_client, process, monkeypatch):
    assert RECORDS * LONGEST * 4 < 70e6
    monkeypatch.setattr(sharing, "RECORDS", 200)
    one = process(redis_url)
    for request in range(600):
        one.sharing.share(request, [], [request] * LONGEST)
    one.sharing.close()
    assert 200 <= redis_client.xlen(STREAM) <= 300
    assert 0 < redis_client.ttl(STREAM) <= 7 * 86_400


def test_processes_without_redis_warn_once_and_share_again_when_it_is_back(
    redis_url, redis_server, process, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING, "osd.vllm")
    one, other = process(redis_url), process(redis_url)
    one.sharing.share(1, [5], SAID)
    wait_until(lambda: other.knows([5]) == [SAID[0]])
    redis_server.close()
    for number in range(200):
        one.sharing.share(2, [6], [number + 200])
    wait_until(lambda: sum("tokens are not shared" in text for text in caplog.messages) == 2)
    tries, failed = [], Backoff.failed
    monkeypatch.setattr(Backoff, "failed", lambda backoff: tries.append(backoff) or failed(backoff))
    wait_until(lambda: len(tries) > 2)
    assert len(caplog.messages) == 2, "one of each process"
    redis_server.start()
    one.sharing.share(3, [7], [300])
    wait_until(lambda: other.knows([7]) == [300])
    wait_until(lambda: other.knows([6]) != [])
    assert sum("tokens are shared" in text for text in caplog.messages) >= 1
    assert redis_url.split(":")[2].split("@")[0] not in caplog.text, "the password"


def test_proposals_and_their_thread_never_call_redis(redis_url, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    threads, send = set(), Connection.send_packed_command

    def seen(connection, *given, **more):
        threads.add(threading.current_thread())
        return send(connection, *given, **more)

    monkeypatch.setattr(Connection, "send_packed_command", seen)
    proposer = RecallProposer(config())
    Batch(proposer).run([1, 2, 3], SAID * 5)
    wait_until(lambda: threads)
    assert threading.current_thread() not in threads
    proposer.close()


def test_proposers_share_what_their_batches_decode(redis_url, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    one, other = RecallProposer(config()), RecallProposer(config())
    answer = [7 * place % 400 for place in range(60)]
    Batch(one).run([1, 2, 3], answer)
    one.close()
    with closing(other):
        wait_until(lambda: Batch(other).run([4, 2, 3], answer) > 2)


def test_redis_that_lost_everything_is_read_from_its_beginning(redis_server: RedisServer, redis_url, process):
    one, other = process(redis_url), process(redis_url)
    one.sharing.share(1, [5], SAID)
    wait_until(lambda: other.knows([5]) == [SAID[0]])
    with redis.Redis.from_url(redis_url) as client:
        client.delete(STREAM)
        client.xadd(STREAM, {b"writer": b"x", b"said": b"\1\0\0\0\1\0\0\0\6\0\0\0\7\0\0\0"}, id="1-1")
    wait_until(lambda: other.knows([6]) == [7])
