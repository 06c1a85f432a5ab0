"""Processes of Serve die with requests in flight, under a service that goes on."""

from __future__ import annotations

import signal
import time

import httpx2
import psutil
import pytest

from tests.clients import told
from tests.waiting import wait_until

pytestmark = pytest.mark.soak

WELL_SECONDS, PROXY_SECONDS = 60, 20
STOPPED_SECONDS = 5
IDLE_SHARE = 0.2
"""Of a core, what a replica may use that decodes nothing."""


@pytest.mark.fault(
    "a replica is killed with requests in flight",
    "its streams end with an error event and [DONE], its other answers are 503; the other replica serves new "
    "requests; two replicas work again within 60 s",
)
def test_what_a_killed_replica_worked_on_ends_with_an_error_and_another_takes_its_place(service, aftermath):
    service.wait_until_free()
    clients = service.in_flight(streams=8, others=4)
    refused, aftermath.seconds = end_a_replica(service, signal.SIGKILL)
    errors = [error for client in clients if (error := client.error()) is not None]
    assert 0 < len(errors) < len(clients), "each replica had some"
    assert {error["message"] for error in errors} == {"The replica ended before it answered completely. Try again."}
    for client in clients:
        assert client.status == 200 or (client.status == 503 and "retry-after" in client.headers)
    aftermath.errors = told(clients) + f"; {refused} new requests: 503" * bool(refused)
    service.wait_until_free()


@pytest.mark.fault(
    "a replica's process gets SIGTERM with requests in flight",
    "its running answers end complete; new requests are served, but a page in progress at its end gets 503 "
    "with Retry-After; two replicas work again within 60 s",
)
def test_what_a_replica_works_on_when_it_is_told_to_end_ends_whole(service, aftermath):
    service.wait_until_free()
    clients = service.in_flight(streams=8, others=4)
    refused, aftermath.seconds = end_a_replica(service, signal.SIGTERM)
    assert refused == 0
    assert [client.error() for client in clients] == [None] * len(clients)
    aftermath.errors, aftermath.lost = told(clients), "nothing"
    service.wait_until_free()


def end_a_replica(service, how: signal.Signals) -> tuple[int, float]:
    """How many new completions got 503 until there was another one, and seconds until then."""
    before = set(service.loads())
    service.workers("ServeReplica")[0].send_signal(how)
    begun = time.monotonic()
    refused = 0

    def is_replaced() -> bool:
        nonlocal refused
        page, answer = httpx2.get(f"{service.url}/dashboard/data", timeout=30), service.complete()
        for one in (page, answer):
            assert one.status_code == 200 or (one.status_code == 503 and "error" in one.json())
            assert one.status_code == 200 or "retry-after" in one.headers
        refused += answer.status_code == 503
        return page.status_code == 200 and not before.issuperset(one["name"] for one in page.json()["replicas"])

    wait_until(is_replaced, WELL_SECONDS)
    return refused, time.monotonic() - begun


@pytest.mark.fault(
    "the proxy is killed with requests in flight",
    "their decoding stops within 5 s and their slots are freed; a new proxy answers within 20 s",
)
def test_what_came_through_a_proxy_that_dies_is_given_up(service, eventually, aftermath):
    service.wait_until_free()
    cancelled = service.metric("osd_cancelled_requests_total")
    clients = service.in_flight(streams=8, others=4)
    (proxy,) = service.workers("ProxyActor")
    replicas = service.workers("ServeReplica")
    proxy.kill()
    begun = time.monotonic()
    eventually(lambda: all(idle(replica) for replica in replicas), STOPPED_SECONDS)
    eventually(lambda: answers(service.url), PROXY_SECONDS, every=0.1)
    aftermath.seconds = time.monotonic() - begun
    for client in clients:
        client.join()
    broken = sum(bool(client.broken) for client in clients)
    assert broken == len(clients)
    aftermath.errors = f"{broken} of {broken} connections broke"
    service.wait_until_free()
    eventually(lambda: service.metric("osd_cancelled_requests_total") == cancelled + len(clients))


def idle(process: psutil.Process) -> bool:
    """Whether it uses next to no core for a moment."""
    return process.cpu_percent(interval=0.5) < 100 * IDLE_SHARE


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False
