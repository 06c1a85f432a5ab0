"""Clients that leave, vanish or stall at each stage of a request: their resources are freed, and others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.clients import LONG
from tests.up import SLOTS, Up, starting
from tests.waiting import wait_until

pytestmark = pytest.mark.soak

_TCP_REPAIR = 19
AT_ONCE_SECONDS = 5
"""Time until a replica reports that a request was cancelled; the longest answers take longer."""
"""Socket option of linux/tcp.h: a socket closed with it sends nothing to the peer."""


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Up]:
    with starting(tmp_path_factory.mktemp("service"), **{"serving.body_timeout_s": 2}) as up:
        yield up


def hang_up(connection: socket.socket) -> None:
    """Close with FIN."""
    connection.close()


def reset(connection: socket.socket) -> None:
    """Close with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def vanish(connection: socket.socket) -> None:
    """Close without a packet."""
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    connection.close()


DISCONNECTS: tuple[Callable[[socket.socket], None], ...] = (hang_up, reset, vanish)


def request(**fields: object) -> bytes:
    """Return the bytes of a completion request."""
    body = json.dumps({"prompt": "hello", "ignore_eos": True, "max_tokens": LONG, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_until(connection: socket.socket, text: bytes) -> None:
    """Read until ``text`` has arrived."""
    received = b""
    while text not in received:
        part = connection.recv(65536)
        assert part, received
        received = received[-len(text) :] + part


@contextlib.contextmanager
def full(service: Up) -> Iterator[None]:
    """Occupy all slots during the context."""
    clients = service.in_flight(2 * SLOTS, 0)
    yield
    assert [client.error() for client in clients] == [None] * len(clients)


def send_until(connection: socket.socket, stage: str, stream: bool) -> None:
    """Bring a request to the stage at which its client leaves."""
    data = request(stream=stream)
    connection.sendall(
        {
            "after it connected": b"",
            "in its head": data[:60],
            "in its body": data[:-20],
            "while its prompt is read": request(stream=stream, prompt="x" * 1000, max_tokens=16),
            "at its end": request(stream=stream, max_tokens=8),
        }.get(stage, data)
    )
    if stage == "at its end":
        read_until(connection, b'"finish_reason":"length"')
    elif stage == "while it decodes" and stream:
        read_until(connection, b"data: ")
    elif stage == "while it decodes":
        time.sleep(0.5)


def has_cancelled(service: Up, count: float) -> bool:
    """Return whether the replicas have reported the cancellation of ``count`` requests."""
    return service.metric("osd_cancelled_requests_total") >= count


STAGES = (
    "after it connected", "in its head", "in its body", "while it waits", "while its prompt is read",
    "while it decodes", "at its end",
)  # fmt: skip


@pytest.mark.fault(
    "a client leaves at any stage of a request, with FIN, with RST or silently",
    "its slots are freed: at once after FIN or RST, otherwise when its answer has ended",
    process="replica, proxy: clients that close, reset or drop connections",
)
@pytest.mark.parametrize("stage", STAGES)
def test_disconnected_client_frees_its_slot_and_place(service, fault_result, stage):
    service.wait_until_free()
    began, cancelled = time.monotonic(), service.metric("osd_cancelled_requests_total")
    with full(service) if stage == "while it waits" else contextlib.nullcontext():
        for disconnect in DISCONNECTS:
            for stream in (True, False):
                connection = socket.create_connection(("127.0.0.1", service.port), timeout=60)
                send_until(connection, stage, stream)
                disconnect(connection)
                if stage == "while it decodes" and disconnect is not vanish:
                    cancelled += 1
                    wait_until(partial(has_cancelled, service, cancelled), AT_ONCE_SECONDS)
    service.wait_until_free()
    fault_result.seconds = time.monotonic() - began
    fault_result.errors = "none for other clients"


@pytest.mark.fault(
    "clients do not read their streams",
    "their slots are freed when their answers have ended; other clients are served",
    process="replica, proxy: 16 connections that are not read",
)
def test_stalled_reader_delays_no_other_client(service, fault_result):
    service.wait_until_free()
    with contextlib.ExitStack() as stalled:
        for _ in range(2 * SLOTS):
            connection = stalled.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", service.port))
            connection.sendall(request(stream=True, logprobs=5))
        began = time.monotonic()
        assert service.complete().status_code == 200
        service.wait_until_free()
        fault_result.seconds = time.monotonic() - began
    fault_result.errors = "none for other clients"
