"""Record of the running loop of a home directory, for other commands."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

_FILE, _LOCK = "running.json", ".running.lock"


@dataclass(frozen=True)
class Running:
    """Addresses of a running loop; ``redis_url`` may hold a password."""

    url: str
    redis_url: str


def lock(home: Path) -> filelock.BaseFileLock:
    """Return the lock of the loop that runs in ``home``; entering raises ``filelock.Timeout`` while a loop runs."""
    return filelock.FileLock(home / _LOCK, timeout=0, mode=0o600)


def announce(home: Path, url: str, redis_url: str) -> None:
    """Write the addresses of a loop to a file that only this user can read."""
    withdraw(home)
    descriptor = os.open(home / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(Running(url, redis_url)), file)


def withdraw(home: Path) -> None:
    """Delete the file of ``announce``."""
    (home / _FILE).unlink(missing_ok=True)


def find(home: Path) -> Running | None:
    """Return the loop that runs in ``home``, or None; a file that a killed loop left is ignored."""
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
