"""The versions of every domain's drafter, those that were removed last too, and which of them is in service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from osd.admin import Unavailable
from osd.config import Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry


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
