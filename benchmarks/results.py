"""Measurement results under the home directory, so that an interrupted command continues without repeating work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from osd import files

T = TypeVar("T")


def digest(facts: Sequence[Any]) -> str:
    """Return a short hash of ``facts`` that is the same in every process."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()


class Results:
    """Folder of measurement results, one JSON file per result.

    The folder's name contains a hash of the facts (settings, streams, machine), so other facts use another folder.
    Changes outside the facts, such as another version of the code, are not detected.
    """

    def __init__(self, folder: Path, facts: Sequence[Any]) -> None:
        """Use the folder ``folder``-HASH, with the hash of ``facts``."""
        self.root = folder.with_name(f"{folder.name}-{digest(facts)}")

    def once(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return the result called ``name`` of type ``kind``; call ``measure`` if there is no such file yet."""
        path = self.root / f"{name}.json"
        if not path.is_file():
            files.replace(path, msgspec.json.encode(measure()))
        return msgspec.json.decode(path.read_bytes(), type=kind)
