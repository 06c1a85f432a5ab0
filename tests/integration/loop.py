"""Environment of a trainer for tests: a home, a registry, a writer of traces, and a worker."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from tests.pointers import put
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace
from tests.waiting import HANG_SECONDS, wait_until
from trainer.executor import Executor, TargetContext
from trainer.worker import Worker


def settings_of(home: Path, **trainer: Any) -> Settings:
    """Return the settings of a trainer that learns quickly from few records."""
    defaults = {
        "learning_rate": 0.03, "steps_per_candidate": 25, "min_records": 8, "held_out": 0.3, "micro_batch_tokens": 64,
        "update_tokens": 1,
    }  # fmt: skip
    return Settings(
        home=home,
        target={"source": "toy"},  # type: ignore[arg-type]
        trainer={**defaults, **trainer},  # type: ignore[arg-type]
        capture={"max_records": 2000},  # type: ignore[arg-type]
    )


class Loop:
    """Home, registry and trace writer, with one worker at a time."""

    def __init__(self, url, home, **trainer):
        self.settings, self.url = settings_of(home, **trainer), url
        self.registry, self.events = Registry(home / "registry"), Events(url)
        self.pointer = Pointer(url, home / "registry")
        self.writer = TraceWriter(url, self.settings.capture.model_copy(update={"max_queue": 2000}))
        self.worker: Worker | None = None
        self.thread: threading.Thread | None = None
        self.sent = 0
        self.build, self.target = Toy, TARGET
        self.executor = Executor()

    def first_version(self, drafter=None):
        torch.manual_seed(0)
        drafter = drafter or Toy()
        number = self.registry.publish("general", drafter.weights(), drafter.config(), {})
        self.point(number)
        return number

    def point(self, number):
        put(self.pointer, "general", Rollout(number, None, 0.0, time.time()))

    def send(self, count, **changes):
        for n in range(self.sent, self.sent + count):
            assert self.writer.offer(make_trace(f"request-{n}", completion=30, seed=n, **changes))
        self.sent += count
        wait_until(lambda: sum(self.writer.counters().values()) >= self.sent)

    def start(self):
        context = TargetContext(self.target, VOCABULARY, HIDDEN, lambda config: self.build(), self.executor)
        self.worker = Worker(self.settings, self.url, context)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        return self.worker

    def begin(self, records=40, drafter=None):
        """Publish a first version, send records, and start a worker."""
        self.first_version(drafter)
        self.send(records)
        return self.start()

    def publish(self, versions):
        """Wait until the worker has published ``versions`` versions; send more records when it has used all."""

        def published():
            status = self.worker.status()
            if "waiting for new records" in status["detail"]:
                self.send(10)
            return status["published"] >= versions

        wait_until(published, what=f"{versions} published versions")

    def stop(self):
        if self.worker is not None and self.thread is not None:
            self.worker.stop()
            self.thread.join(HANG_SECONDS)
            assert not self.thread.is_alive()
            self.worker = None

    def close(self):
        self.stop()
        self.writer.close()
        for part in (self.pointer, self.events):
            part.close()
