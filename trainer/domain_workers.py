"""Workers of several domains in one trainer, which share its computing time and end together."""

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
_ELSEWHERE = "not assigned to this trainer"


class _RunningWorker(NamedTuple):
    """Worker and its thread."""

    worker: Worker
    thread: threading.Thread


class DomainWorkers:
    """One worker for each domain of this trainer, among ``domain`` and ``trainer.extra_domains``.

    Each worker has its own thread. They compute in turns, so together they take no more time than one worker, and they
    divide ``trainer.replay_tokens`` and ``trainer.replay_mb``. A domain that moves to another trainer is saved first;
    none of its data stays in memory.

    Attributes:
        running: the worker of each domain.
    """

    def __init__(self, settings: Settings, redis_url: str, context: TargetContext, share: Share | None = None) -> None:
        """Create the workers of a trainer's ``share``; None creates the share from the settings."""
        self._settings, self._redis_url, self._context = settings, redis_url, context
        self._share = share or share_of(settings, redis_url)
        self._scheduler = DomainScheduler((), context.executor.clock)
        self.running: dict[str, _RunningWorker] = {}
        self._lock = threading.Lock()
        self._stopped, self._changed = threading.Event(), threading.Event()
        self._started = self._paused = False
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run until ``stop``; an error of one worker ends all workers and is raised."""
        try:
            while self.running or not self._stopped.is_set():
                domains = self._share.domains(self._leased())
                self._apply(() if self._stopped.is_set() else domains)
                self._changed.wait(_LOOK_SECONDS)
                self._changed.clear()
        finally:
            self._share.close()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Request the end of ``run`` after the current micro-steps, without waiting for it."""
        self._stopped.set()
        self._call_all(lambda worker: worker.stop())
        self._changed.set()

    def pause(self, timeout: float = 5.0) -> bool:
        """Stop training; return True once all workers rest, False when ``timeout`` seconds pass before that."""
        with self._lock:
            self._paused = True
        return all(self._call_all(lambda worker: worker.pause(timeout)))

    def resume(self) -> None:
        """Continue training after ``pause``."""
        with self._lock:
            self._paused = False
        self._call_all(lambda worker: worker.resume())

    def status(self) -> dict[str, Any]:
        """Return the ``TrainerState`` of the service's domain as a dict.

        It has the states of all other domains under ``extra_domains``, and the domains of this trainer under
        ``domains``.
        """
        with self._lock:
            states = {domain: running.worker.status() for domain, running in self.running.items()}
        main, *extra = self._settings.trained_domains
        missing = TrainerState(detail=_ELSEWHERE) if self._started else TrainerState()
        statuses = {domain: states.get(domain) or missing.status() for domain in (main, *extra)}
        return {**statuses[main], "domains": sorted(states), "extra_domains": {name: statuses[name] for name in extra}}

    def _leased(self) -> list[str]:
        """Return the domains whose lease this trainer has, including workers that end now."""
        return [domain for domain, running in self.running.items() if running.worker.lease.fence]

    def _apply(self, domains: Collection[str]) -> None:
        """Remove ended workers, end those of other domains, start missing ones, and divide the replay memory."""
        for domain, running in list(self.running.items()):
            if not running.thread.is_alive():
                with self._lock:
                    del self.running[domain]
                self._scheduler.leave(domain)
            elif domain not in domains:
                running.worker.stop()
        for domain in domains:
            if domain not in self.running:
                self._start(domain)
        self._started = True
        trainer, count = self._settings.trainer, max(len(self.running), 1)
        for running in self.running.values():
            running.worker.intake.resize(trainer.replay_tokens // count, max(trainer.replay_mb // count, 1))

    def _start(self, domain: str) -> None:
        self._scheduler.join(domain)
        settings = self._settings.model_copy(update={"domain": domain})
        has_other_trainer = partial(self._share.has_other_trainer, domain)
        worker = Worker(settings, self._redis_url, self._context, self._scheduler, has_other_trainer)
        thread = threading.Thread(target=self._run, args=(worker,), name=f"trainer-{domain}", daemon=True)
        with self._lock:
            self.running[domain] = _RunningWorker(worker, thread)
            if self._paused:
                worker.pause(timeout=0)
        thread.start()

    def _call_all(self, call: Callable[[Worker], Any]) -> list[Any]:
        with self._lock:
            workers = [running.worker for running in self.running.values()]
        return [call(worker) for worker in workers]

    def _run(self, worker: Worker) -> None:
        try:
            try:
                worker.run()
            except FencedError as error:
                self._share.handle_loss(error)
        except BaseException as error:
            self._errors.append(error)
            self.stop()
        finally:
            self._changed.set()
