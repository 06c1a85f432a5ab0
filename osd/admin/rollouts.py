"""The versions of every domain's drafter, and which of them is in service, as operators see and move it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from osd.admin import Conflict, NotThere, Unavailable
from osd.admin.audit import Actor, AuditLog
from osd.config import Settings
from osd.registry.events import Events, Kind
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry, VersionError


@dataclass(frozen=True)
class Listed:
    """A version; ``problem`` says why its manifest cannot be read, ``removed`` when it was removed, else None."""

    number: int
    manifest: dict[str, Any]
    problem: str | None = None
    removed: float | None = None


@dataclass(frozen=True)
class Listing:
    """A domain's versions, the removed ones first, and its rollout, None where it has none."""

    domain: str
    rollout: Rollout | None
    versions: list[Listed]


def listings(settings: Settings, redis_url: str | None) -> list[Listing]:
    """Every domain that has a version; without a Redis the rollouts are those on disk.

    Raises:
        Unavailable: the rollout pointer or the registry cannot be read.
    """
    registry = Registry(storage_of(settings))
    try:
        return [_listing(registry, domain, redis_url) for domain in registry.domains()]
    except (RedisError, OSError) as error:
        raise Unavailable(f"the rollout pointer or the registry cannot be read: {error}") from error


def _listing(registry: Registry, domain: str, redis_url: str | None) -> Listing:
    if redis_url:
        with Pointer(redis_url, registry.storage) as pointer:
            rollout = pointer.get(domain)
    else:
        rollout = PointerFiles(registry.storage).read(domain)
    there = [Listed(info.number, info.manifest, info.problem) for info in registry.list(domain)]
    numbers = {one.number for one in there}
    gone = [Listed(one.number, one.manifest, removed=one.removed) for one in registry.removed(domain)]
    return Listing(domain, rollout, [*(one for one in gone if one.number not in numbers), *there])


@dataclass(frozen=True)
class Moved:
    """What an action made of a domain: the version in service, the one before, and whether it is pinned."""

    domain: str
    version: int
    previous: int
    pinned: bool


class Rollouts:
    """Moves rollout pointers; every move is in the audit log and told to replicas, which swap within a second.

    Raises:
        osd.admin.NotThere: from every method: the domain or the version does not exist.
        osd.admin.Conflict: from every method: somebody else has just moved the domain, a version is damaged, or
            the action does not fit what is in service.
        osd.admin.Unavailable: from every method: the log, Redis or the disk does not take it.
    """

    def __init__(self, settings: Settings, redis_url: str) -> None:
        storage = storage_of(settings)
        self._registry = Registry(storage)
        self._pointer, self._events = Pointer(redis_url, storage), Events(redis_url)
        self._audit = AuditLog(settings.home_dir)

    def rollback(self, actor: Actor, domain: str, version: int | None) -> Moved:
        """Put ``version``, else the parent of the one in service, in service, and end a canary."""
        with self._moving("rollback", actor, domain, version) as begun:
            stable, pinned = begun.before.stable, begun.before.pinned
            number = self._manifest(domain, stable).get("parent") if version is None else version
            if number is None:
                raise Conflict(f"version {stable} of {domain} has no parent; name the version to go to")
            return self._move(begun, "rolled_back", number, pinned, previous=stable)

    def promote(self, actor: Actor, domain: str) -> Moved:
        """End the trial of a canary: it serves every request."""
        with self._moving("promote", actor, domain) as begun:
            before = begun.before
            if before.canary is None:
                raise Conflict(f"domain {domain} has no canary; version {before.stable} is in service")
            return self._move(begun, "promoted", before.canary, before.pinned, parent=before.stable)

    def pin(self, actor: Actor, domain: str, version: int | None) -> Moved:
        """Keep ``version``, else the one in service, in service whatever the trainer finds."""
        with self._moving("pin", actor, domain, version) as begun:
            stable = begun.before.stable
            return self._move(begun, "pinned", stable if version is None else version, True, previous=stable)

    def unpin(self, actor: Actor, domain: str) -> Moved:
        """Let the trainer put new versions in service again."""
        with self._moving("unpin", actor, domain) as begun:
            number = begun.before.stable
            if not begun.before.pinned:
                raise Conflict(f"version {number} of {domain} is not pinned")
            return self._move(begun, "unpinned", number, False)

    def close(self) -> None:
        """Close the connections."""
        self._pointer.close()
        self._events.close()

    @contextmanager
    def _moving(self, action: str, actor: Actor, domain: str, version: int | None = None) -> Generator[_Begun]:
        with self._audit.action(actor, action, domain=domain, version=version) as entry:
            try:
                before = self._pointer.get(domain)
                if before is None:
                    raise NotThere(f"domain {domain} has no version in service")
                yield _Begun(domain, before, entry)
            except (RedisError, OSError) as error:
                raise Unavailable(str(error)) from error

    def _move(self, begun: _Begun, kind: Kind, stable: int, pinned: bool, **figures: Any) -> Moved:
        """Put ``stable`` in service without a canary, unless somebody else was faster."""
        domain, before = begun.domain, begun.before
        begun.entry["version"] = stable
        self._manifest(domain, stable)
        rollout = Rollout(stable=stable, canary=None, share=0.0, changed=time.time(), pinned=pinned)
        if not self._pointer.replace(domain, before, rollout):
            raise Conflict(f"the rollout pointer of {domain} has just been moved; look at the versions and try again")
        self._events.tell(kind, domain, stable, **figures)
        return Moved(domain, stable, before.stable, pinned)

    def _manifest(self, domain: str, number: int) -> dict[str, Any]:
        """Of a version that is whole."""
        try:
            return self._registry.load(domain, number).manifest
        except VersionError as error:
            there = number in self._registry.numbers(domain)
            raise (Conflict if there else NotThere)(str(error)) from None


@dataclass(frozen=True)
class _Begun:
    """An action on a domain's pointer, which was ``before`` when it began, and its line in the audit log."""

    domain: str
    before: Rollout
    entry: dict[str, Any]
