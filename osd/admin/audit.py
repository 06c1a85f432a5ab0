"""Audit log of the actions on drafters and traces: actor, action and outcome."""

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
from osd.admin import UnavailableError

logger = logging.getLogger(__name__)

_LOG, _OLDER, _LOCK = "audit.jsonl", "audit.1.jsonl", ".audit.lock"
_OWNER_ONLY = 0o600

MAX_BYTES = 10_000_000
"""Maximum size of the file; the next line starts a new file."""

BEGUN, DONE = "begun", "done"
"""Outcomes of an action; every other outcome is the reason of a refusal."""


@dataclass(frozen=True)
class Actor:
    """Author of an action: name, and place such as a network address."""

    who: str
    where: str

    @classmethod
    def local(cls) -> Actor:
        """Return the user of this process, for actions from the command line."""
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # the user id has no name
            name = str(os.getuid())
        return cls(f"user {name}", "command line")


class AuditLog:
    """Log in JSON lines, ``<home>/audit.jsonl``, readable only by its owner; any number of processes may write.

    Each action is logged before it begins and after it ends. An action that a crash interrupted keeps the outcome
    "begun". A file that has grown too large becomes ``audit.1.jsonl`` and replaces the older one.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    @contextmanager
    def action(self, actor: Actor, action: str, **details: Any) -> Generator[dict[str, Any]]:
        """Log an action around its execution; yield its entry, to which the caller may add fields for the last line.

        Args:
            actor: the author of the action.
            action: the name of the action.
            details: further fields of the entry; None values are left out.

        Raises:
            UnavailableError: the log cannot be written, so the action must not happen.
        """
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"time": begun, "id": secrets.token_hex(8), "who": actor.who, "from": actor.where, "action": action}
        entry |= {name: value for name, value in details.items() if value is not None}
        try:
            self._write({**entry, "outcome": BEGUN})
        except OSError as error:
            raise UnavailableError(
                f"the audit log in {self._home} cannot be written, nothing is done: {error}"
            ) from None
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
                logger.error("the outcome of %s %s cannot be written to the audit log: %s", action, entry["id"], error)

    def last(self, count: int, domain: str | None = None) -> list[dict[str, Any]]:
        """Return the last ``count`` actions of both files, oldest first, each with its latest outcome.

        Actions are ordered by their start. A missing file and damaged lines are skipped. With ``domain``, only actions
        on this domain count.

        Raises:
            OSError: a file cannot be read.
        """
        entries: dict[str, dict[str, Any]] = {}
        for name in (_OLDER, _LOG):
            with suppress(FileNotFoundError):
                for line in (self._home / name).read_bytes().splitlines():
                    with suppress(ValueError, KeyError, TypeError):
                        entry = json.loads(line)
                        entries[entry["id"]] = entry
        return [entry for entry in entries.values() if domain in (None, entry.get("domain"))][-count:]

    def _write(self, entry: dict[str, Any]) -> None:
        data, path = json.dumps(entry).encode() + b"\n", self._home / _LOG
        with files.locked(self._home / _LOCK):
            with suppress(FileNotFoundError):
                if path.stat().st_size + len(data) > MAX_BYTES:
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
