"""Trainers with a canary that kill or stop themselves before a write.

Orders are ``{"url", "home", "signal", "before"}``; answers are ``{"signal", "writes", "lost"}``. A run ends by itself
after two promoted canaries, or when it is idle. ``writes`` are the code locations, with their callers, that wrote to
the disk or to Redis while the trainer opened, published, decided on a canary, saved or reported. At the first location
that ends with ``before`` the process sends itself the signal. ``lost`` is the error when another trainer took over.
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
from tests.killer import Sections, run_orders
from tests.priority import keep_priority
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace, with_drafts
from trainer import reporter
from trainer import worker as worker_module
from trainer.canary import FEWEST_RECORDS
from trainer.executor import TargetContext
from trainer.publisher import Publisher
from trainer.reporter import TrainingReporter
from trainer.worker import Worker

SECONDS, CALM_SECONDS = 20.0, 0.3
COMPLETION = 30

FIRST = 3
"""Stable version at the start of a run; retention removes the versions before it."""

ROOT = Path(__file__).parents[2]
_CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.utime"}
_COMMANDS = {"SET", "XACK"}


def with_canaries(home: Path) -> Settings:
    """Return settings with canaries, which keep one version."""
    base = settings(home)
    trainer = base.trainer.model_copy(update={"canary_share": 0.5, "canary_seconds": 60.0})
    registry = base.registry.model_copy(update={"keep": 1})
    return base.model_copy(update={"trainer": trainer, "registry": registry})


def proof(canary: int, version: int, number: int) -> Trace:
    """Return a live request during a ``canary``; ``version`` drafted all its tokens, and all were accepted."""
    name = f"{os.getpid()}-{canary}-{version}-{number}"
    trace = make_trace(name, completion=COMPLETION, seed=1000 * version + number)
    verdict = np.full(COMPLETION, ACCEPTED)
    trace = with_drafts(trace, trace.completion_ids.numpy(), verdict)
    return msgspec.structs.replace(trace, drafter_version=version)


class Writes(Sections):
    """Locations from which the main thread writes within the sections; before one write the process gets a signal."""

    def __init__(self, number: int, before: str) -> None:
        self.number, self.at = number, before
        self.places: dict[str, None] = {}
        self._thread = threading.get_ident()
        sys.addaudithook(self._audit)
        self._wrap(os, "fsync", lambda descriptor: "fsync")
        self._wrap(Redis, "execute_command", lambda client, name, *rest: name if name in _COMMANDS else "")
        self._wrap(Pipeline, "execute", lambda pipeline, *rest: "pipeline")

    def before(self, operation: str) -> None:
        """Record a write, and send the signal before it when it is the chosen one."""
        if not operation or not self.inside or threading.get_ident() != self._thread:
            return
        place = f"{operation}: {' > '.join(_lines(sys._getframe()))}"
        self.places[place] = None
        if self.at and place.endswith(self.at):
            self.at = ""
            os.kill(os.getpid(), self.number)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        creates = event == "os.mkdir" or (event == "open" and bool(arguments[2] & os.O_CREAT))
        if (event in _CHANGING or creates) and os.path.exists(arguments[0]) != creates:
            self.before(event)

    def _wrap(self, owner: Any, name: str, operation: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.before(operation(*arguments))
            return method(*arguments, **options)

        setattr(owner, name, wrapped)


def _lines(frame: FrameType | None) -> list[str]:
    """Return the code location of a frame with its callers since the start of the section, outermost first."""
    locations = []
    while frame is not None and frame.f_code.co_name != "watched":
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            locations.append(f"{file.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return locations[::-1]


def run(url: str, home: str, signal: int, before: str) -> dict[str, Any]:
    """Run a trainer for one order."""
    worker_module.CHECKPOINT_SECONDS, reporter.REPORT_SECONDS, lease.SILENT_SECONDS = 0.05, 0.0, 1.0
    writes = Writes(signal, before)
    for owner, name in (
        (Worker, "_open"), (Publisher, "propose"), (Publisher, "decide_canary"), (Worker, "checkpoint"),
        (TrainingReporter, "report"),
    ):  # fmt: skip
        writes.watch(owner, name)
    chosen = with_canaries(Path(home))
    worker = Worker(chosen, url, TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy()))
    traffic = TraceWriter(url, chosen.capture.model_copy(update={"max_queue": 1000}))

    def end() -> None:
        began = busy = time.monotonic()
        proven = sent = 0
        while (now := time.monotonic()) < began + SECONDS:
            canary, status = worker.publisher.canary, worker.status()
            if canary is not None and canary.version != proven and status["version"] <= FIRST + 1:
                proven = canary.version
                for number in range(2 * FEWEST_RECORDS):
                    for version in (canary.version, canary.stable):
                        sent += traffic.offer(proof(canary.version, version, number))
            written = traffic.counters()["written"] == sent
            acknowledged = written and not worker.intake.finished and worker.intake.waiting().records == 0
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
    run_orders(run)
