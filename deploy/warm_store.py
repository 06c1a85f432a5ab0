"""Store of warm-up results under a home: drafters and recall's tables that new services start from."""

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
"""What a domain begins with, which has learnt nothing."""

_OWNER_ONLY = 0o600


class WarmStore:
    """``home``/warm/<target>: of the target in ``directory``, whatever that is called. Nothing in it is users' text."""

    def __init__(self, home: Path, directory: Path) -> None:
        self._root = home / "warm" / identify("", directory).weights[:16]
        self._registry = Registry(self._root)

    def keep_drafter(self, version: Version, tally: Tally) -> None:
        """Keep a drafter version that learnt from these requests, in the place of the one of its kind before.

        Raises:
            OSError: the disk does not take it; what was there stays.
        """
        kind = version.config["kind"]
        about = {"requests": tally.finished, "tokens": tally.tokens, "gate": version.manifest.get("gate")}
        number = self._registry.publish(kind, version.weights, version.config, {"parent": None, "warm_up": about})
        storage = self._registry.storage
        storage.delete(kind, storage.hide(kind, [one for one in self._registry.numbers(kind) if one < number]))

    def drafter(self, config: dict[str, Any]) -> Version | None:
        """The drafter that is kept, None where there is none of this configuration."""
        for number in reversed(self._registry.numbers(config["kind"])):
            try:
                version = self._registry.load(config["kind"], number)
            except VersionError:
                continue
            if version.config == config:
                return version
        return None

    def keep_recalled(self, snapshot: bytes, settings: RecallSettings) -> None:
        """Keep a snapshot of what is recalled under these settings, in the place of the one before.

        Raises:
            OSError: the disk does not take it; what was there stays.
        """
        files.replace(self._recalled(settings), snapshot, mode=_OWNER_ONLY)

    def recall(self, settings: RecallSettings, folder: Path) -> bool:
        """Give a domain's ``folder`` the snapshot that is kept, if it has none; whether it was given one.

        Raises:
            OSError: the disk does not take it.
        """
        kept, to = self._recalled(settings), folder / SNAPSHOT
        if to.exists() or not kept.is_file():
            return False
        files.replace(to, kept.read_bytes(), mode=_OWNER_ONLY)
        return True

    def _recalled(self, settings: RecallSettings) -> Path:
        """Tables of other sizes are not taken up."""
        return self._root / f"recall-{settings.megabytes}.safetensors"
