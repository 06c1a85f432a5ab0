"""Which storage the settings name."""

from __future__ import annotations

from osd.config import Settings
from osd.registry.local_storage import LocalStorage
from osd.registry.object_storage import ObjectStorage
from osd.registry.pulls import Pulls
from osd.registry.storage import Storage


def storage_of(settings: Settings) -> Storage:
    """The storage of drafter versions and rollout pointers: ``registry.url``, else a folder of the home."""
    if settings.registry.url is None:
        return LocalStorage(settings.registry_dir)
    pulls = None if settings.redis_url is None else Pulls(settings.redis_url, settings.registry.pulls)
    return ObjectStorage(settings.registry.url, settings.registry_dir, settings.registry.keep, pulls)
