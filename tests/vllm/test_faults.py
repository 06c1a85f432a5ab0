"""Faults around a real vLLM process with capture, while eight clients send completions without a pause.

No request fails in any of them. Each captured request has a trace in Redis, or the metrics of vLLM count its loss.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest
from redis import Redis

from benchmarks.vllm.server import VllmServer
from osd.capture.server import RedisServer
from osd.capture.streams import stream_of
from osd.capture.trace import FIELD, decode
from osd.scrape import Span
from osd.vllm.ring import Ring
from tests.command import family, osd
from tests.fault_table import FaultResult
from tests.redis_servers import free_port
from tests.vllm.conftest import VllmWorld
from tests.vllm.traffic import Traffic, stored
from tests.waiting import background, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

_CLIENTS = 8
_LENGTHS = range(11, 27)
"""Numbers of tokens of the answers: different, so that requests are open at every time, and shorter than a segment."""

_LOST = {"request", "empty", "assembler", "queue", "closed", "encoding", "redis"}
"""Reasons that count requests and traces; the other reasons count steps, and requests whose traces are shorter."""

_STREAM = stream_of("osd:traces", "general")


class Load:
    """Clients of a server, and the growth of its counters since the first request.

    Each prompt is the number of its request, which later requests exceed.
    """

    _numbers = itertools.count()

    def __init__(self, server: VllmServer, redis: RedisServer) -> None:
        self._server, self._redis = server, redis
        self._traffic = Traffic(server.url, max(_LENGTHS))
        self._stopped = threading.Event()
        self._before = server.scrape()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Send completions during the context, then wait until all requests have a trace or are counted as lost.

        Raises:
            AssertionError: a request failed, a counter is wrong, or a trace differs from its answer.
        """
        with background(self._send_on, self._stopped.set, _CLIENTS):
            self.wait_for_new_traces()
            yield
        self._send()  # a further step, in which the assembler notices steps lost before
        wait_until(self._is_settled, every=0.5, what="a trace or a loss of each request")
        print(f"{self.answers} answers, {self.added('traces')} traces, dropped: {self.dropped()}")
        assert self.added("errors") == 0
        assert self._server.scrape().sum("osd_capturing") == 1

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` is true; return early when a request has failed."""
        wait_until(lambda: self._stopped.is_set() or condition(), every=0.2)

    def wait_for_new_traces(self) -> None:
        """Wait until Redis has the trace of a request that was sent after this call."""
        number = next(self._numbers)
        self.wait(lambda: self._newest_trace() > number)

    @property
    def answers(self) -> int:
        return len(self._traffic.answers)

    def added(self, name: str, **labels: str) -> int:
        """Return the growth of a counter of capture."""
        return int(Span(self._before, self._server.scrape()).added(f"osd_capture_{name}_total", **labels))

    def dropped(self) -> dict[str, int]:
        """Return the losses by reason."""
        counts = Span(self._before, self._server.scrape()).added_by("osd_capture_dropped_total", "reason")
        return {reason: int(count) for (reason,), count in counts.items() if count}

    def shorter_traces(self) -> int:
        """Compare the traces in Redis with their answers, and return how many lack the end."""
        answers = {name: answer.tokens for name, answer in self._traffic.answers.items()}
        traces = {trace.request_id: trace.completion_ids.numpy().tolist() for trace in stored(self._redis.url)}
        pairs = [(traces[name], answers[name]) for name in traces.keys() & answers.keys()]
        assert pairs
        assert all(answer[: len(tokens)] == tokens for tokens, answer in pairs)
        return sum(tokens != answer for tokens, answer in pairs)

    def _send_on(self) -> None:
        try:
            while not self._stopped.is_set():
                self._send()
        finally:
            self._stopped.set()

    def _send(self) -> None:
        number = next(self._numbers)
        length = _LENGTHS[7 * number % len(_LENGTHS)]
        (tokens,) = self._traffic.complete([*divmod(number, 256)], max_tokens=length, ignore_eos=True)
        assert len(tokens) == length

    def _newest_trace(self) -> int:
        """Return the number in the last trace in Redis; -1 without traces."""
        with Redis.from_url(self._redis.url, protocol=2) as client:
            entries: Any = client.xrevrange(_STREAM, count=1)
        if not entries:
            return -1
        high, low = decode(entries[0][1][FIELD]).prompt_ids.numpy().tolist()
        return 256 * high + low

    def _is_settled(self) -> bool:
        lost = sum(count for reason, count in self.dropped().items() if reason in _LOST)
        return self.answers == self.added("requests") == self.added("traces") + lost


class Served:
    """Running vLLM with capture, and its Redis."""

    def __init__(self, world: VllmWorld, server: VllmServer, redis: RedisServer) -> None:
        self.world, self.server, self.redis = world, server, redis

    @contextmanager
    def load(self, result: FaultResult) -> Iterator[Load]:
        """Send completions during the context, see ``Load.run``, and fill in the ``result`` afterwards."""
        load = Load(self.server, self.redis)
        with load.run():
            yield load
        lost = load.answers - load.added("traces")
        result.lost = f"{lost} of {load.answers} traces, counted" if lost else "nothing"
        result.errors = f"none of {load.answers} requests"

    def assembler(self) -> psutil.Process:
        """Return the process of the assembler."""
        children = psutil.Process().children(recursive=True)
        (process,) = [child for child in children if "osd.vllm.assembler" in child.cmdline()]
        return process


@pytest.fixture(scope="module")
def served(vllm_world: VllmWorld) -> Iterator[Served]:
    """Server with the first model runner."""
    worker = ("--worker-extension-cls", "tests.vllm.fault_worker.Osd")
    with (
        RedisServer(256) as redis,
        vllm_world.server("v1", redis.url, *worker, OSD_VLLM_CAPTURE="1") as server,
    ):
        try:
            yield Served(vllm_world, server, redis)
        finally:
            print(server.output())  # shown when a request failed


@pytest.mark.fault(
    "the process that builds the traces of a vLLM is killed under load",
    "no request fails, a new process continues, and the traces that the old one had are counted as lost",
    process="assembler: SIGKILL",
)
def test_killed_assembler_starts_again_and_its_losses_are_counted(served, fault_result):
    with served.load(fault_result) as load:
        assembler = served.assembler()
        load.wait(lambda: _suspends_with_requests(assembler))
        assembler.kill()
        load.wait(lambda: load.added("restarts") == 1)
        load.wait_for_new_traces()
    assert load.dropped()["assembler"] > 0
    assert load.shorter_traces() == 0


def _suspends_with_requests(assembler: psutil.Process) -> bool:
    """Suspend an assembler, and return whether it has open requests; resume it otherwise."""
    assembler.suspend()
    wait_until(lambda: assembler.status() == psutil.STATUS_STOPPED)
    with closing(Ring.attach(json.loads(assembler.cmdline()[-1])["ring"])) as ring:
        counters = ring.counters()
    if counters["requests"] > counters["closed"]:
        return True
    assembler.resume()
    return False


@pytest.mark.fault(
    "the Redis of a vLLM that captures is killed under load, and returns",
    "no request fails, lost traces are counted, and capture resumes",
    process="redis-server: SIGKILL, then a new process",
)
def test_losses_of_a_killed_redis_are_counted_until_it_returns(served, fault_result):
    with served.load(fault_result) as load:
        os.kill(served.redis.pid, signal.SIGKILL)
        wait_until(lambda: served.redis.pid is None)
        load.wait(lambda: load.added("dropped", reason="redis") > 0)
        served.redis.start()
        load.wait_for_new_traces()
    assert load.dropped().keys() <= {"redis", "queue"}
    assert load.shorter_traces() == 0


@pytest.mark.fault(
    "`osd learn --capture` is killed while its vLLM is under load",
    "no request fails, the traces wait in Redis for the next trainer, and lost ones are counted",
    process="osd learn: SIGKILL",
)
def test_killed_trainer_loses_nothing(served, monkeypatch, fault_result):
    monkeypatch.setenv("OSD_REDIS_URL", served.redis.url)
    options = {
        "target.source": served.world.target, "target.dtype": "float32", "drafter.kind": "eagle",
        "drafter.vocabulary": 200, "tap.dashboard_port": free_port(),
    }  # fmt: skip
    arguments = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
    with (
        Redis.from_url(served.redis.url, protocol=2) as client,
        osd(served.world.home, "learn", "--capture", *arguments) as trainer,
    ):
        wait_until(lambda: trainer.poll() is not None or _read_by_trainer(client), every=0.5)
        with served.load(fault_result) as load:
            read = _read_by_trainer(client)
            load.wait(lambda: trainer.poll() is not None or _read_by_trainer(client) != read)
            assert trainer.poll() is None, trainer.communicate()[1]
            for process in family(trainer.pid):
                process.kill()
            load.wait_for_new_traces()
    assert load.dropped().keys() <= {"redis"}, "which may answer too late on a busy machine"
    assert load.shorter_traces() == 0


def _read_by_trainer(client: Redis) -> list[bytes]:
    """Return the ids of the last traces that trainers have read."""
    groups: Any = client.xinfo_groups(_STREAM) if client.exists(_STREAM) else []
    return [group["last-delivered-id"] for group in groups]


@pytest.mark.fault(
    "the process that builds the traces of a vLLM hangs under load, until its shared memory is full, and resumes",
    "no request fails, lost requests are counted, and the traces of others end before lost steps",
    process="assembler: SIGSTOP, later SIGCONT",
)
def test_full_ring_drops_steps_and_counts_them(served, fault_result):
    with served.load(fault_result) as load:
        assembler = served.assembler()
        assembler.suspend()
        load.wait(lambda: load.added("dropped", reason="request") > 0)
        assembler.resume()
        load.wait_for_new_traces()
    dropped = load.dropped()
    assert dropped["ring"] > 0
    assert 0 < load.shorter_traces() <= _CLIENTS * dropped["hole"]
