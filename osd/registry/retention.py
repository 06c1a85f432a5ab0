"""Which versions stay on disk: the newest, those in service or on trial, and what each of these came from."""

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
    """Remove a domain's versions but the ``keep`` newest and those that are needed; returns the numbers of what stays.

    ``guard`` holds the domain's lock, so that the pointer cannot move to a version that goes. Each goes out of sight as
    a whole and is deleted then: a reader finds all of it or an error that says so. A disk that refuses is logged, and
    what is left then is tried again the next time.

    Raises:
        Whatever ``guard`` does.
    """
    with guard:
        infos = registry.list(domain)
        rollout = PointerFiles(registry.storage).read(domain)
        stays = _staying(infos, rollout, keep)
        gone = [info for info in infos if info.number not in stays]
        if not gone:
            return sorted(stays)
        storage = registry.storage
        remembered = _remember(storage, domain, gone)
        hidden = storage.hide(domain, [info.number for info in gone])
    storage.delete(domain, hidden)
    if not remembered and not _remember(storage, domain, gone):  # on a full disk there is room only now
        logger.warning("what versions %d to %d of %s were is lost", gone[0].number, gone[-1].number, domain)
    return sorted(stays)


def _staying(infos: Sequence[VersionInfo], rollout: Rollout | None, keep: int) -> set[int]:
    numbers = {info.number for info in infos}
    if rollout is None:  # nobody knows what is in service
        return numbers
    needed = {info.number for info in infos[-keep:]} | rollout.versions
    return numbers & (needed | {info.manifest.get("parent") for info in infos if info.number in needed})


def _remember(storage: Storage, domain: str, gone: Sequence[VersionInfo]) -> bool:
    try:
        history.add(storage, domain, ((info.number, info.manifest) for info in gone))
    except OSError as error:
        logger.debug("%s: %s", domain, error)
        return False
    return True
