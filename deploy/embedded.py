"""The whole loop on one machine: Redis, Ray, replicas and trainer, started together and stopped together."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import filelock
import ray
from ray.exceptions import RayError

from deploy.running import announce, lock, withdraw
from osd.capture.server import RedisError, open_redis
from osd.config import ConfigError, Settings
from osd.target.load import TargetError, resolve

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 256 << 20  # weights travel as files, so Ray moves next to nothing
_TRAINER_SECONDS = 20.0
_MOMENT_SECONDS = 0.2


class StartError(RuntimeError):
    """The loop cannot start here; the message is one line that names what to change."""


START_ERRORS = (StartError, ConfigError, TargetError, RedisError)
"""What keeps the loop from starting; each is one line that names what to change."""


class Embedded:
    """A running loop, from ``start`` (or entering) to ``stop`` (or leaving)."""

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        self.settings = settings
        self.url = f"http://{_reachable(settings.serving.host)}:{settings.serving.port}"
        self.redis_url = ""
        self.trainer: Any = None
        self._report = report
        self._ends = contextlib.ExitStack()

    def start(self) -> None:
        """Return when the service answers; if that fails, every process that was started is ended again.

        Must be called on the main thread: the Redis server lives and dies with it.

        Raises:
            StartError: the port or the home directory is in use, the settings of the drafter do not fit the target,
                or the service does not come up.
            TargetError: the target cannot be had.
            RedisError: there is no Redis.
            ConfigError: settings contradict each other.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Embedded:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything, last started first; every step is tried whatever became of the others."""
        self._ends.close()

    def _start(self) -> None:
        settings = self.settings
        check_port(settings.serving.host, settings.serving.port)
        settings.home_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._ends.enter_context(lock(settings.home_dir))
        except filelock.Timeout:
            raise StartError(f"osd already runs in {settings.home_dir}; stop it, or set another home") from None
        self._report("starting Redis")
        handle = open_redis(settings)
        self._ends.callback(handle.close)
        self.redis_url = handle.url
        # Ray and Serve need seconds to start and the target up to a minute: neither waits for the other.
        with ThreadPoolExecutor(1, "prepare") as pool:
            prepared = pool.submit(self._prepare)
            wait([prepared], _MOMENT_SECONDS)  # a target that is not there shows at once
            if not prepared.done() or prepared.exception() is None:
                self._ends.callback(ray.shutdown)
                start_ray(settings)
                self._start_serve()
            directory = prepared.result()
        logger.info("the target lies in %s", directory)
        self._report("loading the replicas")
        self._start_replicas()
        import trainer.app

        if trainer.app.wanted(settings):
            self.trainer = trainer.app.start(settings, self.redis_url)
            self._ends.callback(self._stop_trainer)
        announce(settings.home_dir, self.url, self.redis_url)
        self._ends.callback(withdraw, settings.home_dir)

    def _prepare(self) -> Path:
        # What computes takes seconds to import: here that happens while Ray starts.
        from deploy.preparation import check_settings, ensure_version

        check_settings(self.settings)
        directory = resolve(self.settings.target.source, self.settings.home_dir, self._report)
        if not self.settings.drafts:
            return directory
        self._report("preparing the drafter")
        from transformers.utils import logging as progress

        from osd.drafters.base import DrafterError

        progress.disable_progress_bar()
        try:
            ensure_version(self.settings, self.redis_url, directory)
        except DrafterError as error:
            raise StartError(str(error)) from error
        return directory

    def _start_serve(self) -> None:
        from ray import serve

        options = {"host": self.settings.serving.host, "port": self.settings.serving.port}
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._ends.callback(_stop_serving)
        with _coming_up():
            serve.start(proxy_location="HeadOnly", http_options=options, logging_config={"log_level": "WARNING"})

    def _start_replicas(self) -> None:
        from ray import serve

        import serving.app

        with _coming_up():
            serve.run(serving.app.build(self.settings, self.redis_url), name="osd", route_prefix="/")

    def _stop_trainer(self) -> None:
        try:
            ray.get(self.trainer.stop.remote(_TRAINER_SECONDS), timeout=_TRAINER_SECONDS + 5)
        except RayError as error:
            logger.warning("the trainer did not stop by itself: %s", _last_line(error))
        ray.kill(self.trainer)


def start_ray(settings: Settings) -> None:
    """Start Ray on this machine alone; signals keep the handlers that they have."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    stop = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        # Ray's books only: what computes at the same time is decided by threads and by the trainer's pauses.
        num_cpus=max(os.cpu_count() or 1, settings.serving.replicas + 2),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace="osd",
        logging_level=logging.ERROR,
        log_to_driver=False,
        configure_logging=True,
        _node_ip_address="127.0.0.1",
        # Ray's default is the lowest priority but four, and only the trainer is to stand back.
        _system_config={"worker_niceness": 0},
    )
    # Ray has put handlers of its own in the place of whoever waits for the signal.
    signal.signal(signal.SIGTERM, stop)


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything is started.

    Raises:
        StartError: it is in use, or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"serving.port {port} is in use on {host}; set another one") from None
        raise StartError(f"serving.host {host}, serving.port {port}: {error.strerror}") from None


def _reachable(host: str) -> str:
    """The name under which this machine reaches a service that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - compared with, not bound


@contextlib.contextmanager
def _coming_up() -> Generator[None]:
    try:
        yield
    except (RayError, RuntimeError) as error:
        raise StartError(f"the service does not come up: {_last_line(error)}") from error


def _stop_serving() -> None:
    from ray import serve

    # Not serve.shutdown: it kills its controller, which Ray then reports as a failure. ray.shutdown ends it quietly.
    with contextlib.suppress(RayError):
        serve.delete("osd")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
