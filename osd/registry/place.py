"""Which storage the settings name."""

from __future__ import annotations

from osd.config import Settings
from osd.registry.local_storage import LocalStorage
from osd.registry.object_storage import ObjectStorage
from osd.registry.storage import Storage


def storage_of(settings: Settings) -> Storage:
    """The storage of drafter versions and rollout pointers: ``registry.url``, else a folder of the home."""
    if settings.registry.url is None:
        return LocalStorage(settings.registry_dir)
    return ObjectStorage(settings.registry.url, settings.registry_dir, settings.registry.keep)
