"""Durable rollout pointers, stored with the versions; they survive the loss of Redis.

``<domain>.rollout.json`` is replaced atomically, under the lock of the domain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.registry.local_storage import as_storage
from osd.registry.storage import Storage

logger = logging.getLogger(__name__)

_SUFFIX = ".rollout.json"

_Number = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class FencedError(Exception):
    """Takeover of a domain by another trainer, as a message of one line; the process that gets it has to end."""


class Rollout(msgspec.Struct, frozen=True):
    """Rollout of a domain: the version in service, and a canary with its share of the decoding steps.

    Attributes:
        stable: the version in service.
        canary: the version on trial, if any.
        share: the share of decoding steps in which the canary drafts, 0 to 1.
        changed: the time of the last change, in seconds since the epoch.
        pinned: whether only operators may move the pointer.
        moves: the number of changes; set by the writer of the pointer.
        fence: the number of trainers that the domain has had; set by the writer of the pointer.
    """

    stable: _Number
    canary: _Number | None
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    changed: float
    pinned: bool = False
    moves: _Count = 0
    fence: _Count = 0

    @property
    def versions(self) -> set[int]:
        """Numbers of the stable version and, during a trial, the canary."""
        return {self.stable} if self.canary is None else {self.stable, self.canary}


class PointerFiles:
    """Rollout pointers of all domains in a storage, for any number of processes.

    Raises:
        OSError: the storage cannot be read or written.
        ValueError: the domain is not a valid name.
    """

    def __init__(self, place: Path | Storage) -> None:
        self.storage = as_storage(place)
        self._damaged: set[str] = set()

    def domains(self) -> list[str]:
        """Return the domains that have a pointer, sorted."""
        return sorted(name.removesuffix(_SUFFIX) for name in self.storage.names() if name.endswith(_SUFFIX))

    def read(self, domain: str) -> Rollout | None:
        """Return the rollout of a domain, or None when its pointer is missing or damaged; log damage once."""
        return self._decode(domain, self._read_bytes(domain))

    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Return a context that holds the lock of a domain; hold it for moments only, because operators wait too."""
        return self.storage.locked(check_domain(domain))

    def update(
        self, domain: str, change: Callable[[Rollout | None], Rollout | None], fence: int | None = None
    ) -> Rollout | None:
        """Replace the rollout of a domain by ``change(rollout)``.

        Args:
            domain: the domain to change.
            change: gets the rollout, which is None if the pointer is missing or damaged, and returns the new rollout,
                or None to change nothing. It is called again when another process changes the pointer in between.
            fence: ``Lease.fence`` of the trainer that makes the change; None for an operator, who is never refused.

        Returns:
            The new rollout, or None when nothing was changed.

        Raises:
            FencedError: another trainer has taken over the domain.
            ValueError: a version is below 1 or a share is outside 0 to 1.
        """
        while True:
            with self.locked(domain):
                data = self._read_bytes(domain)
                current = self._decode(domain, data)
                if fence is not None:
                    _check_fence(domain, current, fence)
                rollout = change(current)
                if rollout is None or self.storage.swap(_file(domain), data, encode(domain, rollout)):
                    break
        self._damaged.discard(domain)
        return rollout

    def check(self, domain: str, fence: int) -> None:
        """Refuse a trainer whose number ``fence`` is not the newest of the domain.

        Raises:
            FencedError: another trainer is newer.
        """
        _check_fence(domain, self.read(domain), fence)

    def _read_bytes(self, domain: str) -> bytes | None:
        try:
            return self.storage.read(_file(domain))
        except FileNotFoundError:
            return None

    def _decode(self, domain: str, data: bytes | None) -> Rollout | None:
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Rollout)
        except msgspec.MsgspecError as error:
            if domain not in self._damaged:
                self._damaged.add(domain)
                address = self.storage.address(_file(domain))
                logger.warning("%s is damaged and is treated as missing: %s", address, error)
            return None


def _file(domain: str) -> str:
    return f"{check_domain(domain)}{_SUFFIX}"


def _check_fence(domain: str, rollout: Rollout | None, fence: int) -> None:
    if rollout is not None and rollout.fence > fence:
        raise FencedError(
            f"another trainer has taken over {domain}: its number is {rollout.fence}, and this trainer, "
            f"number {fence}, ends"
        )


def encode(domain: str, rollout: Rollout) -> bytes:
    """Return the rollout as JSON.

    Raises:
        ValueError: a version is below 1 or a share is outside 0 to 1.
    """
    data = msgspec.json.encode(rollout)
    try:
        msgspec.json.decode(data, type=Rollout)  # a Struct checks its limits only when it is decoded
    except msgspec.MsgspecError as error:
        raise ValueError(f"rollout of {domain}: {error}") from None
    return data
