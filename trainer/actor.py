"""Trainer as a Ray actor: the loop in a thread or in a group of processes, and the remote calls."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import RedisError

from osd import logs
from osd.config import Settings
from osd.registry.pointer_file import FencedError
from osd.registry.replica_loads import ReplicaLoads
from osd.sealed import SealedSettings
from trainer.state import TrainerState

if TYPE_CHECKING:
    from osd.drafting.trainable import Trainable
    from trainer.domain_workers import DomainWorkers
    from trainer.executor import Executor, TargetContext

logger = logging.getLogger(__name__)

_MAX_BACKOFF = 30.0
_FIRST_TOKEN_SECONDS, _POLL_SECONDS = 5.0, 0.2
_DEAD_SECONDS = 15.0

REPORT_SECONDS = 0.5
"""Longest time between two reports of a group's rank 0."""


class Orders(NamedTuple):
    """Orders for a group of processes.

    Attributes:
        group: the number of the group.
        number: the number of the order, which grows with each change.
        paused: whether training is paused.
        stopped: whether the group must end.
    """

    group: int
    number: int
    paused: bool
    stopped: bool


class RemoteWorkers:
    """Proxy of the ``DomainWorkers`` in a group's rank 0. A dead group counts as resting and has no state."""

    def __init__(self, orders: Orders) -> None:
        """Create the proxy of a new group with its first orders."""
        self.orders = orders
        self._changed = threading.Condition()
        self._status: dict[str, Any] = TrainerState().status()
        self._resting, self._reported_at = False, time.monotonic()

    def report(self, executed: Orders, status: dict[str, Any], resting: bool) -> Orders:
        """Store a report of rank 0.

        Args:
            executed: the orders that rank 0 has carried out.
            status: the status of its workers.
            resting: whether its workers rest.

        Returns:
            The current orders: new ones at once, unchanged ones after ``REPORT_SECONDS``.
        """
        with self._changed:
            self._status, self._reported_at = status, time.monotonic()
            self._resting = resting and executed == self.orders
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.orders != executed, REPORT_SECONDS)
            return self.orders

    def status(self) -> dict[str, Any]:
        """Return the last reported status, see ``DomainWorkers.status``."""
        with self._changed:
            return TrainerState().status() if self._is_dead() else self._status

    def pause(self, timeout: float = 5.0) -> bool:
        """Pause the group, see ``DomainWorkers.pause``."""
        self._order(paused=True)
        with self._changed:
            return self._changed.wait_for(lambda: self._resting or self._is_dead(), timeout)

    def resume(self) -> None:
        """Resume the group, see ``DomainWorkers.resume``."""
        self._order(paused=False)

    def stop(self) -> None:
        """Stop the group, see ``DomainWorkers.stop``."""
        self._order(stopped=True)

    def mark_dead(self) -> None:
        """Mark the group as dead; its processes are not ended."""
        with self._changed:
            self._reported_at = -_DEAD_SECONDS
            self._changed.notify_all()

    def _order(self, **changes: bool) -> None:
        with self._changed:
            self.orders = self.orders._replace(number=self.orders.number + 1, **changes)
            self._resting = False
            self._changed.notify_all()

    def _is_dead(self) -> bool:
        return time.monotonic() - self._reported_at > _DEAD_SECONDS


class Trainer:
    """Actor that runs the workers; after an unexpected error it restarts them from the checkpoints, with backoff.

    When the process dies Ray restarts it with the same arguments, and the workers continue from the checkpoints. When
    another trainer takes over a domain, the result depends on ``trainer.processes``: with 1 this trainer ends, and with
    more it only stops training the domain.
    """

    def __init__(self, sealed: SealedSettings) -> None:
        """Start the workers in a thread.

        Raises:
            osd.config.ConfigError: a file with a secret cannot be read.
        """
        self._sealed = sealed
        self._settings, self._redis_url = sealed.open()
        if logs.set_up(self._settings.log, "trainer") is None:
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._lock = threading.Lock()
        self._worker: DomainWorkers | RemoteWorkers | None = None
        self._paused = False
        self._stop = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return ``DomainWorkers.status`` with ``failure``: the last unexpected error, or ""."""
        with self._lock:
            status = self._worker.status() if self._worker else TrainerState().status()
            return {**status, "failure": self._failure}

    def fail(self, failure: str) -> None:
        """Store an unexpected error for ``status``."""
        self._failure = failure

    def lose(self, reason: str) -> None:
        """End, as another trainer has taken over."""
        logger.error("%s", reason)
        self.fail(reason)
        self._stop.set()

    def pause(self) -> bool:
        """Stop training until ``resume``; return whether the workers rest."""
        with self._lock:
            self._paused = True
            worker = self._worker
        return worker.pause() if worker else True

    def resume(self) -> None:
        """Continue training after ``pause``."""
        with self._lock:
            self._paused = False
            if self._worker:
                self._worker.resume()

    def stop(self, timeout: float = 10.0) -> bool:
        """End training with a checkpoint; return False when this takes longer than ``timeout`` seconds."""
        self._stop.set()
        with self._lock:
            if self._worker:
                self._worker.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        backoff = 1.0
        while not self._stop.is_set():
            try:
                self.train()
            except FencedError as error:
                self.lose(str(error))
            except Exception as error:
                logger.exception("training failed, it restarts from the checkpoint in %.0f s", backoff)
                self.fail(f"{type(error).__name__}: {error}")
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF)

    def train(self) -> None:
        """Train until ``stop``; the calling thread calls it again after an error."""
        # The imports of PyTorch and transformers take seconds of a core, and only the training process needs them.
        await_first_token(self._redis_url, self._stop)
        from trainer.domain_workers import DomainWorkers

        worker = DomainWorkers(self._settings, self._redis_url, open_target(self._settings))
        with self._lock:
            self._worker = worker
            if self._paused:
                worker.pause(timeout=0)
            if self._stop.is_set():
                worker.stop()
        worker.run()


def await_first_token(redis_url: str, stop: threading.Event) -> None:
    """Wait until a replica decodes, so that the trainer's imports do not delay the first answer of a service.

    Returns at once when no replica reports, after five seconds, or when ``stop`` is set.
    """
    deadline = time.monotonic() + _FIRST_TOKEN_SECONDS
    with ReplicaLoads(redis_url) as loads, suppress(RedisError):
        while (replicas := loads.read()) and not any(load.tokens_per_second for load in replicas.values()):
            if time.monotonic() > deadline or stop.wait(_POLL_SECONDS):
                return


def open_target(settings: Settings, executor: Executor | None = None) -> TargetContext:
    """Return the target of ``settings``; without an ``executor`` training runs in this process."""
    from transformers import AutoConfig

    from osd.drafting import from_config, trainable
    from osd.runtime.device import pick_device
    from osd.target.identity import identify
    from osd.target.load import target_directory
    from trainer.executor import Executor, TargetContext

    directory = target_directory(settings, runs_here=False)
    config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()

    device = pick_device(settings.trainer.device)

    def build(config: dict[str, Any]) -> Trainable:
        return trainable(from_config(config, directory)).to(device)

    target = identify(settings.target.source, directory)
    return TargetContext(target, config.vocab_size, config.hidden_size, build, executor or Executor())
