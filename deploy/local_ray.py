"""Ray on this machine only: start, supervision, and calls with time limits."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue] # compiled

from deploy.assembly import RayDied, StartError
from osd import files
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
"""Environment of Serve's proxy, which is behind ``serving.front``, and of its replicas.

Between the two each piece of an answer travels by gRPC; with actor calls the proxy takes twice as long. An answer that
is not streamed is one message, for which gRPC's own limit of 4 MiB is too low. In both processes a single event loop
runs Ray's code and ours, which never blocks it, so that no piece passes between threads. On a busy machine a proxy
takes longer to start than Serve's own limit of 5 s, after which Serve kills it and the start fails.
"""

BOUNDS = {"MALLOC_ARENA_MAX": "2", "RAY_ROTATION_BACKUP_COUNT": "1", "RAY_ROTATION_MAX_BYTES": str(16 << 20)}
"""Environment that bounds memory and logs.

glibc gives the 40 to 60 threads of a proxy or replica up to 8 arenas for each core, and freed memory lies scattered
over all of them: with two arenas it keeps a third of it. Ray's default for a log is six files of 512 MiB.
"""

_OBJECT_STORE_BYTES = 256 << 20  # weights travel as files, so Ray moves little data
_SESSION_LINK = "ray"
_TOKEN_FILE = "ray-token"  # noqa: S105 (a file name)
_START_SECONDS, _CALLS_SECONDS, _STOP_SECONDS, _KILL_SECONDS = 60.0, 10.0, 20.0, 3.0
_LOOK_SECONDS = 0.2
_SERVERS = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
"""Ray's server processes by name; without any of them Ray does not work."""


class LocalRay:
    """Ray's servers, and calls that end with an error if a server dies or the time is up."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._servers: dict[str, psutil.Process] = {}
        self._death: Future[str] = Future()
        self._calls: set[Future[Any]] = set()
        self._looking = threading.Lock()
        self._unwatched, self._over = threading.Event(), threading.Event()
        self._started = False

    @property
    def died(self) -> bool:
        """Whether one of the servers has ended by itself."""
        return self._death.done()

    def start(self, settings: Settings) -> None:
        """Start the servers; call it on the main thread.

        Raises:
            RayDied: a server died during the start.
            TimeoutError: the servers do not start in time.
        """
        self._started = True
        self._before = _children()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()
        up: Future[None] = Future()
        # Linux ends the servers with the thread that started them, so this thread waits for the end.
        threading.Thread(target=self._hold, args=(settings, up), name="ray", daemon=True).start()
        try:
            self.wait("start", up, _START_SECONDS)
        finally:
            # Replace Ray's C handler, which aborts the process three seconds after SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def call(self, doing: str, seconds: float, function: Callable[..., _Kind], *arguments: Any) -> _Kind:
        """Return the result of ``function`` or raise its error.

        Args:
            doing: completes "Ray does not ..." in an error message.
            seconds: limit of the call.
            function: runs in a thread of its own.
            *arguments: of the function.

        Raises:
            RayDied: a server died before or during the call.
            TimeoutError: it took longer than ``seconds``. The call may continue in its thread.
        """
        return self.wait(doing, self.begin(function, *arguments), seconds)

    def begin(self, function: Callable[..., _Kind], *arguments: Any) -> Future[_Kind]:
        """Return a future of ``function``'s result, for ``wait``.

        Raises:
            RayDied: a server has died before.
        """
        self.check()
        result: Future[_Kind] = Future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        threading.Thread(target=_settle, args=(result, function, *arguments), name="ray-call", daemon=True).start()
        return result

    def wait(self, doing: str, result: Future[_Kind], seconds: float | None = None) -> _Kind:
        """Wait for a result of another thread as ``call`` does; without ``seconds`` as long as Ray lives."""
        ends: list[Future[Any]] = [result, self._death]
        wait(ends, seconds, FIRST_COMPLETED)
        if not result.done() or result.exception() is not None:
            self.check()  # the death of a server explains the failure
        if not result.done():
            self._calls.discard(result)
            raise TimeoutError(f"Ray does not {doing} within {seconds:.0f} seconds")
        return result.result()

    def check(self) -> None:
        """Raise ``RayDied`` if a server has died."""
        self._look()
        if self.died:
            raise RayDied(self._death.result())

    def stop(self) -> None:
        """End the servers and all processes that they started."""
        if not self._started:
            return
        self._unwatched.set()
        # A call that reaches Ray after its end would end this process with exit code 1.
        wait(list(self._calls), 0 if self.died else _CALLS_SECONDS)
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
        """Kill all remaining processes that were started since ``start``, except Redis."""
        left = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.pid not in self._before and process.name() != "redis-server":
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, _KILL_SECONDS)


def check_token_mode() -> None:
    """Refuse an environment in which Ray's servers accept calls without a token.

    Raises:
        StartError: ``RAY_AUTH_MODE`` is set and is not "token".
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise StartError(f"RAY_AUTH_MODE is {mode}, so every user of this machine could run code in osd: unset it")


def last_line(error: BaseException) -> str:
    """Return the last line of an error of Ray, which follows the tracebacks of other processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _init(settings: Settings) -> None:
    _renew_token(settings.home_dir / _TOKEN_FILE)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(SERVE_ENVIRONMENT)
    # Without a fixed port Ray waits up to 30 s for the GCS's choice with the interpreter's lock held, so that no
    # thread of ours could notice the death of the GCS.
    os.environ["RAY_GCS_SERVER_PORT"] = str(free_port())
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
    # Serve restarts a proxy after three failed checks, and one machine has only one proxy.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    ray.init(
        address="local",
        # Only Ray's accounting: thread settings and the trainer's pauses control the real use.
        num_cpus=max(os.cpu_count() or 1, settings.serving.replica_limit + 2),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace="osd",
        logging_level=logging.ERROR,
        log_to_driver=False,
        configure_logging=True,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(_renew_folder(settings.home_dir) / "ray"),
        # Ray's default is niceness 15, but only the trainer should have a low priority. Objects that the store has no
        # room for must not fill the disk. The engine of a killed vLLM would keep its memory.
        _system_config={
            "worker_niceness": 0,
            "automatic_object_spilling_enabled": False,
            "process_group_cleanup_enabled": settings.engine.kind == "vllm",
        },
    )


def _renew_folder(home: Path) -> Path:
    """Return a new private folder for Ray, and point a link in ``home`` to it; delete the folder of an earlier start.

    Ray lets every user of the machine replace its sockets and logs, so the folder around them must be private. It is
    not in ``home``, because the path of a socket has at most 107 bytes.
    """
    link = home / _SESSION_LINK
    if link.is_symlink():
        # Not resolve: another user could replace a folder of /tmp that was deleted by a link to any folder.
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
    folder = Path(tempfile.mkdtemp(prefix="osd-", dir=os.environ.get("RAY_TMPDIR", "/tmp")))  # noqa: S108
    link.symlink_to(folder)
    return folder


def _renew_token(file: Path) -> None:
    """Write a new token, which Ray's processes read from the file and send with each call."""
    files.replace(file, secrets.token_hex(32).encode())
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray prefers it to the file
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier start in this process


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
