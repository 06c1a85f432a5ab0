"""Trainers with a canary that end or stop before a write.

Orders are ``{"url", "home", "signal", "before"}``, answers ``{"signal", "writes", "lost"}`` when the run ended, which
it does by itself when it has promoted two canaries, or nothing more can come. ``writes`` are the
places in the code, with those that called them, that wrote to disk or to Redis while the trainer began, published,
decided on a canary, saved and reported; at the first that ends with ``before`` the process sends itself the
signal. ``lost`` is why another trainer has its domain.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
from redis import Redis
from redis.client import Pipeline

from osd.capture.trace import ACCEPTED, Trace
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.registry import lease
from osd.registry.pointer_file import FencedError
from tests.integration.killed import settings
from tests.killer import Sections, obey
from tests.priority import keep_priority
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace, with_drafts
from trainer import reporter
from trainer import worker as worker_module
from trainer.canary import FEWEST_RECORDS
from trainer.executor import TargetContext
from trainer.publisher import Publisher
from trainer.reporter import CostMeter
from trainer.worker import Worker

SECONDS, CALM_SECONDS = 20.0, 0.3
COMPLETION = 30

FIRST = 3
"""The version in service when a run begins; those before it are to be removed."""

ROOT = Path(__file__).parents[2]
_CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.utime"}
_COMMANDS = {"SET", "XACK"}


def with_canaries(home: Path) -> Settings:
    chosen = settings(home)
    trainer = chosen.trainer.model_copy(update={"canary_share": 0.5, "canary_seconds": 60.0})
    registry = chosen.registry.model_copy(update={"keep": 1})
    return chosen.model_copy(update={"trainer": trainer, "registry": registry})


def proof(canary: int, version: int, number: int) -> Trace:
    """A live request beside a ``canary`` of which every token was drafted by ``version`` and kept."""
    name = f"{os.getpid()}-{canary}-{version}-{number}"
    trace = make_trace(name, completion=COMPLETION, seed=1000 * version + number)
    verdict = np.full(COMPLETION, ACCEPTED)
    trace = with_drafts(trace, trace.completion_ids.numpy(), verdict)
    return msgspec.structs.replace(trace, drafter_version=version)


class Writes(Sections):
    """The places from which the main thread writes within the sections; at one of them the process gets a signal."""

    def __init__(self, number: int, before: str) -> None:
        self.number, self.at = number, before
        self.places: dict[str, None] = {}
        self._thread = threading.get_ident()
        sys.addaudithook(self._audit)
        self._wrap(os, "fsync", lambda descriptor: "fsync")
        self._wrap(Redis, "execute_command", lambda client, name, *rest: name if name in _COMMANDS else "")
        self._wrap(Pipeline, "execute", lambda pipeline, *rest: "pipeline")

    def before(self, what: str) -> None:
        if not what or not self.inside or threading.get_ident() != self._thread:
            return
        place = f"{what}: {' > '.join(_lines(sys._getframe()))}"
        self.places[place] = None
        if self.at and place.endswith(self.at):
            self.at = ""
            os.kill(os.getpid(), self.number)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        makes = event == "os.mkdir" or (event == "open" and bool(arguments[2] & os.O_CREAT))
        if (event in _CHANGING or makes) and os.path.exists(arguments[0]) != makes:
            self.before(event)

    def _wrap(self, owner: Any, name: str, named: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **more: Any) -> Any:
            self.before(named(*arguments))
            return method(*arguments, **more)

        setattr(owner, name, wrapped)


def _lines(frame: FrameType | None) -> list[str]:
    """Where in osd a frame is, and what called it since the section began, the caller first."""
    found = []
    while frame is not None and frame.f_code.co_name != "watched":
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            found.append(f"{file.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return found[::-1]


def run(url: str, home: str, signal: int, before: str) -> dict[str, Any]:
    worker_module.CHECKPOINT_SECONDS, reporter.LEDGER_SECONDS, lease.SILENT_SECONDS = 0.05, 0.0, 1.0
    writes = Writes(signal, before)
    for owner, name in (
        (Worker, "_open"), (Publisher, "propose"), (Publisher, "decide"), (Worker, "checkpoint"), (CostMeter, "tell")
    ):  # fmt: skip
        writes.watch(owner, name)
    chosen = with_canaries(Path(home))
    worker = Worker(chosen, url, TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy()))
    traffic = TraceWriter(url, chosen.capture.model_copy(update={"max_queue": 1000}))

    def end() -> None:
        begun = busy = time.monotonic()
        shown = sent = 0
        while (now := time.monotonic()) < begun + SECONDS:
            canary, status = worker.publisher.canary, worker.status()
            if canary is not None and canary.version != shown and status["version"] <= FIRST + 1:
                shown = canary.version
                for number in range(2 * FEWEST_RECORDS):
                    for version in (canary.version, canary.stable):
                        sent += traffic.offer(proof(canary.version, version, number))
            arrived = traffic.counters()["written"] == sent
            acknowledged = arrived and not worker.intake.finished and worker.intake.waiting().records == 0
            if not acknowledged or canary is not None or status["state"] != "waiting":
                busy = now
            if acknowledged and (status["version"] > FIRST + 1 or now - busy > CALM_SECONDS):
                break
            time.sleep(0.02)
        worker.stop()

    threading.Thread(target=end, daemon=True).start()
    lost = ""
    try:
        worker.run()
    except FencedError as error:
        lost = str(error)
    return {"writes": list(writes.places), "lost": lost}


if __name__ == "__main__":
    keep_priority()
    obey(run)
