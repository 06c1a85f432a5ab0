"""One of several trainers that share their domains, in a process of its own, which writes down what it does.

Started with the URL of Redis, a home, and a file. Of each domain there is a line of JSON in the file: when it took the
lease (``had``), and before and after each micro-step (``begins``, ``ends``), with the number of the lease and
the monotonic time, which all processes of a machine share. It ends when its standard input does.
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
    trainer: Any = {
        "processes": 2, "extra_domains": DOMAINS[1:], "learning_rate": 0.03, "steps_per_candidate": 25,
        "min_records": 8, "held_out": 0.3, "micro_batch_tokens": 64, "update_tokens": 1, "tracking": "none",
    }  # fmt: skip
    capture: Any = {"max_records": 2000, "max_queue": 2000}
    return Settings(home=home, domain=DOMAINS[0], target={"source": "toy"}, trainer=trainer, capture=capture)  # type: ignore[arg-type]


class Diary:
    """Lines that outlive the process: each is written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, worker: Worker, what: str) -> None:
        line = {"domain": worker.domain, "fence": worker.lease.fence, "what": what, "at": time.monotonic()}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def main() -> None:
    url, home, path = sys.argv[1:]
    diary = Diary(path)
    opens, trains = Worker._open, Worker._train

    def open_(worker: Worker) -> Learner | None:
        learner = opens(worker)
        if learner is not None:
            diary.write(worker, "had")
        return learner

    def train(worker: Worker, learner: Learner) -> None:
        diary.write(worker, "begins")
        trains(worker, learner)
        diary.write(worker, "ends")

    Worker._open, Worker._train = open_, train  # type: ignore[method-assign]
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    workers = DomainWorkers(settings(Path(home)), url, context)
    threading.Thread(target=lambda: (sys.stdin.read(), workers.stop()), daemon=True).start()
    print("ready", flush=True)
    workers.run()


if __name__ == "__main__":
    main()
