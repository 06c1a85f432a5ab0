"""History of removed versions: their manifests, in one file in the folder of the domain."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from osd.registry.storage import Storage

logger = logging.getLogger(__name__)

MAX_VERSIONS, MAX_BYTES = 300, 8 << 20
"""Limits of a domain's history: removed versions, and size of the file (a manifest may list many requests)."""

_FILE = "history.json"


class RemovedVersion(msgspec.Struct, frozen=True):
    """Removed version: its number, the time of removal (seconds since the epoch) and its manifest."""

    number: int
    removed: float
    manifest: dict[str, Any]


def read(storage: Storage, domain: str) -> list[RemovedVersion]:
    """Return the removed versions of a domain by number; log a damaged file and return an empty list.

    Raises:
        OSError: the file cannot be read.
    """
    name = f"{domain}/{_FILE}"
    try:
        return msgspec.json.decode(storage.read(name), type=list[RemovedVersion])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        logger.warning("%s is damaged; a new history starts: %s", storage.address(name), error)
        return []


def add(storage: Storage, domain: str, manifests: Iterable[tuple[int, dict[str, Any]]]) -> None:
    """Add versions to the history, as numbers with manifests; drop the lowest numbers above the limits.

    Raises:
        OSError: the file cannot be written; the old history stays.
    """
    now = time.time()
    versions = {version.number: version for version in read(storage, domain)}
    versions |= {number: RemovedVersion(number, now, manifest) for number, manifest in manifests}
    newest = deque(msgspec.json.encode(versions[number]) for number in sorted(versions)[-MAX_VERSIONS:])
    size = sum(len(data) + 1 for data in newest)
    while size > MAX_BYTES:
        size -= len(newest.popleft()) + 1
    storage.replace(f"{domain}/{_FILE}", b"[" + b",".join(newest) + b"]")
