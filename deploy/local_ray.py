"""Ray on this machine alone: started, watched, and never waited for without an end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import ray

from deploy.assembly import RayDied
from osd.capture.server import free_port
from osd.config import Settings

_Kind = TypeVar("_Kind")

SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serving.front:middlewares",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str((1 << 31) - 1),
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""The environment of Serve's proxy, which stands behind ``serving.front``, and of its replicas.

Between the two each piece of an answer travels by gRPC: by calls of actors the proxy takes twice as long for it. An
answer that is not streamed is one message, for which gRPC's own limit of 4 MiB is too low. In both one event loop does
what Ray does and what we do, so that no piece goes from one thread to another: nothing of ours blocks a loop. On a busy
machine a proxy takes longer to start than Serve's own limit of 5 s, after which Serve kills it and the start fails.
"""

_OBJECT_STORE_BYTES = 256 << 20  # weights travel as files, so Ray moves next to nothing
_START_SECONDS, _STOP_SECONDS, _KILL_SECONDS = 60.0, 20.0, 3.0
_LOOK_SECONDS = 0.2
_SERVERS = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
"""The processes without which Ray is none, by name."""


class LocalRay:
    """Ray's servers, and calls that end with an error when one of these dies or the time is up."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._servers: dict[str, psutil.Process] = {}
        self._death: Future[str] = Future()
        self._looking = threading.Lock()
        self._unwatched, self._over = threading.Event(), threading.Event()
        self._started = False

    @property
    def died(self) -> bool:
        """Whether one of the servers ended by itself."""
        return self._death.done()

    def start(self, settings: Settings) -> None:
        """Start the servers; to be called on the main thread.

        Raises:
            RayDied: one of them died meanwhile.
            TimeoutError: they do not come up.
        """
        self._started = True
        self._before = _children()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()
        up: Future[None] = Future()
        # Linux ends the servers with the thread that started them: it stays.
        threading.Thread(target=self._hold, args=(settings, up), name="ray", daemon=True).start()
        try:
            self.wait("start", up, _START_SECONDS)
        finally:
            # Ray's handler, in C and before Python's, aborts the process three seconds after SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def call(self, doing: str, seconds: float, function: Callable[..., _Kind], *arguments: Any) -> _Kind:
        """What ``function`` returns or raises; ``doing`` completes the sentence "Ray does not ..." of an error.

        Raises:
            RayDied: a server died before or meanwhile.
            TimeoutError: it took longer than ``seconds``. It may still go on, in a thread of its own.
        """
        return self.wait(doing, self.begin(function, *arguments), seconds)

    def begin(self, function: Callable[..., _Kind], *arguments: Any) -> Future[_Kind]:
        """What ``function`` will return or raise, for ``wait``.

        Raises:
            RayDied: a server died before.
        """
        self.check()
        result: Future[_Kind] = Future()
        threading.Thread(target=_settle, args=(result, function, *arguments), name="ray-call", daemon=True).start()
        return result

    def wait(self, doing: str, result: Future[_Kind], seconds: float | None = None) -> _Kind:
        """The same for what another thread does, without ``seconds`` for as long as Ray lives."""
        ends: list[Future[Any]] = [result, self._death]
        wait(ends, seconds, FIRST_COMPLETED)
        if not result.done() or result.exception() is not None:
            self.check()  # what failed because a server died says so
        if not result.done():
            raise TimeoutError(f"Ray does not {doing} within {seconds:.0f} seconds")
        return result.result()

    def check(self) -> None:
        """Raise ``RayDied`` when a server died."""
        self._look()
        if self.died:
            raise RayDied(self._death.result())

    def stop(self) -> None:
        """End the servers and all that they started."""
        if not self._started:
            return
        self._unwatched.set()
        try:
            self.call("stop", _STOP_SECONDS, ray.shutdown)
        except (RayDied, TimeoutError):
            self._kill()
        self._over.set()

    def _hold(self, settings: Settings, up: Future[None]) -> None:
        _settle(up, _init, settings)
        self._over.wait()

    def _watch(self) -> None:
        while not self._unwatched.wait(_LOOK_SECONDS) and not self.died:
            self._look()

    def _look(self) -> None:
        with self._looking:
            if self.died or self._unwatched.is_set():
                return
            if len(self._servers) < len(_SERVERS):
                self._find()
            for name, process in self._servers.items():
                if _ended(process):
                    self._death.set_result(f"{_SERVERS[name]} (process {process.pid}) died")
                    return

    def _find(self) -> None:
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if process.pid not in self._before and process.name() in _SERVERS:
                    self._servers.setdefault(process.name(), process)

    def _kill(self) -> None:
        """End what is left of all that was started since ``start`` and is not Redis."""
        left = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.pid not in self._before and process.name() != "redis-server":
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, _KILL_SECONDS)


def last_line(error: BaseException) -> str:
    """What an error of Ray says in the end: before it come tracebacks of other processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _init(settings: Settings) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(SERVE_ENVIRONMENT)
    # Ray waits for a port that the GCS picks itself for up to 30 s and keeps the interpreter's lock: nobody would see
    # the GCS die then.
    os.environ["RAY_GCS_SERVER_PORT"] = str(free_port())
    # Serve starts a proxy anew that failed three times, and on one machine there is no other.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    ray.init(
        address="local",
        # Ray's books only: what computes at the same time is decided by threads and by the trainer's pauses.
        num_cpus=max(os.cpu_count() or 1, settings.serving.most_replicas + 2),
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


def _settle(result: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result.set_result(function(*arguments))
    except BaseException as error:
        result.set_exception(error)


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
