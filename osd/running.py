"""Where other commands find the loop that runs in a home directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

_FILE, _LOCK = "running.json", ".running.lock"


@dataclass(frozen=True)
class Running:
    """Addresses of a running loop; the one of Redis may hold a password."""

    url: str
    redis_url: str


def lock(home: Path) -> filelock.BaseFileLock:
    """The lock that a loop holds while it runs in ``home``; entering raises ``filelock.Timeout`` if another does."""
    return filelock.FileLock(home / _LOCK, timeout=0)


def announce(home: Path, url: str, redis_url: str) -> None:
    """Write the addresses down for this user only."""
    withdraw(home)
    descriptor = os.open(home / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(Running(url, redis_url)), file)


def withdraw(home: Path) -> None:
    """Take back what ``announce`` wrote."""
    (home / _FILE).unlink(missing_ok=True)


def find(home: Path) -> Running | None:
    """The loop that runs in ``home``; None when none does, whatever a killed one left behind."""
    try:
        with lock(home):
            return None
    except filelock.Timeout:
        pass
    except OSError:
        return None
    try:
        return Running(**json.loads((home / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
