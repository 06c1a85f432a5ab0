"""Export of versions for other servers: of one version, or of each stable version with a command to run."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd import drafting
from osd.config import Settings
from osd.drafting import formats
from osd.drafting.acceptance_head import without_head
from osd.registry.object_storage import storage_of
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry, VersionError
from osd.target.files import TargetError
from osd.target.identity import identify
from osd.target.load import target_directory

EXPORT_ERRORS = (VersionError, TargetError, drafting.DrafterError, formats.FormatError, OSError)
"""Errors of an export, each with a message of one line."""

_RETRY_SECONDS = 60.0
_KEPT = 2  # number of exports that stay, because a server may still read the previous one


@dataclass(frozen=True)
class VersionExport:
    """Exported version.

    Attributes:
        target: the name or path by which other libraries load the target.
        speculative: the configuration with which vLLM drafts, or None when vLLM cannot load the drafter.
        problem: the reason when ``speculative`` is None.
    """

    target: str
    speculative: dict[str, Any] | None
    problem: str = ""


def export(settings: Settings, version: int, form: str, folder: Path) -> VersionExport:
    """Write a version of the configured domain to a new directory.

    Args:
        settings: the settings, with domain, target and registry.
        version: the number of the version.
        form: the name of a format in ``osd.drafting.formats.FORMATS``.
        folder: the directory to create.

    Raises:
        EXPORT_ERRORS: the version cannot be read, or the directory cannot be written.
    """
    loaded = Registry(storage_of(settings)).load(settings.domain, version)
    target = target_directory(settings, runs_here=False)
    drafter = drafting.trainable(drafting.from_config(without_head(loaded.config), target))
    drafter.load_weights(loaded.weights)
    source, folder, depth = settings.target.source, folder.absolute(), settings.growth.lookahead
    is_local = source.startswith("pypi:") or Path(source).expanduser().exists()
    name = str(target) if is_local else source
    label = identify(source, target).label
    formats.write(drafter, form, formats.ExportOrigin(settings.domain, version, name, target, depth, label), folder)
    try:
        return VersionExport(name, formats.vllm_config(drafter, form, folder, depth))
    except formats.FormatError as error:
        return VersionExport(name, None, str(error))


class StableExports:
    """Export of each new stable version into a folder, followed by a command with its directory as last argument.

    A command that fails is repeated a minute later. The last two exports stay.
    """

    def __init__(
        self, settings: Settings, form: str, folder: Path, command: Sequence[str], say: Callable[[str], None]
    ) -> None:
        """Prepare exports in the format ``form``; ``say`` gets a message for each success and each problem."""
        self._settings, self._form, self._folder, self._command, self._say = settings, form, folder, command, say
        self._pointer = PointerFiles(storage_of(settings))
        self._exported: int | None = None
        self._retry_at = 0.0

    def look(self) -> None:
        """Export the stable version and run the command, unless both have been done for this version."""
        if time.monotonic() < self._retry_at:
            return
        try:
            rollout = self._pointer.read(self._settings.domain)
            if rollout is None or rollout.stable == self._exported:
                return
            number = rollout.stable
            folder = self._folder / str(number)
            if not folder.exists():
                export(self._settings, number, self._form, folder)
            code = subprocess.run([*self._command, str(folder.absolute())], check=False).returncode
            problem = f"the command ended with exit code {code}" if code else ""
        except EXPORT_ERRORS as error:
            problem, number = str(error), 0
        if problem:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            return self._say(f"{problem}; trying again in {_RETRY_SECONDS:.0f} s")
        self._say(f"version {number} is exported, and the command has run")
        self._exported = number
        self._remove_old_exports()

    def _remove_old_exports(self) -> None:
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isascii() and path.name.isdigit()]
        # The current version is excluded by number, because after a rollback it need not be the highest.
        for number in sorted(set(numbers) - {self._exported})[: 1 - _KEPT]:
            shutil.rmtree(self._folder / str(number), ignore_errors=True)
