"""Access to the registry for a vLLM server that was started with an exported drafter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from osd.registry import layouts
from osd.registry.local_storage import LocalStorage
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.storage import Storage
from osd.registry.versions import Registry, VersionError
from osd.vllm.exported import ExportedDrafter
from osd.vllm.settings import REGISTRY, SettingsError, VllmSettings

_KEPT = 2  # cached versions from an object store


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a version by the names that vLLM uses, and the SHA-256 hash of its weights file."""

    number: int
    sha256: str
    tensors: dict[str, Tensor]


class PublishedDrafter:
    """Rollout pointer and versions of the domain of an exported drafter.

    Attributes:
        domain: domain of the export.
        started: version that was exported.
    """

    def __init__(self, settings: VllmSettings, folder: str | None) -> None:
        """Read the description of the export in ``folder``.

        Raises:
            SettingsError: the settings name no registry, or ``folder`` has no export of osd.
        """
        if settings.registry is None:
            raise SettingsError(f"{REGISTRY} must name the registry, a folder or s3://bucket/path")
        export = ExportedDrafter.read(folder)
        self.domain, self.started, self._drafter = export.domain, export.version, export.drafter
        self._file = export.weights
        storage = _storage(settings.registry)
        self._registry, self._pointer = Registry(storage), PointerFiles(storage)

    def rollout(self) -> Rollout | None:
        """Return the stable version and the canary, or None if no version is in service.

        Raises:
            OSError: the registry cannot be read.
        """
        return self._pointer.read(self.domain)

    def checkpoint(self, number: int) -> Checkpoint:
        """Return a version that can replace the export, with verified hash.

        Raises:
            VersionError: the version is missing or damaged, or differs from the export in kind or shapes.
        """
        version = self._registry.load(self.domain, number)
        for name, value in self._drafter.items():
            if version.config.get(name) != value:
                raise self._mismatch(number, f"its {name} is different")
        known = self._exported()
        tensors = layouts.LAYOUTS[self._drafter["kind"]](version.config, version.weights)
        tensors = {name: weight for name, weight in tensors.items() if name in known}
        for name, weight in tensors.items():
            if list(weight.shape) != known[name]:
                raise self._mismatch(number, f"{name} has shape {list(weight.shape)}, not {known[name]}")
        return Checkpoint(number, str(version.manifest["sha256"]), tensors)

    def _exported(self) -> dict[str, list[int]]:
        """Return the shapes of the exported tensors."""
        try:
            with safe_open(self._file, "pt") as file:
                return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict
        except (SafetensorError, OSError) as error:
            raise VersionError(f"{self._file} cannot be read: {error}") from None

    def _mismatch(self, number: int, reason: str) -> VersionError:
        return VersionError(
            f"version {number} of {self.domain} cannot replace version {self.started}: {reason}; "
            "export it and restart vLLM"
        )


def _storage(location: str) -> Storage:
    if not location.startswith("s3://"):
        return LocalStorage(Path(location).expanduser())
    from osd.registry.object_storage import ObjectStorage

    return ObjectStorage(location, Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "osd/vllm").expanduser(), _KEPT)
