"""Moves of rollout pointers by tests, in the place of an operator, and a storage that checks the pointer's lock."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from osd import files
from osd.registry.local_storage import LocalStorage
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles


def put(pointer: Pointer, domain: str, rollout: Rollout) -> Rollout:
    """Move the pointer without conditions; return its new value."""
    assert pointer.replace(domain, pointer.get(domain), rollout)
    now = pointer.get(domain)
    assert now is not None
    return now


def write(files: PointerFiles, domain: str, rollout: Rollout) -> None:
    """Write a rollout to the pointer file without conditions, even for versions that do not exist."""
    files.update(domain, lambda now: rollout)


class LockedHides(LocalStorage):
    """Storage that checks that the pointer is locked while versions are hidden."""

    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        with pytest.raises(OSError, match="held by another process"), files.locked(self.local / f".{domain}.lock", 0):
            pass
        return super().hide(domain, numbers)
