"""Redis servers as people run them: with any configuration, and an address that leads to one or another."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from osd.capture.server import find_server, free_port
from tests.waiting import HANG_SECONDS, wait_until

PASSWORD = "hush-hush"
_LARGEST_PORT = 55_535  # a cluster's servers talk to each other 10,000 ports higher


@contextmanager
def run(folder: Path, *lines: str, arguments: tuple[str, ...] = ()) -> Iterator[int]:
    """A server with these lines of configuration; yields its port when it answers."""
    while (port := free_port()) > _LARGEST_PORT:
        pass
    folder.mkdir(exist_ok=True)
    config = folder / f"{port}.conf"
    config.write_text("\n".join(("bind 127.0.0.1", f"port {port}", f"dir {folder}", *lines)) + "\n")
    process = subprocess.Popen(
        [find_server(), config, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        with redis.Redis(port=port, password=None if arguments else PASSWORD) as client:

            def answers() -> bool:
                assert process.poll() is None, "it does not start"
                with contextlib.suppress(redis.ConnectionError):
                    return bool(client.ping())
                return False

            wait_until(answers)
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def pair(folder: Path) -> Iterator[tuple[int, int]]:
    """A master and its replica that has caught up, by their ports."""
    secured = ('save ""', f"requirepass {PASSWORD}", f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0")
    with run(folder, *secured) as master, run(folder, *secured, f"replicaof 127.0.0.1 {master}") as replica:
        with redis.Redis(port=replica, password=PASSWORD) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        yield master, replica


class Address:
    """An address on loopback that leads to ``behind``, and can lead elsewhere; with ``tls`` it is for TLS.

    What is sent comes ``delay`` seconds later.
    """

    def __init__(self, behind: int, tls: ssl.SSLContext | None = None) -> None:
        self.behind, self.delay, self._tls = behind, 0.0, tls
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Address:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._server, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        for one in (self._server, *self._open):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                client = self._tls.wrap_socket(client, server_side=True) if self._tls else client
            except OSError:  # it does not trust the certificate
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.behind))
            except OSError:  # nobody is there now
                client.close()
                continue
            self._open += client, server
            for one, other in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._copy, args=(one, other)))
                self._threads[-1].start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                time.sleep(self.delay)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
