"""The workers of several domains in one trainer: they share its time, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from osd.config import Settings
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import TargetContext
from trainer.worker import Worker


class DomainWorkers:
    """One worker for each domain of ``trainer.extra_domains`` beside that of ``domain``, each in a thread of its own.

    They compute in turns, so that together they take no more than one would, and share ``trainer.replay_tokens``.
    """

    def __init__(self, settings: Settings, redis_url: str, context: TargetContext) -> None:
        domains = dict.fromkeys((settings.domain, *settings.trainer.extra_domains))
        scheduler = DomainScheduler(domains, context.executor.clock)
        tokens = settings.trainer.replay_tokens // len(domains)
        trainer = settings.trainer.model_copy(update={"replay_tokens": tokens})
        self._own = settings.domain
        self._workers: dict[str, Worker] = {}
        for domain in domains:
            mine = settings.model_copy(update={"domain": domain, "trainer": trainer})
            self._workers[domain] = Worker(mine, redis_url, context, scheduler)
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Work until ``stop``; an error in one worker ends all of them, and is raised."""
        threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"trainer-{domain}", daemon=True)
            for domain, worker in self._workers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """End ``run`` after the micro-steps that are under way."""
        self._all(lambda worker: worker.stop())

    def pause(self, timeout: float = 5.0) -> bool:
        """Train no more; True as soon as every worker is at rest, False when one is not within ``timeout`` seconds."""
        return all(self._all(lambda worker: worker.pause(timeout)))

    def resume(self) -> None:
        """Undo ``pause``."""
        self._all(lambda worker: worker.resume())

    def status(self) -> dict[str, Any]:
        """The own domain's ``Status`` as a dict, and those of the others, by domain, under ``extra_domains``."""
        others = {domain: worker.status() for domain, worker in self._workers.items() if domain != self._own}
        return {**self._workers[self._own].status(), "extra_domains": others}

    def _all(self, call: Callable[[Worker], Any]) -> list[Any]:
        return [call(worker) for worker in self._workers.values()]

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            self._errors.append(error)
            self.stop()
