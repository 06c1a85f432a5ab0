"""Removal of old versions; the newest versions, the versions of the rollout and the parents of both stay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from osd.registry import history
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.storage import Storage
from osd.registry.versions import Registry, VersionInfo

logger = logging.getLogger(__name__)


def retire(registry: Registry, domain: str, keep: int, guard: AbstractContextManager[None]) -> list[int]:
    """Remove old versions of a domain and return the numbers of the remaining ones.

    Each version is first hidden as a whole and then deleted. So a reader gets a whole version, or an error that names
    the removal. A failure of the disk is logged, and the next call tries again.

    Args:
        registry: the registry to clean up.
        domain: the domain to clean up.
        keep: how many of the newest versions stay, in addition to versions that are needed.
        guard: a context that holds the domain's lock, so that the pointer cannot move to a version that is removed.

    Raises:
        Exception: any error of ``guard``.
    """
    with guard:
        infos = registry.list(domain)
        rollout = PointerFiles(registry.storage).read(domain)
        kept = _kept_numbers(infos, rollout, keep)
        removed = [info for info in infos if info.number not in kept]
        if not removed:
            return sorted(kept)
        storage = registry.storage
        recorded = _add_to_history(storage, domain, removed)
        hidden = storage.hide(domain, [info.number for info in removed])
    storage.delete(domain, hidden)
    # On a full disk the history fits only after the deletion.
    if not recorded and not _add_to_history(storage, domain, removed):
        first, last = removed[0].number, removed[-1].number
        logger.warning("the history of versions %d to %d of %s cannot be written and is lost", first, last, domain)
    return sorted(kept)


def _kept_numbers(infos: Sequence[VersionInfo], rollout: Rollout | None, keep: int) -> set[int]:
    numbers = {info.number for info in infos}
    if rollout is None:  # the version in service is unknown
        return numbers
    needed = {info.number for info in infos[-keep:]} | rollout.versions
    return numbers & (needed | {info.manifest.get("parent") for info in infos if info.number in needed})


def _add_to_history(storage: Storage, domain: str, infos: Sequence[VersionInfo]) -> bool:
    try:
        history.add(storage, domain, ((info.number, info.manifest) for info in infos))
    except OSError as error:
        logger.debug("%s: %s", domain, error)
        return False
    return True
