"""One of several trainers that divide their domains, in its own process, which logs its actions.

Arguments are the URL of Redis, a home, and a file. The file gets one line of JSON per action: ``had`` when a domain's
lease was taken, ``begins`` and ``ends`` around each micro-step, with the number of the lease and the monotonic time,
which is the same for all processes of a machine. The process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from osd.config import Settings
from osd.learning.online import Learner
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy
from trainer.domain_workers import DomainWorkers
from trainer.executor import TargetContext
from trainer.worker import Worker

DOMAINS = tuple(f"domain-{n:02}" for n in range(20))


def settings(home: Path) -> Settings:
    """Return the settings of two trainers with twenty domains."""
    trainer: Any = {
        "processes": 2, "extra_domains": DOMAINS[1:], "learning_rate": 0.03, "steps_per_candidate": 25,
        "min_records": 8, "held_out": 0.3, "micro_batch_tokens": 64, "update_tokens": 1, "tracking": "none",
    }  # fmt: skip
    capture: Any = {"max_records": 2000, "max_queue": 2000}
    return Settings(home=home, domain=DOMAINS[0], target={"source": "toy"}, trainer=trainer, capture=capture)  # type: ignore[arg-type]


class ActionLog:
    """Log of actions that survives a kill, as each line is written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, worker: Worker, action: str) -> None:
        """Write one action."""
        line = {"domain": worker.domain, "fence": worker.lease.fence, "what": action, "at": time.monotonic()}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def main() -> None:
    url, home, path = sys.argv[1:]
    log = ActionLog(path)
    opens, trains = Worker._open, Worker._train

    def open_(worker: Worker) -> Learner | None:
        learner = opens(worker)
        if learner is not None:
            log.write(worker, "had")
        return learner

    def train(worker: Worker, learner: Learner) -> None:
        """Log each micro-step, and not the wait before it."""
        step: Any = learner.step

        def logged_step(*arguments: Any) -> Any:
            log.write(worker, "begins")
            learned = step(*arguments)
            log.write(worker, "ends")
            return learned

        learner.step = logged_step  # type: ignore[method-assign]
        try:
            trains(worker, learner)
        finally:
            learner.step = step  # type: ignore[method-assign]

    Worker._open, Worker._train = open_, train  # type: ignore[method-assign]
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    workers = DomainWorkers(settings(Path(home)), url, context)
    threading.Thread(target=lambda: (sys.stdin.read(), workers.stop()), daemon=True).start()
    print("ready", flush=True)
    workers.run()


if __name__ == "__main__":
    main()
