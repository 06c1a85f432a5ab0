"""The audit log: who did what to drafters and traces, and what came of it."""

from __future__ import annotations

import json
import logging
import os
import pwd
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from osd import files
from osd.admin import Unavailable

logger = logging.getLogger(__name__)

_LOG, _OLDER, _LOCK = "audit.jsonl", "audit.1.jsonl", ".audit.lock"
_OWNER_ONLY = 0o600

MOST_BYTES = 10_000_000
"""Size from which the log starts a new file."""

BEGUN, DONE = "begun", "done"
"""Outcomes of an action; any other says why it was refused."""


@dataclass(frozen=True)
class Actor:
    """Who acts, and from where."""

    who: str
    where: str

    @classmethod
    def local(cls) -> Actor:
        """The user of this process, on the command line."""
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # a user without a name
            name = str(os.getuid())
        return cls(f"user {name}", "command line")


class AuditLog:
    """Lines of JSON in ``<home>/audit.jsonl``, for its owner alone; any number of processes may write.

    An action is written down before it begins and again when it has ended, so that none is without a line: what a crash
    cut off stays "begun". When the file grows too large it becomes ``audit.1.jsonl``, in the place of an older one.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    @contextmanager
    def action(self, actor: Actor, action: str, **about: Any) -> Generator[dict[str, Any]]:
        """Write an action down; what is put into the value is in its last line.

        Raises:
            Unavailable: it cannot be written down, and must not happen.
        """
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"time": begun, "id": secrets.token_hex(8), "who": actor.who, "from": actor.where, "action": action}
        entry |= {name: value for name, value in about.items() if value is not None}
        try:
            self._write({**entry, "outcome": BEGUN})
        except OSError as error:
            raise Unavailable(f"the audit log in {self._home} cannot be written, nothing is done: {error}") from None
        outcome = "refused: the server failed"
        try:
            yield entry
            outcome = DONE
        except Exception as error:
            outcome = f"refused: {error}"
            raise
        finally:
            try:
                self._write({**entry, "outcome": outcome})
            except OSError as error:
                logger.error("the audit log has no outcome of %s %s: %s", action, entry["id"], error)

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` actions, the oldest first, each with its latest outcome.

        Raises:
            OSError: the log cannot be read.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in (_OLDER, _LOG):
            with suppress(FileNotFoundError):
                for line in (self._home / name).read_bytes().splitlines():
                    with suppress(ValueError, KeyError, TypeError):
                        entry = json.loads(line)
                        found[entry["id"]] = entry
        return list(found.values())[-count:]

    def _write(self, entry: dict[str, Any]) -> None:
        data, path = json.dumps(entry).encode() + b"\n", self._home / _LOG
        with files.locked(self._home / _LOCK):
            with suppress(FileNotFoundError):
                if path.stat().st_size + len(data) > MOST_BYTES:
                    path.replace(self._home / _OLDER)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _OWNER_ONLY)
            try:
                os.fchmod(descriptor, _OWNER_ONLY)
                before = os.fstat(descriptor).st_size
                if os.write(descriptor, data) != len(data):
                    os.ftruncate(descriptor, before)
                    raise OSError("the disk is full")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
