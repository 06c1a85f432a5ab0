"""``osd up`` is told to stop while it serves."""

from __future__ import annotations

import json
import signal
import time

import httpx2
import pytest

from tests.clients import told
from tests.command import family, gone
from tests.up import starting

pytestmark = pytest.mark.soak

STOPPED = 130
LATE_SECONDS = 20
"""Beyond ``serving.drain_s``, in which everything ends."""


def stop(service) -> tuple[list, float]:
    """Tell it to stop: all its processes, and when it was told."""
    processes = family(service.process.pid)
    service.process.send_signal(signal.SIGTERM)
    return processes, time.monotonic()


def ended(service, processes, within: float = 120) -> str:
    """What it said, when it has ended as promised."""
    _, errors = service.process.communicate(timeout=within)
    assert service.process.returncode == STOPPED
    assert "Traceback" not in errors
    assert gone(processes)
    return errors


def asked(service, method: str, path: str) -> httpx2.Response | None:
    """The answer, None without a connection."""
    body = {"json": {"prompt": "a", "max_tokens": 1}} if method == "POST" else {}
    try:
        return httpx2.request(method, f"{service.url}{path}", timeout=30, **body)
    except httpx2.TransportError:
        return None


@pytest.mark.fault(
    "`osd up` gets a stop signal under load",
    "running answers end complete, new requests and /health get 503 with Retry-After; exit code 130; no "
    "process remains",
)
def test_running_answers_end_whole_and_new_ones_are_refused(tmp_path, aftermath):
    with starting(tmp_path, **{"serving.drain_s": 200}) as service:
        clients = service.in_flight(streams=4, others=2)
        processes, told_at = stop(service)
        refused, refused_at = 0, 0.0
        while service.process.poll() is None:
            for method, path in [("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/health")]:
                answer = asked(service, method, path)
                if answer is not None and (refused or answer.status_code != 200):
                    refused_at = refused_at or time.monotonic()
                    refused += 1
                    assert answer.status_code == 503
                    assert json.loads(answer.content)["error"]["type"] == "server_error"
                    assert answer.headers["retry-after"].isdecimal()
        aftermath.seconds = time.monotonic() - told_at
        assert refused_at - told_at < 3
        assert max(client.ended_at for client in clients) > refused_at + 1, "they ran while others were refused"
        assert [client.error() for client in clients] == [None] * len(clients)
        aftermath.errors, aftermath.lost = told(clients), "nothing"
        said = ended(service, processes)
    assert "drained after" in said
    assert "ended with an error" not in said
    assert not (tmp_path / "home" / "running.json").exists()


@pytest.mark.fault(
    "answers take longer than `serving.drain_s` after a stop signal to `osd up`",
    "streams end with an error event and [DONE], other answers with 503; all processes end within 20 s more",
)
def test_what_runs_too_long_ends_with_an_error(tmp_path, aftermath):
    with starting(tmp_path, **{"serving.drain_s": 0.5}) as service:
        clients = service.in_flight(streams=8, others=4)
        processes, told_at = stop(service)
        errors = [client.error() for client in clients]
        assert {error["message"] for error in errors} == {"The server is stopping."}
        aftermath.errors = told(clients)
        said = ended(service, processes, LATE_SECONDS)
        aftermath.seconds = time.monotonic() - told_at
    assert f", {len(clients)} requests ended with an error" in said


@pytest.mark.fault(
    "a replica hangs, or has just died, when `osd up` gets a stop signal",
    "all processes end within 20 s more than `serving.drain_s`",
)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_replica_that_cannot_be_drained_holds_nobody_up(tmp_path, aftermath, how):
    with starting(tmp_path, **{"serving.drain_s": 1}) as service:
        clients = service.in_flight(streams=8, others=4)
        service.workers("ServeReplica")[0].send_signal(how)
        processes, told_at = stop(service)
        ended(service, processes, 1 + LATE_SECONDS)
        aftermath.seconds = time.monotonic() - told_at
        for client in clients:
            client.join()
        broken = sum(bool(client.broken) for client in clients)
        aftermath.errors = f"{broken} of {len(clients)} connections broke, the others got an error"


@pytest.mark.fault("a second signal arrives while requests drain", "every process ends at once")
def test_a_second_signal_waits_for_no_request(tmp_path, aftermath):
    with starting(tmp_path) as service:
        clients = service.in_flight(streams=8, others=0)
        processes, _ = stop(service)
        time.sleep(0.5)
        again = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        ended(service, processes, within=5)
        aftermath.seconds = time.monotonic() - again
        for client in clients:
            client.join()
            assert client.broken
        aftermath.errors = f"{len(clients)} of {len(clients)} connections broke"
