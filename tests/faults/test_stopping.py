"""``osd up`` gets a signal while it serves."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import httpx2
import pytest

from tests.clients import describe_errors
from tests.command import all_ended, family
from tests.up import starting

pytestmark = pytest.mark.soak

STOPPED = 130
LATE_SECONDS = 20
"""Time after ``serving.drain_s`` within which all processes end."""


def stop(service) -> tuple[list, float]:
    """Send SIGTERM; return all processes, and the time."""
    processes = family(service.process.pid)
    service.process.send_signal(signal.SIGTERM)
    return processes, time.monotonic()


def check_ended(service, processes, within: float = 120) -> str:
    """Check that the command has ended as promised; return its standard error."""
    _, errors = service.process.communicate(timeout=within)
    assert service.process.returncode == STOPPED
    assert "Traceback" not in errors
    assert all_ended(processes, within)
    return errors


def try_request(service, method: str, path: str) -> httpx2.Response | None:
    """Return the answer to a request; None without a connection."""
    body = {"json": {"prompt": "a", "max_tokens": 1}} if method == "POST" else {}
    try:
        return httpx2.request(method, f"{service.url}{path}", timeout=30, **body)
    except httpx2.TransportError:
        return None


@pytest.mark.fault(
    "`osd up` gets a stop signal under load",
    "running answers end complete, new requests and /health get 503 with Retry-After; exit code 130; no "
    "process remains",
    process="osd up: SIGTERM",
)
def test_stop_completes_running_answers_and_refuses_new(tmp_path, fault_result):
    with starting(tmp_path, **{"serving.drain_s": 200}) as service:
        clients = service.in_flight(streams=4, answers=2)
        processes, stopped_at = stop(service)
        refused, refused_at = 0, 0.0
        while service.process.poll() is None:
            for method, path in [("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/health")]:
                answer = try_request(service, method, path)
                if answer is not None and (refused or answer.status_code != 200):
                    refused_at = refused_at or time.monotonic()
                    refused += 1
                    assert answer.status_code == 503
                    assert json.loads(answer.content)["error"]["type"] == "server_error"
                    assert answer.headers["retry-after"].isdecimal()
        fault_result.seconds = time.monotonic() - stopped_at
        assert refused_at - stopped_at < 3
        assert max(client.ended_at for client in clients) > refused_at + 1, "running answers continued during refusals"
        assert [client.error() for client in clients] == [None] * len(clients)
        fault_result.errors, fault_result.lost = describe_errors(clients), "nothing"
        errors_text = check_ended(service, processes)
    assert "drained after" in errors_text
    assert "ended with an error" not in errors_text
    assert not (tmp_path / "home" / "running.json").exists()


def test_stop_in_the_environment_of_the_image_completes_streams(tmp_path, monkeypatch):
    image = (Path(__file__).parents[2] / "deploy" / "Dockerfile").read_text()
    for name, value in re.findall(r"\b(RAY_\w+)=(\S+)", image):
        monkeypatch.setenv(name, value)
    with starting(tmp_path, **{"serving.drain_s": 200}) as service:
        clients = service.in_flight(streams=8, answers=0)
        processes, _ = stop(service)
        assert [client.error() for client in clients] == [None] * len(clients)
        assert "ended with an error" not in check_ended(service, processes)


@pytest.mark.fault(
    "answers take longer than `serving.drain_s` after a stop signal to `osd up`",
    "streams end with an error event and [DONE], other answers with 503; all processes end within 20 s more",
    process="osd up: SIGTERM",
)
def test_answers_longer_than_the_drain_end_with_an_error(tmp_path, fault_result):
    with starting(tmp_path, **{"serving.drain_s": 0.5}) as service:
        clients = service.in_flight(streams=8, answers=4)
        processes, stopped_at = stop(service)
        errors = [client.error() for client in clients]
        assert {error["message"] for error in errors} == {"The server is stopping."}
        fault_result.errors = describe_errors(clients)
        errors_text = check_ended(service, processes, LATE_SECONDS)
        fault_result.seconds = time.monotonic() - stopped_at
    assert fault_result.seconds < 0.5 + LATE_SECONDS
    assert all(client.status == (200 if client.streams else 503) for client in clients)
    assert f", {len(clients)} requests ended with an error" in errors_text


@pytest.mark.fault(
    "a replica hangs, or has just died, when `osd up` gets a stop signal",
    "all processes end within 20 s more than `serving.drain_s`",
    process="replica, osd up: SIGSTOP or SIGKILL of a replica, SIGTERM of osd up",
)
@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_stop_does_not_wait_for_a_hanging_replica(tmp_path, fault_result, signal_number):
    with starting(tmp_path, **{"serving.drain_s": 1}) as service:
        clients = service.in_flight(streams=8, answers=4)
        service.workers("ServeReplica")[0].send_signal(signal_number)
        processes, stopped_at = stop(service)
        check_ended(service, processes, 1 + LATE_SECONDS)
        fault_result.seconds = time.monotonic() - stopped_at
        for client in clients:
            client.join()
        broken = sum(bool(client.broken) for client in clients)
        assert all(client.broken or client.error() is not None for client in clients)
        assert not broken or signal_number == signal.SIGSTOP, "the proxy ends the answers of a dead replica"
        fault_result.errors = f"{broken} of {len(clients)} connections broke, the others got an error"


@pytest.mark.fault(
    "a second signal arrives while requests drain", "every process ends at once", process="osd up: two times SIGTERM"
)
def test_second_signal_ends_all_processes_at_once(tmp_path, fault_result):
    with starting(tmp_path) as service:
        clients = service.in_flight(streams=8, answers=0)
        processes, _ = stop(service)
        time.sleep(0.5)
        again = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        check_ended(service, processes, within=5)
        fault_result.seconds = time.monotonic() - again
        for client in clients:
            client.join()
            assert client.broken
        fault_result.errors = f"{len(clients)} of {len(clients)} connections broke"
