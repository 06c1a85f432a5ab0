"""A thousand requests of 64 clients during swaps every ten seconds: all are answered, and no memory leaks."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import psutil
import pytest

from tests.e2e.conftest import REPLICAS, running, shake

CLIENTS, REQUESTS, SWAP_SECONDS = 64, 1000, 10
WARM_REQUESTS = 1000
GROWTH = 1.02

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "64 clients send 1,000 requests while a version is swapped in every 10 s",
        "no request hangs, failures are only 429 with Retry-After, and the replicas' memory grows by at most 2 %",
        process="replica: a swap every 10 s",
    ),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Service whose n-gram cache is full soon, and whose queues hold the requests of all clients."""
    with running(tmp_path_factory.mktemp("load"), {"max_queue": 2 * CLIENTS}, recall={"megabytes": 1}) as service:
        yield service


def body(number):
    """Return a random request body."""
    chance = random.Random(number)  # noqa: S311
    prompt = "".join(chance.choices("abcdefgh ", k=chance.choice([5, 50, 500])))
    fields = chance.choice([{}, {"stream": True}, {"n": 2}, {"stop": ["qq"]}, {"logprobs": 3}, {"temperature": 0}])
    return {"prompt": prompt, "max_tokens": chance.choice([1, 50, 150]), "seed": number, **fields}


class Load:
    """Clients that each send a request after the answer to the last one, and obey Retry-After."""

    def __init__(self, service):
        self.url, self.statuses, self.failed = service.url, Counter(), []
        self._lock = threading.Lock()

    def send(self, numbers):
        with ThreadPoolExecutor(CLIENTS) as pool, httpx.Client(base_url=self.url, timeout=60) as http:
            list(pool.map(lambda number: self._request(http, number), numbers))

    def _request(self, http, number):
        for _ in range(300):
            response = http.post("/v1/completions", json=body(number))
            is_complete = not body(number).get("stream") or is_whole(response.text)
            with self._lock:
                self.statuses[response.status_code] += 1
                if response.status_code not in (200, 429) or (response.status_code == 200 and not is_complete):
                    self.failed.append((response.status_code, response.text[-200:]))
            if response.status_code != 429:
                return
            time.sleep(float(response.headers["retry-after"]))
        self.failed.append((429, "refused 300 times"))


def is_whole(stream):
    """Return whether a stream ended, and without an error event."""
    *events, end, rest = stream.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    return (end, rest) == ("data: [DONE]", "") and not any("error" in event for event in events)


def swap_until(service, stop):
    """Publish and roll out a version every ten seconds; return the number of versions."""
    count = 0
    while not stop.wait(SWAP_SECONDS):
        service.point_at(service.publish(shake))
        count += 1
    return count


def replicas():
    """Return the replica processes."""
    children = psutil.Process().children(recursive=True)
    processes = [child for child in children if "ServeReplica" in " ".join(child.cmdline())]
    assert len(processes) == REPLICAS
    return processes


def memory_of(processes):
    """Return the resident bytes of each process after a pause."""
    time.sleep(3)
    return [process.memory_info().rss for process in processes]


def fill(service):
    """Use every slot over its whole length."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: service.complete(f"{n}" * 900, max_tokens=100, ignore_eos=True), range(12)))
    assert {answer.status_code for answer in answers} <= {200, 400, 429}


def test_swaps_under_load_lose_no_answer_and_no_memory(service, fault_result, eventually):
    for _ in range(4):
        fill(service)
    for _ in range(3):
        number = service.publish(shake)
        service.point_at(number)
        eventually(lambda number=number: service.versions() == [number] * REPLICAS)
    Load(service).send(range(WARM_REQUESTS))
    processes = replicas()
    before = memory_of(processes)

    load, stop = Load(service), threading.Event()
    with ThreadPoolExecutor(1) as swapping:
        swaps = swapping.submit(swap_until, service, stop)
        try:
            load.send(range(WARM_REQUESTS, WARM_REQUESTS + REQUESTS))
        finally:
            stop.set()
    after = memory_of(processes)
    growth = [late / early for early, late in zip(before, after, strict=True)]
    fault_result.lost = f"{swaps.result()} swaps, memory " + ", ".join(f"{ratio - 1:+.1%}" for ratio in growth)
    fault_result.errors = f"{load.statuses[429]} of {sum(load.statuses.values())} answers: 429"
    assert load.failed == []
    assert load.statuses[200] == REQUESTS
    assert swaps.result() >= 3
    assert max(growth) < GROWTH, [size >> 20 for size in (*before, *after)]
    assert replicas() == processes, "no replica was replaced"
