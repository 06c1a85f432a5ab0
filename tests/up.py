"""``osd up`` with two replicas that decode slowly, so that faults hit requests in flight."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.clients import Service
from tests.command import osd, wait_until_it_answers
from tests.redis_servers import free_port
from tests.tiny import make_tiny
from tests.waiting import wait_until

LAYERS = 96
SLOTS = 8
PLACES = 12
"""Length of a replica's queue."""


@dataclass
class Up(Service):
    """Running ``osd up``."""

    process: subprocess.Popen[str]

    def workers(self, kind: str) -> list[psutil.Process]:
        """Return the processes of one kind of Serve actor: ServeReplica or ProxyActor."""
        workers = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and f"ray::{kind}" in " ".join(process.cmdline()):
                    workers.append(process)
        return workers

    def wait_until_free(self) -> None:
        """Wait until all replicas are idle and all their places are free."""
        wait_until(lambda: not any(self.loads().values()) and self._has_all_places(), every=0.1)

    def _has_all_places(self) -> bool:
        """Return whether requests that each need all places of one replica are accepted."""
        answers = (self.complete(prompt=["hello"] * PLACES) for _ in range(8))
        return all(answer.status_code == 200 for answer in answers)


@contextlib.contextmanager
def starting(folder: Path, *, replicas: int = 2, key: str = "", **settings: object) -> Iterator[Up]:
    """Start ``osd up`` and wait for its replicas; ``key`` is the key of the requests, if the settings have keys."""
    port = free_port()
    options = {
        "target.source": make_tiny(folder / "tiny", layers=LAYERS), "target.dtype": "float32", "engine.slots": SLOTS,
        "engine.context": 1024, "engine.threads": 1, "drafter.kind": "none", "serving.port": port,
        "serving.replicas": replicas, "serving.max_queue": PLACES, **settings,
    }  # fmt: skip
    arguments = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
    with osd(folder / "home", "up", *arguments) as process:
        wait_until_it_answers(process, port)
        up = Up(port, process, headers={"authorization": f"Bearer {key}"} if key else {})
        wait_until(lambda: len(up.loads()) == replicas, every=0.1)  # one replica reports all loads
        yield up
