"""The whole loop on one machine: Redis, Ray, replicas and trainer, started and stopped together."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from deploy.assembly import Assembly, PartError, RayDied, StartError
from deploy.contradictions import check_exposure, check_settings
from deploy.local_ray import LocalRay, check_token_mode, last_line
from deploy.local_serve import LocalServe
from deploy.one_drafter import for_one_drafter
from osd.addresses import url_of
from osd.capture.server import public_url
from osd.config import ConfigError, Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer
from osd.running import announce, withdraw
from osd.target.load import commit_of, target_directory

if TYPE_CHECKING:
    from deploy.vllm.exports import ShapeFollower

logger = logging.getLogger(__name__)

_ACTOR_SECONDS, _TRAINER_SECONDS, _ANSWER_SECONDS = 60.0, 20.0, 15.0
_MOMENT_SECONDS = 0.2


class Embedded(Assembly):
    """Assembly of the whole loop; ``start`` returns when the service answers, and may also raise RayDied."""

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        super().__init__(for_one_drafter(settings) if settings.engine.kind == "vllm" else settings, report)
        settings = self.settings
        self.url = url_of(settings.serving.host, settings.serving.port)
        self.directory = Path()
        self.trainer: Any = None
        self._preparing = "reading settings"
        self._ray = LocalRay()
        self._serve = LocalServe(self._ray, settings)
        self._shapes: ShapeFollower | None = None

    def check(self) -> None:
        """Raise ``RayDied`` if a Ray server has ended by itself; call it regularly, as it also watches the versions."""
        self._ray.check()
        if self._shapes is not None:
            self._shapes.look()

    def ask_trainer(self, method: str, *arguments: object, seconds: float = _ACTOR_SECONDS) -> Any:
        """Return the result of a method of the trainers, see ``trainer.app.TrainerActors``.

        Raises:
            RayDied: a Ray server ended by itself.
            TimeoutError: a trainer does not answer within ``seconds``.
        """
        ask = partial(getattr(self.trainer, method), *arguments, timeout=seconds)
        return self._ray.call(f"bring the trainer's answer to {method}", seconds, ask)

    def stable(self) -> int:
        """Return the drafter version in service.

        Raises:
            StartError: the rollout pointer is missing.
        """
        with Pointer(self.redis_url, storage_of(self.settings)) as pointer:
            rollout = pointer.get(self.settings.domain)
        if rollout is None:
            raise StartError(f"the rollout pointer of {self.settings.domain} is gone")
        return rollout.stable

    def about(self) -> str:
        """Return a line about the target, the replicas and Redis."""
        settings, commit = self.settings, commit_of(self.directory)
        target = settings.target.source + (f" at commit {commit}" if commit else "")
        least, most = settings.serving.replicas, settings.serving.replica_limit
        replicas = f"{least}{f' to {most}' * (most > least)} replica{'s' * (most > 1)}"
        redis = f"Redis at {public_url(self.redis_url)}" if settings.redis_url else "a Redis of its own"
        return f"{target} with {replicas} and {redis}"

    def _start(self) -> None:
        settings = self.settings
        self._lock()
        check_port(settings.serving.host, settings.serving.port)
        check_token_mode()
        check_exposure(settings)
        check_settings(settings)
        if settings.trainer.node_labels:
            raise ConfigError("trainer.node_labels apply only to clusters: osd up starts a node without labels")
        self._open()
        # Ray and Serve start in seconds, the target in up to a minute: start them in parallel.
        pool = ThreadPoolExecutor(1, "prepare")
        try:
            prepared = pool.submit(self._prepare)
            wait([prepared], _MOMENT_SECONDS)  # a refusal that needs no import comes within this time
            if not prepared.done() or prepared.exception() is None:
                self._ends.callback(self._ray.stop)
                with _start_failures():
                    self._report("starting Ray")
                    self._ray.start(settings)
                    self._ends.callback(self._serve.end)
                    self._report("starting Ray Serve")
                    self._serve.start()
            if not prepared.done():
                self._report(self._preparing)
            self.directory = self._ray.wait("prepare", prepared)
        finally:
            pool.shutdown(wait=not self._ray.died)
        self._ends.callback(self._stop_trainer)
        self._report("loading the replicas")
        with _start_failures():
            self._serve.start_replicas(self.redis_url)
        # Requests arrive from now on. ``drain`` reads the report late, because ``stop`` replaces it.
        self._ends.callback(lambda: self._serve.drain(self._report))
        if settings.engine.kind == "vllm" and settings.drafts:
            from deploy.vllm.exports import ShapeFollower

            self._shapes = ShapeFollower(settings, partial(self._serve.begin_restart, self.redis_url))
        import trainer.app

        if trainer.app.needs_trainer(settings):
            with _start_failures():
                start = partial(trainer.app.start, settings, self.redis_url)
                self.trainer = self._ray.call("start the trainer", _ACTOR_SECONDS, start)
        announce(settings.home_dir, self.url, self.redis_url)
        self._ends.callback(withdraw, settings.home_dir)

    def _prepare(self) -> Path:
        # Import slow packages while Ray starts, in the order in which they are needed.
        import_module("ray.serve")

        from deploy.preparation import check_rules, prepare

        check_rules(self.settings)
        directory = target_directory(self.settings, self._report_preparing)
        prepare(self.settings, self.redis_url, directory, self._report_preparing)
        if self.settings.engine.kind == "vllm":
            from deploy.vllm.exports import prepare_export

            prepare_export(self.settings, self._report_preparing)
        return directory

    def _report_preparing(self, step: str) -> None:
        self._preparing = step
        self._report(step)

    def _stop_trainer(self) -> None:
        if self.trainer is None:
            return
        try:
            try:
                self.ask_trainer("stop", _TRAINER_SECONDS, seconds=_TRAINER_SECONDS + _ANSWER_SECONDS)
            except (RayError, TimeoutError) as error:
                logger.warning("the trainer did not stop in time: %s", last_line(error))
            self._ray.call("end the trainer", _ANSWER_SECONDS, self.trainer.kill)
        except (RayDied, TimeoutError):
            return  # the trainer ends with Ray


def check_port(host: str, port: int) -> None:
    """Refuse an address that this machine cannot listen on, before anything starts.

    Raises:
        StartError: the address is in use, or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"serving.port {port} is in use on {host}; set another one, for example --port {port % 65535 + 1}"
            ) from None
        raise StartError(f"serving.host {host}, serving.port {port}: {error.strerror}") from None


@contextlib.contextmanager
def _start_failures() -> Generator[None]:
    try:
        yield
    except StartError as error:
        raise StartError(f"the service does not start: {error}") from error
    except (RayError, RuntimeError, TimeoutError) as error:
        raise PartError(f"the service does not start: {last_line(error)}") from error
