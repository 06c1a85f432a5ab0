"""The workers of several domains in one trainer: they share its time, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from osd.config import Settings
from osd.registry.pointer_file import FencedError
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import TargetContext
from trainer.membership import Share, share_of
from trainer.state import TrainerState
from trainer.worker import Worker

_LOOK_SECONDS = 1.0
_ELSEWHERE = "no domain of this trainer now"


class _Running(NamedTuple):
    """A worker, and the thread that it runs in."""

    worker: Worker
    thread: threading.Thread


class DomainWorkers:
    """One worker for each domain that this trainer has, ``domain`` and ``trainer.extra_domains`` or some of them.

    Each is in a thread of its own. They compute in turns, so that together they take no more than one would, and share
    ``trainer.replay_tokens`` and ``trainer.replay_mb``. A domain that is to go to another trainer is saved first, and
    nothing of it stays in memory.
    """

    def __init__(self, settings: Settings, redis_url: str, context: TargetContext, share: Share | None = None) -> None:
        """Train what ``share`` says, by itself what is this trainer's part by ``settings``."""
        self._settings, self._redis_url, self._context = settings, redis_url, context
        self._share = share or share_of(settings, redis_url)
        self._scheduler = DomainScheduler((), context.executor.clock)
        self.running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._over, self._changed = threading.Event(), threading.Event()
        self._begun = self._paused = False
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Work until ``stop``; an error in one worker ends all of them, and is raised."""
        try:
            while self.running or not self._over.is_set():
                wanted = self._share.domains(self._held())
                self._follow(() if self._over.is_set() else wanted)
                self._changed.wait(_LOOK_SECONDS)
                self._changed.clear()
        finally:
            self._share.close()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """End ``run`` after the micro-steps that are under way."""
        self._over.set()
        self._all(lambda worker: worker.stop())
        self._changed.set()

    def pause(self, timeout: float = 5.0) -> bool:
        """Train no more; True as soon as every worker is at rest, False when one is not within ``timeout`` seconds."""
        with self._lock:
            self._paused = True
        return all(self._all(lambda worker: worker.pause(timeout)))

    def resume(self) -> None:
        """Undo ``pause``."""
        with self._lock:
            self._paused = False
        self._all(lambda worker: worker.resume())

    def status(self) -> dict[str, Any]:
        """The own domain's ``TrainerState`` as a dict, and those of the others, by domain, under ``extra_domains``.

        ``domains`` are those that this trainer has, or takes up.
        """
        with self._lock:
            found = {domain: running.worker.status() for domain, running in self.running.items()}
        own, *others = self._settings.trained_domains
        missing = TrainerState(detail=_ELSEWHERE) if self._begun else TrainerState()
        known = {domain: found.get(domain) or missing.status() for domain in (own, *others)}
        return {**known[own], "domains": sorted(found), "extra_domains": {domain: known[domain] for domain in others}}

    def _held(self) -> list[str]:
        """The domains that nobody else can have now, also those whose workers are about to end."""
        return [domain for domain, running in self.running.items() if running.worker.lease.fence]

    def _follow(self, wanted: Collection[str]) -> None:
        """See off what has ended, end what is not wanted, and begin with what is."""
        for domain, running in list(self.running.items()):
            if not running.thread.is_alive():
                with self._lock:
                    del self.running[domain]
                self._scheduler.leave(domain)
            elif domain not in wanted:
                running.worker.stop()
        for domain in wanted:
            if domain not in self.running:
                self._begin(domain)
        self._begun = True
        trainer, count = self._settings.trainer, max(len(self.running), 1)
        for running in self.running.values():
            running.worker.intake.resize(trainer.replay_tokens // count, max(trainer.replay_mb // count, 1))

    def _begin(self, domain: str) -> None:
        self._scheduler.join(domain)
        mine = self._settings.model_copy(update={"domain": domain})
        worker = Worker(mine, self._redis_url, self._context, self._scheduler, partial(self._share.elsewhere, domain))
        thread = threading.Thread(target=self._run, args=(worker,), name=f"trainer-{domain}", daemon=True)
        with self._lock:
            self.running[domain] = _Running(worker, thread)
            if self._paused:
                worker.pause(timeout=0)
        thread.start()

    def _all(self, call: Callable[[Worker], Any]) -> list[Any]:
        with self._lock:
            workers = [running.worker for running in self.running.values()]
        return [call(worker) for worker in workers]

    def _run(self, worker: Worker) -> None:
        try:
            try:
                worker.run()
            except FencedError as error:
                self._share.lost(error)
        except BaseException as error:
            self._errors.append(error)
            self.stop()
        finally:
            self._changed.set()
