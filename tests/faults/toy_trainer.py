"""Trainer of toy drafters in its own process.

Arguments are the URL of Redis and the settings as JSON. The process ends with its standard input.
"""

from __future__ import annotations

import sys
import threading

from osd import logs
from osd.config import Settings
from tests.priority import keep_priority
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy
from trainer.domain_workers import DomainWorkers
from trainer.executor import TargetContext


def main() -> None:
    url, settings = sys.argv[1], Settings.model_validate_json(sys.argv[2])
    keep_priority()
    logs.set_up(settings.log, "trainer")
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    workers = DomainWorkers(settings, url, context)
    threading.Thread(target=lambda: (sys.stdin.read(), workers.stop()), daemon=True).start()
    print("ready", flush=True)
    workers.run()


if __name__ == "__main__":
    main()
