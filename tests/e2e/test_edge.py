"""Malformed, unfinished and too many requests at a real proxy of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.config import BackpressureConfig

from tests.waiting import HANG_SECONDS

UNFINISHED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"
)


@pytest.mark.parametrize("value", [b"\xff", b"0.0001"])
def test_headers_that_control_ray_have_no_effect(service, value):
    names = (b"X-Request-ID", b"serve_multiplexed_model_id", b"serve-multiplexed-model-id", b"X-Session-ID")
    names += (b"X-Request-Disconnect-Disabled", b"X-Request-Timeout-Seconds")
    headers = [(name, value) for name in names]
    assert service.http.get("/health", headers=headers).raise_for_status().json() == {"status": "ok"}


def test_health_is_answered_during_unfinished_bodies(service, eventually):
    eventually(lambda: answers_health_during_unfinished_bodies(service))
    assert service.complete().status_code == 200


def answers_health_during_unfinished_bodies(service) -> bool:
    """Return whether /health was answered before the first of forty bodies timed out."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(40):  # more than both replicas accept
            connection = socket.create_connection(("127.0.0.1", service.settings.serving.port), timeout=HANG_SECONDS)
            connections.append(stack.enter_context(connection))
            connection.sendall(UNFINISHED)
        assert service.http.get("/health").json() == {"status": "ok"}
        answered, _, _ = select.select(connections, [], [], 0)
        timed_out = [connection for connection in answered if b" 408 " in connection.recv(20, socket.MSG_PEEK)]
        files = [connection.makefile("rb") for connection in connections]
        statuses = [file.readline().split()[1] for file in files]
        # A 408 answer also ends the connection.
        timeouts = [file.read() for file, status in zip(files, statuses, strict=True) if status == b"408"]
    assert set(statuses) == {b"408", b"429"}
    assert len(timeouts) <= 12
    assert all(b'"code":"timeout"' in answer for answer in timeouts)
    return not timed_out


def responses(service):
    """Return the number of answers by path and status."""
    return {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(service.http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "osd_http_responses_total" and sample.labels["path"] != "/metrics"
    }


def settled(service, eventually):
    """Return the number of answers, after the proxy has reported a request that no other test sends."""
    key = ("/v1/models", "405")
    before = responses(service).get(key, 0)
    assert service.http.delete("/v1/models").status_code == 405
    eventually(lambda: responses(service).get(key, 0) > before)
    return responses(service)


def test_answers_are_counted_by_path_and_status(service, eventually):
    before = settled(service, eventually)
    expected = {("/v1/completions", "200"): 3, ("/v1/completions", "400"): 2, ("(others)", "404"): 1}
    for max_tokens in (1, 1, 1, -1, -1):
        service.complete(max_tokens=max_tokens)
    service.http.get("/v1/what")
    with socket.create_connection(("127.0.0.1", service.settings.serving.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    expected["(unread)", "400"] = 1

    def all_reported():
        now = responses(service)
        return all(now.get(key, 0) - before.get(key, 0) == count for key, count in expected.items())

    eventually(all_reported)


def test_disconnect_counts_as_499(service, eventually):
    before = settled(service, eventually)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{service.url}/v1/completions", json={"prompt": "a", "max_tokens": 1000, "ignore_eos": True}, timeout=0.3
        )
    key = ("/v1/completions", "499")
    eventually(lambda: responses(service).get(key, 0) == before.get(key, 0) + 1)
    assert not [key for key, count in responses(service).items() if key[1] >= "500" and count != before.get(key, 0)]


def test_errors_of_ray_serve_are_openai_errors(service, tmp_path):
    """A second application has a queue that is small enough to fill."""
    may_finish = tmp_path / "may finish"

    @serve.deployment(
        max_ongoing_requests=1, max_queued_requests=1, backpressure_config=BackpressureConfig(retry_after_s=3)
    )
    class Slow:
        async def __call__(self, request):
            if "fail" in request.url.path:
                raise RuntimeError("SECRET")
            while not may_finish.exists():
                await asyncio.sleep(0.05)
            return "done"

    serve.run(Slow.bind(), name="slow", route_prefix="/slow")
    try:
        failed = service.http.get("/slow/fail")
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "SECRET" not in failed.text
        with ThreadPoolExecutor(6) as pool:
            requests = [pool.submit(service.http.get, "/slow") for _ in range(6)]
            refused, _ = wait(requests, timeout=HANG_SECONDS, return_when=FIRST_COMPLETED)
            may_finish.touch()
    finally:
        serve.delete("slow")
    assert refused
    for answer in (future.result() for future in refused):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["type"] == "server_error"
