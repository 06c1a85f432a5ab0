"""Death of Serve processes with requests in flight, under a service that continues."""

from __future__ import annotations

import signal
import time

import httpx2
import psutil
import pytest

from serving.http.liveness import SILENCE_SECONDS
from tests.clients import describe_errors
from tests.waiting import wait_until

pytestmark = pytest.mark.soak

RECOVERY_SECONDS, PROXY_SECONDS = 60, 20
STOPPED_SECONDS = 5
IDLE_SHARE = 0.2
"""CPU time of an idle replica per second, at most."""


@pytest.mark.fault(
    "a replica is killed with requests in flight",
    "its streams end with an error event and [DONE], its other answers are 503; the other replica serves new "
    "requests; two replicas work again within 60 s",
    process="replica: SIGKILL",
)
def test_requests_of_a_killed_replica_end_with_an_error(service, fault_result):
    service.wait_until_free()
    clients = service.in_flight(streams=8, answers=4)
    refused, fault_result.seconds = end_a_replica(service, signal.SIGKILL)
    assert refused <= 2, "the other replica serves"
    errors = [error for client in clients if (error := client.error()) is not None]
    assert 0 < len(errors) < len(clients), "each replica had requests"
    assert {error["message"] for error in errors} == {"The replica ended before it answered completely. Try again."}
    for client in clients:
        assert client.status == 200 or (client.status == 503 and "retry-after" in client.headers)
    fault_result.errors = describe_errors(clients) + f"; {refused} new requests: 503" * bool(refused)
    service.wait_until_free()


@pytest.mark.fault(
    "a replica's process gets SIGTERM with requests in flight",
    "its running answers end complete; new requests are served, but a page in progress at its end gets 503 "
    "with Retry-After; two replicas work again within 60 s",
    process="replica: SIGTERM",
)
def test_requests_of_a_terminated_replica_are_completed(service, fault_result):
    service.wait_until_free()
    clients = service.in_flight(streams=8, answers=4)
    refused, fault_result.seconds = end_a_replica(service, signal.SIGTERM)
    assert refused == 0
    assert [client.error() for client in clients] == [None] * len(clients)
    fault_result.errors, fault_result.lost = describe_errors(clients), "nothing"
    service.wait_until_free()


def end_a_replica(service, signal_number: signal.Signals) -> tuple[int, float]:
    """End a replica; return the 503 answers until its replacement runs, and the seconds until then."""
    before = set(service.loads())
    service.workers("ServeReplica")[0].send_signal(signal_number)
    began = time.monotonic()
    refused = 0

    def is_replaced() -> bool:
        nonlocal refused
        page, answer = httpx2.get(f"{service.url}/dashboard/data", timeout=30), service.complete()
        for response in (page, answer):
            assert response.status_code == 200 or (response.status_code == 503 and "error" in response.json())
            assert response.status_code == 200 or "retry-after" in response.headers
        refused += answer.status_code == 503
        names = {replica["name"] for replica in page.json()["replicas"]} if page.status_code == 200 else set()
        return len(names) == 2 and names != before

    wait_until(is_replaced, RECOVERY_SECONDS)
    return refused, time.monotonic() - began


@pytest.mark.fault(
    "all replicas hang",
    "new requests get 503 with Retry-After after 20 s, and answers when the replicas continue",
    process="replica: SIGSTOP, later SIGCONT",
)
def test_requests_to_hanging_replicas_end_after_the_limit(service, fault_result):
    service.wait_until_free()
    replicas = service.workers("ServeReplica")
    for replica in replicas:
        replica.suspend()
    try:
        began = time.monotonic()
        answer = service.complete()
        fault_result.seconds = time.monotonic() - began
    finally:
        for replica in replicas:
            replica.resume()
    assert answer.status_code == 503
    assert answer.headers["retry-after"].isdecimal()
    assert fault_result.seconds < SILENCE_SECONDS + 5
    wait_until(lambda: service.complete().status_code == 200)
    fault_result.errors = "503 for the request"
    service.wait_until_free()


@pytest.mark.fault(
    "the proxy is killed with requests in flight",
    "their decoding stops within 5 s and their slots are freed; a new proxy answers within 20 s",
    process="proxy: SIGKILL",
)
def test_requests_of_a_killed_proxy_are_cancelled(service, eventually, fault_result):
    service.wait_until_free()
    cancelled = service.metric("osd_cancelled_requests_total")
    clients = service.in_flight(streams=8, answers=4)
    (proxy,) = service.workers("ProxyActor")
    replicas = service.workers("ServeReplica")
    proxy.kill()
    began = time.monotonic()
    eventually(lambda: all(idle(replica) for replica in replicas), STOPPED_SECONDS)
    eventually(lambda: answers(service.url), PROXY_SECONDS, every=0.1)
    fault_result.seconds = time.monotonic() - began
    for client in clients:
        client.join()
    broken = sum(bool(client.broken) for client in clients)
    assert broken == len(clients)
    fault_result.errors = f"{broken} of {broken} connections broke"
    service.wait_until_free()
    eventually(lambda: service.metric("osd_cancelled_requests_total") == cancelled + len(clients))


def idle(process: psutil.Process) -> bool:
    """Return whether a process uses almost no CPU for a moment."""
    return process.cpu_percent(interval=0.5) < 100 * IDLE_SHARE


def answers(url: str) -> bool:
    """Return whether ``/health`` answers 200."""
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False
