"""Moves of rollout pointers by tests, in the place of an operator."""

from __future__ import annotations

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
