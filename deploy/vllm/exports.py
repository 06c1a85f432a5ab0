"""Export of the stable drafter version for replicas with vLLM."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from osd.config import ConfigError, Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry, VersionError
from osd.vllm.exported import ExportedDrafter
from osd.vllm.settings import SettingsError
from serving.vllm.exports import export_folder, exported_versions, stable_exports

logger = logging.getLogger(__name__)

_KEPT = 3


def prepare_export(settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
    """Export the stable version of the service's domain, if it drafts and the version is not exported yet.

    If the export fails, replicas start with an earlier one. The newest three exports stay.

    Raises:
        ConfigError: the version cannot be exported, and there is no earlier export.
    """
    if not settings.drafts:
        return
    rollout = PointerFiles(storage_of(settings)).read(settings.domain)
    assert rollout is not None  # noqa: S101 - the preparation of the start has set it
    versions = exported_versions(settings)
    if rollout.stable not in versions:
        from osd.admin.exporting import EXPORT_ERRORS, export

        report(f"exporting version {rollout.stable} for vLLM")
        try:
            export(settings, rollout.stable, "speculators", export_folder(settings) / str(rollout.stable))
        except EXPORT_ERRORS as error:
            if not versions:
                raise ConfigError(f"version {rollout.stable} cannot be exported for vLLM: {error}") from None
            number = rollout.stable
            logger.warning("version %d cannot be exported for vLLM; replicas start with another: %s", number, error)
    for number in [number for number in versions if number != rollout.stable][: 1 - _KEPT]:
        shutil.rmtree(export_folder(settings) / str(number), ignore_errors=True)


class ShapeFollower:
    """Restart of the replicas for a stable version that they cannot load, because its kind or shapes are others."""

    def __init__(self, settings: Settings, restart: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Follow the pointer from the present exports on.

        Args:
            settings: settings of the service.
            restart: calls a function on another thread, and then replaces one replica after the other.
        """
        self._settings, self._restart = settings, restart
        self._pointer, self._registry = PointerFiles(storage_of(settings)), Registry(storage_of(settings))
        self._shape = self._exported()
        self._checked: int | None = None
        self._restarting: Future[None] | None = None

    def look(self) -> None:
        """Begin a restart if the stable version needs one and none runs; call it regularly."""
        if self._restarting is not None:
            if not self._restarting.done():
                return
            if error := self._restarting.exception():
                logger.warning("the replicas were not restarted for version %s: %s", self._checked, error)
            self._restarting, self._shape = None, self._exported()
        try:
            rollout = self._pointer.read(self._settings.domain)
            if rollout is None or rollout.stable == self._checked:
                return
            self._checked = rollout.stable
            config = self._registry.load(self._settings.domain, rollout.stable).config
        except (OSError, VersionError) as error:
            logger.warning("the stable version cannot be read: %s", error)
            return
        if any(config.get(name) != value for name, value in self._shape.items()):
            logger.warning("version %d has another shape: the replicas restart one after the other", rollout.stable)
            self._restarting = self._restart(lambda: prepare_export(self._settings))

    def _exported(self) -> dict[str, Any]:
        """Return the configuration of the drafter with which replicas start now; empty without an export."""
        exports = stable_exports(self._settings)
        try:
            return ExportedDrafter.read(str(exports[0])).drafter if exports else {}
        except SettingsError:  # replicas start with another export
            return {}
