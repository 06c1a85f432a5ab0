"""Swaps, canaries and domains of a running service, and an outage of Redis."""

from __future__ import annotations

import threading

import httpx2 as httpx
import pytest
import redis

from osd.capture.streams import stream_of
from osd.capture.trace import FIELD, decode
from tests.e2e.conftest import shake
from tests.waiting import background


def test_swap_under_load_changes_no_output(service, eventually):
    def marks():
        return [event["version"] for event in service.data()["events"] if event["kind"] == "swapped"]

    first = service.complete("some text", max_tokens=200, ignore_eos=True).json()["choices"]
    stop, texts, failures = threading.Event(), [], []

    def traffic():
        with httpx.Client(base_url=service.url, timeout=60) as http:
            while not stop.is_set():
                body = {"prompt": "some text", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
                response = http.post("/v1/completions", json=body)
                (texts if response.status_code == 200 else failures).append(response.json().get("choices"))

    with background(traffic, stop.set, threads=4):
        swaps, earlier, numbers = service.metric("osd_swaps_total"), len(marks()), []
        for _ in range(3):
            numbers.append(service.publish(shake))
            service.point_at(numbers[-1])
            eventually(lambda: service.versions() == [numbers[-1]] * 2)
        eventually(lambda: service.metric("osd_swaps_total") == swaps + 6)
        # A replica reports a swap after it counts it.
        eventually(lambda: sorted(marks()[earlier:]) == sorted(numbers * 2))
    assert failures == []
    assert len(texts) >= 4
    assert all(choices == first for choices in texts)
    stalls = [replica["swap_stall_seconds_max"] for replica in service.data()["replicas"]]
    assert max(stalls) > 0


def served(service, eventually, count, more_domains=(), **fields):
    """Send ``count`` requests; return their answers and their traces.

    The traces are on the stream of the requested domain, or of one of ``more_domains``.
    """
    answers = [service.complete("some text", **fields).json() for _ in range(count)]
    ids = {f"{answer['id']}-0" for answer in answers}

    domains = [fields.get("osd", {}).get("domain", "general"), *more_domains]
    streams = [stream_of(service.settings.capture.stream, domain) for domain in domains]

    def traces():
        with redis.Redis.from_url(service.redis.url) as client:
            entries = [entry for stream in streams for entry in client.xrevrange(stream, count=3 * count)]
        captured = [trace for _, fields in entries if (trace := decode(fields[FIELD])).request_id in ids]
        return len(captured) == count and captured

    return [answer["choices"] for answer in answers], eventually(traces)


def test_canary_takes_turns_and_is_promoted(service, eventually):
    def canaries():
        return [replica["canary"] for replica in service.data()["replicas"]]

    stable = service.versions()[0]
    expected = service.complete("some text").json()["choices"]
    number = service.publish(shake)
    service.point_at(stable, number, 0.5)
    eventually(lambda: canaries() == [number] * 2)
    eventually(lambda: (service.data()["canary"], service.data()["share"]) == (number, 0.5))  # read once a second
    texts, traces = served(service, eventually, 24)
    assert {trace.drafter_version for trace in traces} == {stable, number}
    assert all(text == expected for text in texts)

    service.point_at(number)
    eventually(lambda: service.versions() == [number] * 2 and canaries() == [None] * 2)
    texts, traces = served(service, eventually, 6)
    assert {trace.drafter_version for trace in traces} == {number}
    assert all(text == expected for text in texts)


def test_domain_with_a_pointer_has_its_own_drafter(service, eventually):
    expected = service.complete("some text").json()["choices"]
    number = service.publish(shake, domain="code")
    service.point_at(number, domain="code")
    eventually(lambda: [replica["others"] for replica in service.data()["replicas"]] == [{"code": number}] * 2)
    texts, traces = served(service, eventually, 6, osd={"domain": "code"})
    assert {(trace.domain, trace.drafter_domain, trace.drafter_version) for trace in traces} == {
        ("code", "code", number)
    }
    assert all(text == expected for text in texts)
    _, traces = served(service, eventually, 2, osd={"domain": "poems"})
    assert {(trace.domain, trace.drafter_domain) for trace in traces} == {("poems", service.settings.domain)}
    # If one drafter is clearly faster, the router assigns requests to its domain.
    _, traces = served(service, eventually, 24, more_domains=["code"])
    assert {trace.drafter_domain for trace in traces} == {service.settings.domain, "code"}, "the router tries both"
    service.delete_pointer("code")
    assert [replica["others"] for replica in service.data()["replicas"]] == [{}] * 2


def test_only_stored_requests_reach_the_stream(service, eventually):
    stream = stream_of(service.settings.capture.stream, "general")
    with redis.Redis.from_url(service.redis.url) as client:
        before = service.metric("osd_traces_written_total")
        length = client.xlen(stream)
        for _ in range(3):
            assert service.complete(store=False).status_code == 200
            assert service.complete().status_code == 200
        eventually(lambda: service.metric("osd_traces_written_total") == before + 3)
        assert client.xlen(stream) == length + 3


@pytest.mark.fault(
    "Redis stops and returns",
    "serving continues; lost traces are counted; capture resumes",
    process="redis-server: SIGTERM, then a new process",
)
def test_serving_continues_and_capture_resumes_after_redis(service, eventually):
    version = service.versions()[0]
    dropped = service.metric("osd_traces_dropped_total")
    service.redis.close()
    try:
        for _ in range(4):
            assert service.complete().status_code == 200
        eventually(lambda: service.metric("osd_traces_dropped_total") > dropped)
        eventually(lambda: service.data()["stream"] == {"redis": False, "capacity": 512, "domains": {}})
        assert service.versions() == [version] * 2
    finally:
        service.redis.start()
        service.point_at(version)
    written = service.metric("osd_traces_written_total")

    def resumed():
        assert service.complete().status_code == 200
        return service.metric("osd_traces_written_total") > written

    eventually(resumed)
    number = service.publish(shake)
    service.point_at(number)
    eventually(lambda: service.versions() == [number] * 2)
