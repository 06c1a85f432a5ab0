"""Versions and rollouts of all domains, as operators list and move them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from osd.admin import ConflictError, NotFoundError, UnavailableError
from osd.admin.audit import Actor, AuditLog
from osd.capture.purge import Member, Purges
from osd.config import Settings
from osd.registry.events import Events, Kind
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry, VersionError


@dataclass(frozen=True)
class ListedVersion:
    """Version in a listing.

    Attributes:
        number: the number of the version.
        manifest: the manifest, empty when it cannot be read.
        problem: the error of reading the manifest, if any.
        removed: the time of removal in seconds since the epoch, None for a stored version.
    """

    number: int
    manifest: dict[str, Any]
    problem: str | None = None
    removed: float | None = None


@dataclass(frozen=True)
class Listing:
    """Versions of a domain, its rollout, and its training.

    Attributes:
        domain: the name of the domain.
        rollout: the rollout; None without one.
        versions: the versions, removed ones first.
        training: the last report of the trainer; None without one.
        silence: the seconds since the last heartbeat of the trainer; None while no trainer runs.
    """

    domain: str
    rollout: Rollout | None
    versions: list[ListedVersion]
    training: Training | None = None
    silence: float | None = None


def listings(settings: Settings, redis_url: str | None) -> list[Listing]:
    """Return the versions of all domains; without a Redis URL the rollouts come from disk only.

    Raises:
        UnavailableError: the rollout pointer or the registry cannot be read.
    """
    registry = Registry(storage_of(settings))
    try:
        return [_listing(registry, domain, redis_url) for domain in registry.domains()]
    except (RedisError, OSError) as error:
        raise UnavailableError(f"the rollout pointer or the registry cannot be read: {error}") from error


def _listing(registry: Registry, domain: str, redis_url: str | None) -> Listing:
    training, silence = None, None
    if redis_url:
        with (
            Pointer(redis_url, registry.storage) as pointer,
            TrainingReports(redis_url) as reports,
            Purges(redis_url) as purges,
        ):
            rollout, training = pointer.get(domain), reports.get([domain]).get(domain)
            silence = purges.silence(Member("trainer", domain))
    else:
        rollout = PointerFiles(registry.storage).read(domain)
    stored = [ListedVersion(info.number, info.manifest, info.problem) for info in registry.list(domain)]
    numbers = {version.number for version in stored}
    removed = [
        ListedVersion(version.number, version.manifest, removed=version.removed)
        for version in registry.removed(domain)
        if version.number not in numbers
    ]
    return Listing(domain, rollout, [*removed, *stored], training, silence)


@dataclass(frozen=True)
class RolloutMove:
    """Result of a move: domain, version in service, previous version, and whether the domain is pinned."""

    domain: str
    version: int
    previous: int
    pinned: bool


class Rollouts:
    """Moves of rollout pointers, with an entry in the audit log; replicas swap within a second.

    Raises:
        osd.admin.NotFoundError: from every method: the domain or the version does not exist.
        osd.admin.ConflictError: from every method: another process has just moved the domain, a version is damaged, or
            the action does not fit the versions in service.
        osd.admin.UnavailableError: from every method: the audit log, Redis or the disk cannot be read or written.
    """

    def __init__(self, settings: Settings, redis_url: str) -> None:
        storage = storage_of(settings)
        self._registry = Registry(storage)
        self._pointer, self._events = Pointer(redis_url, storage), Events(redis_url)
        self._audit = AuditLog(settings.home_dir)

    def rollback(self, actor: Actor, domain: str, version: int | None) -> RolloutMove:
        """Put ``version`` in service, by default the parent of the stable version, and end a canary."""
        with self._moving("rollback", actor, domain, version) as action:
            stable, pinned = action.before.stable, action.before.pinned
            number = self._manifest(domain, stable).get("parent") if version is None else version
            if number is None:
                raise ConflictError(f"version {stable} of {domain} has no parent; name the version to go to")
            return self._move(action, "rolled_back", number, pinned, previous=stable)

    def promote(self, actor: Actor, domain: str) -> RolloutMove:
        """Put the canary in service for all requests."""
        with self._moving("promote", actor, domain) as action:
            before = action.before
            if before.canary is None:
                raise ConflictError(f"domain {domain} has no canary; version {before.stable} is in service")
            return self._move(action, "promoted", before.canary, before.pinned, parent=before.stable)

    def pin(self, actor: Actor, domain: str, version: int | None) -> RolloutMove:
        """Put ``version`` in service, by default the stable version, and keep the trainer from moving the domain."""
        with self._moving("pin", actor, domain, version) as action:
            stable = action.before.stable
            return self._move(action, "pinned", stable if version is None else version, True, previous=stable)

    def unpin(self, actor: Actor, domain: str) -> RolloutMove:
        """Allow the trainer to move the domain again."""
        with self._moving("unpin", actor, domain) as action:
            number = action.before.stable
            if not action.before.pinned:
                raise ConflictError(f"version {number} of {domain} is not pinned")
            return self._move(action, "unpinned", number, False)

    def close(self) -> None:
        """Close the connections."""
        self._pointer.close()
        self._events.close()

    @contextmanager
    def _moving(self, action: str, actor: Actor, domain: str, version: int | None = None) -> Generator[_Action]:
        with self._audit.action(actor, action, domain=domain, version=version) as entry:
            try:
                before = self._pointer.get(domain)
                if before is None:
                    raise NotFoundError(f"domain {domain} has no version in service")
                yield _Action(domain, before, entry)
            except (RedisError, OSError) as error:
                raise UnavailableError(str(error)) from error

    def _move(self, action: _Action, kind: Kind, stable: int, pinned: bool, **figures: Any) -> RolloutMove:
        """Put ``stable`` in service without a canary, unless another process has moved the pointer."""
        domain, before = action.domain, action.before
        action.entry["version"] = stable
        self._manifest(domain, stable)
        rollout = Rollout(stable=stable, canary=None, share=0.0, changed=time.time(), pinned=pinned)
        if not self._pointer.replace(domain, before, rollout):
            raise ConflictError(
                f"the rollout pointer of {domain} has just been moved; look at the versions and try again"
            )
        self._events.try_add(kind, domain, stable, **figures)
        return RolloutMove(domain, stable, before.stable, pinned)

    def _manifest(self, domain: str, number: int) -> dict[str, Any]:
        """Return the manifest of a version after a check of the whole version."""
        try:
            return self._registry.load(domain, number).manifest
        except VersionError as error:
            exists = number in self._registry.numbers(domain)
            raise (ConflictError if exists else NotFoundError)(str(error)) from None


@dataclass(frozen=True)
class _Action:
    """Action on a domain: the rollout before it, and its entry in the audit log."""

    domain: str
    before: Rollout
    entry: dict[str, Any]
