"""``osd up`` with two replicas that decode slowly, so that what is done to them finds requests in flight."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.clients import Asking
from tests.command import osd, wait_until_it_answers
from tests.redis_servers import free_port
from tests.tiny import make_tiny

LAYERS = 96
SLOTS = 8
PLACES = 12
"""In the queue of one replica."""
LONG = 900
"""Tokens that take seconds."""
_MOMENT_SECONDS, _ARRIVED_SECONDS = 0.1, 5.0


@dataclass
class Up:
    """``osd up``, running."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self, kind: str) -> list[psutil.Process]:
        """The processes of one kind of Serve's actors: ServeReplica, ProxyActor."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def in_flight(self, streams: int, others: int) -> list[Asking]:
        """Long completions that have begun, one after the other, so that each replica gets its share."""
        clients = []
        for stream in [True] * streams + [False] * others:
            clients.append(Asking(self.url, max_tokens=LONG, stream=stream))
            clients[-1].begun.wait(60 if stream else _MOMENT_SECONDS)
        assert all(client.begun.is_set() for client in clients[:streams])
        deadline = time.monotonic() + _ARRIVED_SECONDS
        while sum(self.loads().values()) < len(clients):  # of the others nobody else says that they have come
            assert time.monotonic() < deadline, f"only {self.loads()} of {len(clients)}"
        return clients

    def complete(self, **fields: Any) -> httpx2.Response:
        body = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def loads(self) -> dict[str, int]:
        """For each replica that reports, how many sequences it decodes or has waiting."""
        replicas = httpx2.get(f"{self.url}/dashboard/data", timeout=30).raise_for_status().json()["replicas"]
        return {replica["name"]: replica["running"] + replica["waiting"] for replica in replicas}

    def metric(self, name: str) -> float:
        text = httpx2.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def wait_until_free(self, seconds: float = 20) -> None:
        """Wait until no replica has anything to do, and each has all its places."""
        deadline = time.monotonic() + seconds
        while any(self.loads().values()) or not self._has_all_places():
            assert time.monotonic() < deadline, f"still {self.loads()}"
            time.sleep(0.1)

    def _has_all_places(self) -> bool:
        """Whether requests that need all places of a replica are taken, of which each gets some."""
        answers = (self.complete(prompt=["hello"] * PLACES) for _ in range(8))
        return all(answer.status_code == 200 for answer in answers)


@contextlib.contextmanager
def starting(folder: Path, **settings: object) -> Iterator[Up]:
    port = free_port()
    given = {
        "target.source": make_tiny(folder / "tiny", layers=LAYERS),
        "target.dtype": "float32",
        "engine.slots": SLOTS,
        "engine.context": 1024,
        "engine.threads": 1,
        "drafter.kind": "none",
        "serving.port": port,
        "serving.replicas": 2,
        "serving.max_queue": PLACES,
        **settings,
    }
    arguments = [argument for key, value in given.items() for argument in ("--set", f"{key}={value}")]
    with osd(folder / "home", "up", *arguments) as process:
        wait_until_it_answers(process, port)
        up = Up(process, port)
        while len(up.loads()) < 2:  # one answers for both
            time.sleep(0.1)
        yield up
