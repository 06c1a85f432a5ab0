"""Assembler process of a vLLM worker, with a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.capture.purge import Purges
from osd.capture.server import RedisServer
from osd.capture.streams import stream_of
from osd.capture.trace import FIELD, decode
from osd.config import load_settings
from osd.vllm.assembler import Assembler
from osd.vllm.assembler_process import AssemblerProcess, Assignment
from osd.vllm.assembly import TraceOrigin
from osd.vllm.ring import Ring
from osd.vllm.steps import encode
from tests.redis_servers import TcpProxy
from tests.unit.vllm.step_records import admission, step_record
from tests.waiting import background, wait_until

ORIGIN = TraceOrigin("tiny@abc", "code", "eagle")
STREAM = stream_of("osd:traces", "general")


@pytest.fixture(autouse=True)
def priorities(monkeypatch):
    """Record the priorities of assemblers, which run at normal priority, so that other processes cannot starve them."""
    priorities = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: priorities.append(arguments))
    return priorities


@pytest.fixture
def assembler(redis_url, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        yield assembler
        pids = processes()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def processes(worker=None):
    """Return the process ids of the assemblers of a worker, by default of this process."""
    children = psutil.Process(worker).children()
    return [child.pid for child in children if "osd.vllm.assembler" in " ".join(child.cmdline())]


def running():
    """Wait for the assembler and return its process id."""
    return wait_until(processes)[0]


def rings():
    """Return the shared memory that this process uses."""
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]


def send(assembler, key, **fields):
    """Begin a request with one token; its id is ``response-<key>``."""
    assert assembler.put(step_record([(key, 0, 5, [7], [-1], 0)], begun=[admission(key, **fields)]))


def end(assembler, *keys):
    assert assembler.put(step_record(ended=keys, states=None))


def written(client):
    return [decode(fields[FIELD]) for _, fields in client.xrange(STREAM)]


def requests(client):
    return [trace.request_id for trace in written(client)]


def test_assembler_writes_traces_at_the_lowest_priority(assembler, priorities, redis_client):
    pid = running()
    assert wait_until(lambda: priorities) == [(os.PRIO_PROCESS, pid, 19)]
    assert os.getsid(pid) != os.getsid(0), "Ctrl-C does not end it"
    send(assembler, "a", weight=4.0)
    end(assembler, "a")
    (trace,) = wait_until(lambda: written(redis_client))
    assert (trace.request_id, trace.target, trace.drafter_domain, trace.weight) == (
        "response-a", "tiny@abc", "code", 4.0,
    )  # fmt: skip
    assert trace.replica.startswith("vllm-")
    assert trace.hidden.dtype == "int8", "as capture.states says"
    counters = wait_until(lambda: (values := assembler.counters())["written"] and values)
    present = {name: value for name, value in counters.items() if value}
    assert present == {"frames": 2, "requests": 1, "closed": 1, "traces": 1, "written": 1}


def test_worker_budget_is_not_applied_again(redis_url, redis_client, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    monkeypatch.setenv("OSD_CAPTURE__BYTES_PER_SECOND", "1024")
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        for number in range(100):
            send(assembler, f"{number}", weight=2.0)
        end(assembler, *map(str, range(100)))
        wait_until(lambda: assembler.counters()["written"] == 100)
    assert {trace.weight for trace in written(redis_client)} == {2.0}


def test_killed_assembler_is_started_again_and_goes_on(assembler, redis_client):
    send(assembler, "lost")
    wait_until(lambda: assembler.counters()["requests"] == 1)
    killed = running()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(killed))
    for key in ("a", "b"):
        send(assembler, key)
    end(assembler, "lost", "a")
    assert wait_until(lambda: requests(redis_client)) == ["response-a"]
    end(assembler, "b")
    wait_until(lambda: requests(redis_client) == ["response-a", "response-b"])
    counters = assembler.counters()
    assert (counters["restarts"], counters["requests"], counters["dropped"]) == (1, 3, 0)
    assert counters["lost_assembler"] == 1


def test_stalled_assembler_never_blocks_the_worker(assembler, redis_client):
    send(assembler, "a")
    wait_until(lambda: assembler.counters()["requests"] == 1)
    os.kill(running(), signal.SIGSTOP)
    large = step_record([("not captured", 0, 50_000, [], [], 0)])
    while assembler.put(large):
        pass
    assert assembler.counters()["dropped"] == 1
    assert requests(redis_client) == []
    os.kill(running(), signal.SIGCONT)
    wait_until(lambda: assembler.put(step_record(states=None)))
    assert wait_until(lambda: requests(redis_client)) == ["response-a"], "a hole ends all requests"
    assert assembler.counters()["holes"] == 1


def test_record_that_is_not_valid_ends_all_requests(assembler, redis_client):
    send(assembler, "a")
    assembler.put(step_record(starts=None))
    assert wait_until(lambda: requests(redis_client)) == ["response-a"]
    assert assembler.counters()["refused"] == 1


def test_silent_request_is_written_without_an_end(redis_url, redis_client, monkeypatch):
    monkeypatch.setattr("osd.vllm.assembly.SILENT_SECONDS", 0.0)
    stopped = threading.Event()
    with closing(Ring.create(1 << 20)) as ring:
        assembler = Assembler(Assignment(ring.name, os.getppid(), "vllm-test", ORIGIN), load_settings(), redis_url)
        with closing(assembler), background(lambda: assembler.run(stopped.is_set), stopped.set):
            ring.put(encode(step_record([("a", 0, 5, [7], [-1], 0)], begun=[admission("a")])))
            assert wait_until(lambda: requests(redis_client)) == ["response-a"]
        assert ring.counters()["expired"] == 1


def test_assembler_that_must_end_writes_traces_and_deletes_its_ring(redis_url, redis_client, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    others = set(rings())
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        (ring,) = set(rings()) - others
        send(assembler, "a")
        wait_until(lambda: assembler.counters()["requests"] == 1)
        assembler.end()
        wait_until(lambda: assembler.has_ended)
        assert ring not in rings()
        assert requests(redis_client) == ["response-a"]
        assert not assembler.put(step_record(states=None))
        counters = assembler.counters()
        assert (counters["frames"], counters["written"]) == (1, 1)
    assert not processes()


def test_terminated_assembler_writes_open_requests(assembler, redis_client):
    send(assembler, "a")
    wait_until(lambda: assembler.counters()["requests"] == 1)
    os.kill(running(), signal.SIGTERM)
    assert wait_until(lambda: requests(redis_client)) == ["response-a"]
    wait_until(lambda: assembler.counters()["restarts"] == 1)


WORKER = """
import os, time
os.setpriority = lambda *arguments: None
from osd.vllm.assembler_process import AssemblerProcess
from osd.vllm.assembly import TraceOrigin
from tests.redis_servers import TcpProxy
from tests.unit.vllm.step_records import admission, step_record
assembler = AssemblerProcess(TraceOrigin("tiny@abc", "code", "eagle"))
assembler.put(step_record([("a", 0, 5, [7], [-1], 0)], begun=[admission("a")]))
while not assembler.counters()["requests"]:
    time.sleep(0.01)
for key in "bcd":
    assembler.put(step_record([(key, 0, 5, [7], [-1], 0)], begun=[admission(key)]))
print("ready", flush=True)
time.sleep(1000)
"""


def test_assembler_ends_after_its_killed_worker(redis_url, redis_client):
    environment = {**os.environ, "OSD_REDIS_URL": redis_url}
    rings = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout.readline() == b"ready\n"
        (pid,) = processes(worker.pid)
        for child in psutil.Process(worker.pid).children():
            if child.pid != pid:
                child.kill()  # the resource tracker, which would delete the ring
        worker.kill()
    wait_until(lambda: not psutil.pid_exists(pid))
    assert sorted(requests(redis_client)) == [f"response-{key}" for key in "abcd"]
    wait_until(lambda: set(os.listdir("/dev/shm")) <= rings)


def test_assembler_counts_losses_while_redis_is_down(monkeypatch):
    with RedisServer(max_memory_mb=64) as server:
        monkeypatch.setenv("OSD_REDIS_URL", server.url)
        with closing(AssemblerProcess(ORIGIN)) as assembler:
            send(assembler, "a")
            wait_until(lambda: assembler.counters()["requests"] == 1)
            server.close()
            end(assembler, "a")
            for number in range(200):
                send(assembler, f"{number}")
            end(assembler, *map(str, range(200)))
            wait_until(lambda: (counts := assembler.counters())["lost_redis"] + counts["lost_queue"] == 201)
            server.start()
            numbers = count(1000)

            def is_written():
                key = str(next(numbers))
                send(assembler, key)
                end(assembler, key)
                time.sleep(0.1)
                return assembler.counters()["written"]

            wait_until(is_written)
            with redis.Redis.from_url(server.url, protocol=2) as client:
                assert requests(client)
            pid = running()
        wait_until(lambda: not psutil.pid_exists(pid))


def test_purge_of_an_open_request_leaves_no_trace(assembler, redis_url, redis_client, tmp_path):
    for key in ("open-0", "open-1", "ended", "other"):
        send(assembler, key)
    end(assembler, "ended")
    wait_until(lambda: requests(redis_client) == ["response-ended"])
    settings = load_settings(overrides=[f"home={tmp_path}"])
    for request, removed in (("response-open", (0, 2)), ("response-ended", (1, 0))):
        result = purge_request(settings, redis_url, Actor("test", "test"), request)
        assert (result.streamed, result.remembered, result.absent) == (*removed, [])
    assert assembler.counters()["purged"] == 2
    send(assembler, "late", request_id="response-open-2")
    end(assembler, "open-0", "open-1", "late", "other")
    wait_until(lambda: requests(redis_client) == ["response-other"])
    assert assembler.counters()["purged"] == 3


def test_purge_waits_for_traces_in_the_queue(redis_url, redis_client, monkeypatch, tmp_path):
    port = urlsplit(redis_url).port
    with TcpProxy(port) as proxy:
        monkeypatch.setenv("OSD_REDIS_URL", redis_url.replace(f":{port}", f":{proxy.port}"))
        with closing(AssemblerProcess(ORIGIN)) as assembler:
            send(assembler, "first")
            end(assembler, "first")
            wait_until(lambda: requests(redis_client))
            keys = [f"{number}" for number in range(40)]
            for key in keys:
                send(assembler, key)
            wait_until(lambda: assembler.counters()["requests"] == 41)
            proxy.delay = 0.03
            end(assembler, *keys)
            wait_until(lambda: assembler.counters()["traces"] == 41)
            settings = load_settings(overrides=[f"home={tmp_path}", f"redis_url={redis_url}"])
            purge_request(settings, redis_url, Actor("test", "test"), "response-39")
            wait_until(lambda: assembler.counters()["written"] == 41)
            pid = running()
        wait_until(lambda: not psutil.pid_exists(pid))
    assert sorted(requests(redis_client)) == sorted(f"response-{key}" for key in ("first", *keys[:-1]))


def test_purges_before_the_start_are_applied(redis_url, redis_client, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", redis_url)
    with Purges(redis_url) as purges, closing(AssemblerProcess(ORIGIN)) as assembler:
        purges.add("response-a")
        wait_until(lambda: purges.answers("response-a"))
        send(assembler, "a")
        send(assembler, "b")
        end(assembler, "a", "b")
        assert wait_until(lambda: requests(redis_client)) == ["response-b"]
        pid = running()
    wait_until(lambda: not psutil.pid_exists(pid))
    with Purges(redis_url) as purges:
        assert purges.members() == {}
