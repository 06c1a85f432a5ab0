"""Redis servers with any configuration, and a TCP proxy in front of a server."""

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


@contextmanager
def run(folder: Path, *lines: str, arguments: tuple[str, ...] = ()) -> Iterator[int]:
    """Run a server with these lines of configuration; yield its port once it answers."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    config = folder / f"{port}.conf"
    config.write_text("\n".join(("bind 127.0.0.1", f"port {port}", f"dir {folder}", *lines)) + "\n")
    process = subprocess.Popen(
        [find_server(), config, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        with redis.Redis(port=port, password=None if arguments else PASSWORD) as client:

            def answers() -> bool:
                assert process.poll() is None, "the server does not start"
                with contextlib.suppress(redis.ConnectionError):
                    return bool(client.ping())
                return False

            wait_until(answers)
        yield port
    finally:
        process.kill()
        process.wait()


def acl_rules(user: str) -> list[str]:
    """Return the rights of a user that docs/machines.md lists, without its password."""
    page = Path(__file__).parents[1] / "docs" / "machines.md"
    (line,) = (line for line in page.read_text().splitlines() if line.strip().startswith(f"user {user} on >PASSWORD "))
    return line.partition(">PASSWORD ")[2].split()


@contextmanager
def pair(folder: Path) -> Iterator[tuple[int, int]]:
    """Run a master and a synchronized replica; yield their ports."""
    secured = ('save ""', f"requirepass {PASSWORD}", f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0")
    with run(folder, *secured) as master, run(folder, *secured, f"replicaof 127.0.0.1 {master}") as replica:
        with redis.Redis(port=replica, password=PASSWORD) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        yield master, replica


class TcpProxy:
    """TCP proxy on loopback that forwards to port ``behind``, with TLS if ``tls`` is set.

    ``behind`` may change, and each transfer is delayed by ``delay`` seconds.
    """

    def __init__(self, behind: int, tls: ssl.SSLContext | None = None) -> None:
        self.behind, self.delay, self._tls = behind, 0.0, tls
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in (self._server, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        for connection in (self._server, *self._open):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                client = self._tls.wrap_socket(client, server_side=True) if self._tls else client
            except OSError:  # the client does not trust the certificate
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.behind))
            except OSError:  # the server is down
                client.close()
                continue
            self._open += client, server
            for source, sink in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._copy, args=(source, sink)))
                self._threads[-1].start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
