"""Trainers that kill themselves at a line of code.

Orders are ``{"url", "home", "kill_at"}``, and answers are ``{"signal", "lines"}``. With ``kill_at`` 0 a run ends when
all records are acknowledged and a version was published, or no more versions can follow. ``lines`` counts the executed
lines of publishing and saving, at which a run can be killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from osd.config import Settings
from tests.killer import Sections, run_orders
from tests.priority import keep_priority
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy
from trainer import worker as worker_module
from trainer.executor import TargetContext
from trainer.publisher import Publisher
from trainer.worker import Worker

FILES = ("trainer/rollout.py", "trainer/publisher.py", "trainer/checkpoint.py", "trainer/reporter.py",
         "trainer/state.py", "trainer/intake.py", "osd/registry/versions.py", "osd/files.py",
         "osd/registry/pointer.py", "osd/registry/pointer_file.py", "osd/registry/local_storage.py",
         "osd/registry/lease.py", "osd/registry/retention.py", "osd/registry/history.py")  # fmt: skip
SECONDS, CALM_SECONDS = 120.0, 0.3


def settings(home: Path) -> Settings:
    trainer = {
        "learning_rate": 0.03, "steps_per_candidate": 10, "min_records": 8, "held_out": 0.3, "micro_batch_tokens": 64,
        "update_tokens": 1, "tracking": "none",
    }  # fmt: skip
    capture = {"max_records": 2000}
    return Settings(home=home, target={"source": "toy"}, trainer=trainer, capture=capture)  # type: ignore[arg-type]


class Lines(Sections):
    """Counter of the executed lines in the sections, which kills the process at line ``kill_at``."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.count = kill_at, 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line" and self.inside:
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def run(url: str, home: str, kill_at: int) -> dict[str, int]:
    worker_module.CHECKPOINT_SECONDS = 0.05
    lines = Lines(kill_at)
    lines.watch(Publisher, "propose")
    lines.watch(Worker, "checkpoint")
    worker = Worker(settings(Path(home)), url, TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy()))

    def end() -> None:
        started = busy = time.monotonic()
        while (now := time.monotonic()) < started + SECONDS:
            status = worker.status()
            acknowledged = not worker.intake.finished and worker.intake.waiting().records == 0
            if not acknowledged or status["state"] != "waiting":
                busy = now
            if acknowledged and (status["version"] > 1 or now - busy > CALM_SECONDS):
                break
            time.sleep(0.02)
        worker.stop()

    threading.Thread(target=end, daemon=True).start()
    sys.settrace(lines.trace)
    worker.run()
    sys.settrace(None)
    return {"lines": lines.count}


if __name__ == "__main__":
    keep_priority()
    run_orders(run)
