"""The rollout pointer beside the versions: what counts, whatever becomes of Redis.

``<domain>.rollout.json`` is replaced as a whole, by whoever holds the lock of the domain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.hashing import unit_hash
from osd.registry.local_storage import as_storage
from osd.registry.storage import Storage

logger = logging.getLogger(__name__)

_END = ".rollout.json"

_Number = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class FencedError(Exception):
    """Another trainer has taken over a domain; one line that names it. Whoever gets this has to end."""


class Rollout(msgspec.Struct, frozen=True):
    """A domain's version in service, and the canary with its share of requests (0 to 1).

    ``changed`` is the time of the change, in seconds since the epoch. A ``pinned`` domain is moved by operators only.
    ``moves`` counts the changes, and ``fence`` the trainers that the domain has had; both are set by what writes.
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
        """Those that it names."""
        return {self.stable} if self.canary is None else {self.stable, self.canary}

    def version_for(self, request_id: str) -> int:
        """The version that serves a request: the same in every replica, whatever is held out for evaluation."""
        if self.canary is not None and unit_hash(request_id.encode(), b"canary") < self.share:
            return self.canary
        return self.stable


class PointerFiles:
    """The rollouts of all domains in a registry's storage, for any number of processes.

    Raises:
        OSError: the storage does not give or take it.
        ValueError: the domain is not a valid name.
    """

    def __init__(self, place: Path | Storage) -> None:
        self.storage = as_storage(place)
        self._damaged: set[str] = set()

    def domains(self) -> list[str]:
        """The domains that have one, sorted."""
        return sorted(name.removesuffix(_END) for name in self.storage.names() if name.endswith(_END))

    def read(self, domain: str) -> Rollout | None:
        """The domain's rollout, None when it has none yet or a disk has damaged it, which is logged once."""
        return self._decoded(domain, self._bytes(domain))

    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Hold the domain's lock; for moments only, because operators wait for it too."""
        return self.storage.locked(check_domain(domain))

    def update(
        self, domain: str, change: Callable[[Rollout | None], Rollout | None], fence: int | None = None
    ) -> Rollout | None:
        """Put what ``change`` makes of the domain's rollout in its place, and return it; None where it made none.

        It is called again when somebody else was faster. ``fence`` is the number of the trainer that asks, if one does.

        Raises:
            FencedError: the trainer is not the newest.
            ValueError: a version below 1 or a share outside 0 to 1.
        """
        while True:
            with self.locked(domain):
                before = self._bytes(domain)
                now = self._decoded(domain, before)
                if fence is not None:
                    _check(domain, now, fence)
                rollout = change(now)
                if rollout is None or self.storage.swap(_name(domain), before, encode(domain, rollout)):
                    break
        self._damaged.discard(domain)
        return rollout

    def check(self, domain: str, fence: int) -> None:
        """Refuse a trainer, the ``fence``-th of the domain, that is not the newest.

        Raises:
            FencedError: there is a newer one.
        """
        _check(domain, self.read(domain), fence)

    def _bytes(self, domain: str) -> bytes | None:
        try:
            return self.storage.read(_name(domain))
        except FileNotFoundError:
            return None

    def _decoded(self, domain: str, data: bytes | None) -> Rollout | None:
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Rollout)
        except msgspec.MsgspecError as error:
            if domain not in self._damaged:
                self._damaged.add(domain)
                logger.warning("%s is damaged and counts as not there: %s", self.storage.where(_name(domain)), error)
            return None


def _name(domain: str) -> str:
    return f"{check_domain(domain)}{_END}"


def _check(domain: str, rollout: Rollout | None, fence: int) -> None:
    if rollout is not None and rollout.fence > fence:
        raise FencedError(
            f"another trainer has taken over {domain}: it is number {rollout.fence}, this one {fence}, which ends"
        )


def encode(domain: str, rollout: Rollout) -> bytes:
    """The rollout as JSON.

    Raises:
        ValueError: a version below 1 or a share outside 0 to 1.
    """
    data = msgspec.json.encode(rollout)
    try:
        msgspec.json.decode(data, type=Rollout)  # a Struct checks its limits only when it is read
    except msgspec.MsgspecError as error:
        raise ValueError(f"rollout of {domain}: {error}") from None
    return data
