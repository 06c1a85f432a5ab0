"""The interface of trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Keeps numbers and words by the step of training; used by one thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` by name, at ``step``."""
        ...

    def text(self, step: int, name: str, words: str) -> None:
        """Keep one line of words."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class Silent:
    """Keeps nothing."""

    def __init__(self, folder: Path, domain: str) -> None:
        pass

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""

    def text(self, step: int, name: str, words: str) -> None:
        """See ``Tracker``."""

    def close(self) -> None:
        """See ``Tracker``."""
