"""Search for servers and workers that tests started and did not end."""

from __future__ import annotations

import os
import secrets
import time

import psutil

_SERVERS = ("redis-server", "raylet", "gcs_server", "ray::", "osd.cli", "prometheus", "chromium")
_MARK = "TESTS_STARTED_BY"  # settings of ours begin with OSD_, and tests remove them


class Leftovers:
    """The servers that processes of this session start from now on.

    Processes that lose their parent still carry the environment of the session, and a mark in it finds them. Redis
    overwrites its environment with its title. It is recognised by its session id.
    """

    def __init__(self) -> None:
        self._mark, self._since = secrets.token_hex(8), time.time()
        os.environ[_MARK] = self._mark

    def running(self) -> list[str]:
        """Return the process id and the command line of each server that still runs."""
        found = []
        descendants = psutil.Process().children(recursive=True)
        for process in psutil.process_iter():
            try:
                command = " ".join(process.cmdline())
                if any(server in command for server in _SERVERS) and (
                    process in descendants or process.environ().get(_MARK) == self._mark or self._is_orphan(process)
                ):
                    found.append(f"{process.pid} {command[:120]}")
            except (psutil.Error, ProcessLookupError):  # it has ended, is a zombie or belongs to another user
                continue
        return found

    def _is_orphan(self, process: psutil.Process) -> bool:
        """Return whether a process of this session has a parent outside of it."""
        session, parent = os.getsid(0), process.ppid()
        return (
            os.getsid(process.pid) == session
            and process.create_time() > self._since
            and (not psutil.pid_exists(parent) or os.getsid(parent) != session)
        )
