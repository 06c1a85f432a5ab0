"""Results under the home directory: a command that was cut off goes on, and measures nothing again."""

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
    """Return the same short name for the same facts, in every process."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()


class Results:
    """Results of measurements, one JSON file for each, in a folder of their own.

    Other facts (settings, streams, machine) have another folder. Whatever else changed is for the user to know.
    """

    def __init__(self, folder: Path, facts: Sequence[Any]) -> None:
        """Use the folder ``folder``-KEY, KEY by the facts."""
        self.root = folder.with_name(f"{folder.name}-{digest(facts)}")

    def once(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return a result by its name, measured now if it never was."""
        path = self.root / f"{name}.json"
        if not path.is_file():
            files.replace(path, msgspec.json.encode(measure()))
        return msgspec.json.decode(path.read_bytes(), type=kind)
