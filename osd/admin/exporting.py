"""Versions as other servers read them: one, or each that becomes stable, with a command that restarts who drafts."""

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
from osd.target.load import TargetError, target_directory

EXPORT_ERRORS = (VersionError, TargetError, drafting.DrafterError, formats.FormatError, OSError)
"""Why a version cannot be exported; each is one line."""

_RETRY_SECONDS = 60.0
_KEPT = 2  # exports of versions that were stable last: a server may still read the one before


@dataclass(frozen=True)
class Exported:
    """An exported version, for a ``target`` by the name that other libraries find it by.

    ``speculative`` is what vLLM is told to draft with it; None where vLLM does not load it, and ``problem`` says why.
    """

    target: str
    speculative: dict[str, Any] | None
    problem: str = ""


def export(settings: Settings, version: int, form: str, folder: Path) -> Exported:
    """Write a version of the configured domain to a new directory, in one of ``osd.drafting.formats.FORMATS``.

    Raises:
        EXPORT_ERRORS: it cannot be read or written.
    """
    found = Registry(storage_of(settings)).load(settings.domain, version)
    target = target_directory(settings)
    drafter = drafting.trainable(drafting.from_config(without_head(found.config), target))
    drafter.load_weights(found.weights)
    source, folder, depth = settings.target.source, folder.absolute(), settings.growth.lookahead
    local = source.startswith("pypi:") or Path(source).expanduser().exists()
    name = str(target) if local else source
    formats.write(drafter, form, formats.Origin(settings.domain, version, name, target, depth), folder)
    try:
        return Exported(name, formats.vllm_config(drafter, form, folder, depth))
    except formats.FormatError as error:
        return Exported(name, None, str(error))


class StableExports:
    """Exports each version that becomes stable below a folder, and runs a command with its directory behind it.

    A command that fails is run again a minute later. The last two exports stay.
    """

    def __init__(
        self, settings: Settings, form: str, folder: Path, command: Sequence[str], say: Callable[[str], None]
    ) -> None:
        """``say`` is told what is done, and what goes wrong."""
        self._settings, self._form, self._folder, self._command, self._say = settings, form, folder, command, say
        self._pointer = PointerFiles(storage_of(settings))
        self._done: int | None = None
        self._after = 0.0

    def look(self) -> None:
        """Export the stable version and run the command, if that was not done for it."""
        if time.monotonic() < self._after:
            return
        try:
            rollout = self._pointer.read(self._settings.domain)
            if rollout is None or rollout.stable == self._done:
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
            self._after = time.monotonic() + _RETRY_SECONDS
            return self._say(f"{problem}; trying again in {_RETRY_SECONDS:.0f} s")
        self._say(f"version {number} is exported, and the command has run")
        self._done = number
        self._remove()

    def _remove(self) -> None:
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isascii() and path.name.isdigit()]
        # The newest by number may be one that was rolled back.
        for number in sorted(set(numbers) - {self._done})[: 1 - _KEPT]:
            shutil.rmtree(self._folder / str(number), ignore_errors=True)
