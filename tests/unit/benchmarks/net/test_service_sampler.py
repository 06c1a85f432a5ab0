from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import psutil
import pytest

from benchmarks.net.service_sampler import CpuClock, ServiceSampler, read
from tests.http_servers import answering
from tests.waiting import wait_until

BURN = "import time\nwhile time.process_time() < {}: pass\n"
WAIT = BURN + "print(flush=True)\ninput()"


def test_read_sums_counters_and_keeps_oldest_version():
    text = """# TYPE osd_busy_seconds counter
osd_busy_seconds_total{domain="a"} 1.5
osd_busy_seconds_total{domain="b"} 2.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 7
# TYPE osd_drafter_version gauge
osd_drafter_version{domain="a",replica="1"} 12
osd_drafter_version{domain="a",replica="2"} 9
osd_drafter_version{domain="b",replica="1"} 3
# TYPE osd_running_requests gauge
osd_running_requests{domain="a",replica="1"} 5
"""
    counters, versions = read(text)
    assert counters == {"osd_busy_seconds": 3.5, "vllm:spec_decode_num_draft_tokens": 7.0}
    assert versions == {"a": 9, "b": 3}


def test_cpu_clock_counts_descendants_after_their_end():
    clock = CpuClock()
    before = clock.read()
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT.format(0.3)!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", child], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        spent = clock.read() - before
        assert spent > 0.25
        assert CpuClock(process.pid).read() >= spent
        process.communicate("\n")
    assert not psutil.pid_exists(process.pid)
    assert clock.read() - before >= spent
    start = time.process_time()
    while time.process_time() < start + 0.3:
        pass
    assert clock.read() - before < spent + 0.25  # this process is left out


@pytest.fixture
def service() -> Iterator[ThreadingHTTPServer]:
    """Counts its requests, refuses some of them, and asks for a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.looks += 1  # type: ignore[attr-defined]
            right = self.headers["Authorization"] == "Bearer secret" and self.path == "/metrics"
            refused = server.looks in server.refused  # type: ignore[attr-defined]
            self.send_response(503 if refused else 200 if right else 401)
            self.end_headers()
            self.wfile.write(f"# TYPE looks counter\nlooks_total {server.looks}\n".encode())  # type: ignore[attr-defined]

    with answering(Handler) as server:
        server.looks, server.refused = 0, ()  # type: ignore[attr-defined]
        yield server


def sampler(service: ThreadingHTTPServer, key: str = "secret", **seconds: float) -> ServiceSampler:
    options = {"interval_seconds": 0.05, "settle_seconds": 0.2, **seconds}
    return ServiceSampler(f"http://127.0.0.1:{service.server_port}", key, **options)


def request_numbers(sampler: ServiceSampler) -> list[float]:
    return [sample.count("looks") for sample in sampler.samples]


def test_sampler_samples_until_the_last_counters(service):
    service.refused = (3,)
    with sampler(service) as sampling:
        assert request_numbers(sampling) == [1.0]
        wait_until(lambda: service.looks >= 4)
        last_seconds = sampling.samples[-1].seconds
    assert request_numbers(sampling) == [float(look) for look in range(1, service.looks + 1) if look != 3]
    assert sampling.samples[-1].seconds >= 0.2 + last_seconds
    assert sampling.samples[0].count("never told") == 0.0


def test_first_and_last_sample_must_succeed(service):
    with sampler(service, interval_seconds=60.0) as sampling:
        pass
    assert request_numbers(sampling) == [1.0, 2.0]
    service.refused = (4,)
    with pytest.raises(httpx2.HTTPError), sampler(service, interval_seconds=60.0):
        pass
    with pytest.raises(httpx2.HTTPError), sampler(service, "wrong"):
        raise AssertionError("entered")


def test_sampler_does_not_wait_after_an_error(service):
    with pytest.raises(KeyError), sampler(service, settle_seconds=-1.0):  # a negative sleep would raise ValueError
        raise KeyError
