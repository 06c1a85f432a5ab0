"""What became of versions that were removed: the newest manifests, in one file beside the others."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from osd.registry.storage import Storage

logger = logging.getLogger(__name__)

MOST, MOST_BYTES = 300, 8 << 20
"""Removed versions of a domain that are remembered, and how long the file may be: manifests name many requests."""

_FILE = "history.json"


class RemovedVersion(msgspec.Struct, frozen=True):
    """A version that is gone, when it was removed (seconds since the epoch), and what its manifest said."""

    number: int
    removed: float
    manifest: dict[str, Any]


def read(storage: Storage, domain: str) -> list[RemovedVersion]:
    """The versions of a domain that were removed, by number; none when the file is damaged, which is logged.

    Raises:
        OSError: the disk does not give it.
    """
    name = f"{domain}/{_FILE}"
    try:
        return msgspec.json.decode(storage.read(name), type=list[RemovedVersion])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        logger.warning("%s is damaged and begins anew: %s", storage.where(name), error)
        return []


def add(storage: Storage, domain: str, manifests: Iterable[tuple[int, dict[str, Any]]]) -> None:
    """Remember versions that are removed now, by number and manifest.

    Raises:
        OSError: the disk does not take it; what was there stays.
    """
    now = time.time()
    known = {one.number: one for one in read(storage, domain)}
    known |= {number: RemovedVersion(number, now, manifest) for number, manifest in manifests}
    newest = deque(msgspec.json.encode(known[number]) for number in sorted(known)[-MOST:])
    size = sum(len(one) + 1 for one in newest)
    while size > MOST_BYTES:
        size -= len(newest.popleft()) + 1
    storage.replace(f"{domain}/{_FILE}", b"[" + b",".join(newest) + b"]")
