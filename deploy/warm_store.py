"""Store of warm-up results under a home: drafters and recall tables for new services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from osd import files
from osd.config import RecallSettings
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.versions import Registry, Version, VersionError
from osd.target.identity import identify
from osd.traffic.open_loop import Tally

FIRST_VERSION = 1
"""Number of a domain's untrained first version."""


class WarmStore:
    """Folder ``home``/warm/<target> without users' text; the weights in ``directory`` identify the target."""

    def __init__(self, home: Path, directory: Path) -> None:
        self._root = home / "warm" / identify("", directory).weights[:16]
        self._registry = Registry(self._root)

    def keep_drafter(self, version: Version, tally: Tally) -> None:
        """Store a drafter version that learned from these requests, and delete the previous one of its kind.

        Raises:
            OSError: the disk refuses; the previous version stays.
        """
        kind = version.config["kind"]
        about = {"requests": tally.finished, "tokens": tally.tokens, "gate": version.manifest.get("gate")}
        number = self._registry.publish(kind, version.weights, version.config, {"parent": None, "warm_up": about})
        storage = self._registry.storage
        storage.delete(kind, storage.hide(kind, [stored for stored in self._registry.numbers(kind) if stored < number]))

    def drafter(self, config: dict[str, Any]) -> Version | None:
        """Return the stored drafter of this configuration, None if there is none."""
        for number in reversed(self._registry.numbers(config["kind"])):
            try:
                version = self._registry.load(config["kind"], number)
            except VersionError:
                continue
            if version.config == config:
                return version
        return None

    def keep_recalled(self, snapshot: bytes, settings: RecallSettings) -> None:
        """Store a snapshot of a recall table of these settings in place of the previous one.

        Raises:
            OSError: the disk refuses; the previous snapshot stays.
        """
        files.replace(self._recalled(settings), snapshot)

    def recall(self, settings: RecallSettings, folder: Path) -> bool:
        """Copy the stored snapshot to a domain's ``folder`` if it has none; return whether it was copied.

        Raises:
            OSError: the disk refuses.
        """
        kept, to = self._recalled(settings), folder / SNAPSHOT
        if to.exists() or not kept.is_file():
            return False
        files.replace(to, kept.read_bytes())
        return True

    def _recalled(self, settings: RecallSettings) -> Path:
        """Return the file for tables of this size; tables of other sizes cannot be loaded."""
        return self._root / f"recall-{settings.megabytes}.safetensors"
