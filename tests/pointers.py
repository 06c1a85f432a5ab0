"""Moves rollout pointers for tests, as an operator does."""

from __future__ import annotations

from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles


def put(pointer: Pointer, domain: str, rollout: Rollout) -> Rollout:
    """Move the pointer whatever it says; returns what it says now."""
    assert pointer.replace(domain, pointer.get(domain), rollout)
    now = pointer.get(domain)
    assert now is not None
    return now


def write(files: PointerFiles, domain: str, rollout: Rollout) -> None:
    """Put a rollout beside the versions, whatever is there and whether there are such versions or not."""
    files.update(domain, lambda now: rollout)
