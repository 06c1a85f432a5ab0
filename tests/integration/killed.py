"""Runs trainers that kill themselves: one process imports everything, and forks for every run.

Reads one JSON object a line, ``{"url", "home", "kill_at"}``, and answers ``{"signal", "lines"}`` when the run ended.
With ``kill_at`` 0 a run ends by itself when every record is acknowledged and a version came of it, or nothing more can:
what was acknowledged before the kill does not come again. ``lines`` counts the lines of code that could have been its
last: those of publishing and of saving.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from osd.config import Settings
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


class Lines:
    """Counts the lines that are run in the sections, and kills the process at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.count, self.inside = kill_at, 0, 0

    def watch(self, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            self.inside += 1
            try:
                return method(*arguments)
            finally:
                self.inside -= 1

        setattr(owner, name, watched)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line" and self.inside:
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def run(url: str, home: Path, kill_at: int) -> int:
    worker_module.CHECKPOINT_SECONDS = 0.05
    lines = Lines(kill_at)
    lines.watch(Publisher, "propose")
    lines.watch(Worker, "checkpoint")
    worker = Worker(settings(home), url, TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy()))

    def end() -> None:
        begun = busy = time.monotonic()
        while (now := time.monotonic()) < begun + SECONDS:
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
    return lines.count


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, json.dumps(run(order["url"], Path(order["home"]), order["kill_at"])).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        said = os.read(reading, 100)
        os.close(reading)
        answer = {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "lines": json.loads(said or b"0")}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
