"""Search for servers and workers that tests started and did not end."""

from __future__ import annotations

import os
import secrets
import time

import psutil

_SERVERS = ("redis-server", "raylet", "gcs_server", "ray::", "osd.cli", "osd.vllm.assembler", "prometheus", "chromium")
_MARK = "TESTS_STARTED_BY"  # without the prefix OSD_, which tests remove from the environment


class Leftovers:
    """Servers that processes of this session start from now on.

    A process without a parent still has the environment of the session, and a mark in it. Redis overwrites its
    environment with its title, so its session id identifies it.
    """

    def __init__(self) -> None:
        self._mark, self._since = secrets.token_hex(8), time.time()
        os.environ[_MARK] = self._mark

    def running(self) -> list[str]:
        """Return the process id and the command line of each server that still runs."""
        servers = []
        descendants = psutil.Process().children(recursive=True)
        for process in psutil.process_iter():
            try:
                command = " ".join(process.cmdline())
                if any(server in command for server in _SERVERS) and (
                    process in descendants or process.environ().get(_MARK) == self._mark or self._is_orphan(process)
                ):
                    servers.append(f"{process.pid} {command[:120]}")
            except (psutil.Error, ProcessLookupError):  # it has ended, is a zombie or belongs to another user
                continue
        return servers

    def _is_orphan(self, process: psutil.Process) -> bool:
        """Return whether a process of this session has a parent outside of it."""
        session, parent = os.getsid(0), process.ppid()
        return (
            os.getsid(process.pid) == session
            and process.create_time() > self._since
            and (not psutil.pid_exists(parent) or os.getsid(parent) != session)
        )
