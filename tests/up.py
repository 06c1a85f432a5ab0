"""``osd up`` with two replicas that decode slowly, so that what is done to them finds requests in flight."""

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
"""In the queue of one replica."""


@dataclass
class Up(Service):
    """``osd up``, running."""

    process: subprocess.Popen[str]

    def workers(self, kind: str) -> list[psutil.Process]:
        """The processes of one kind of Serve's actors: ServeReplica, ProxyActor."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_until_free(self) -> None:
        """Wait until no replica has anything to do, and each has all its places."""
        wait_until(lambda: not any(self.loads().values()) and self._has_all_places(), every=0.1)

    def _has_all_places(self) -> bool:
        """Whether requests that need all places of a replica are taken, of which each gets some."""
        answers = (self.complete(prompt=["hello"] * PLACES) for _ in range(8))
        return all(answer.status_code == 200 for answer in answers)


@contextlib.contextmanager
def starting(folder: Path, *, replicas: int = 2, **settings: object) -> Iterator[Up]:
    port = free_port()
    given = {
        "target.source": make_tiny(folder / "tiny", layers=LAYERS),
        "target.dtype": "float32",
        "engine.slots": SLOTS,
        "engine.context": 1024,
        "engine.threads": 1,
        "drafter.kind": "none",
        "serving.port": port,
        "serving.replicas": replicas,
        "serving.max_queue": PLACES,
        **settings,
    }
    arguments = [argument for key, value in given.items() for argument in ("--set", f"{key}={value}")]
    with osd(folder / "home", "up", *arguments) as process:
        wait_until_it_answers(process, port)
        up = Up(port, process)
        wait_until(lambda: len(up.loads()) == replicas, every=0.1)  # one answers for both
        yield up
