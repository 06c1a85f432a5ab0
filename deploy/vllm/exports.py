"""Export of the stable drafter version for replicas with vLLM."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable

from osd.config import ConfigError, Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer_file import PointerFiles
from serving.vllm.exports import export_folder, exported_versions

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
