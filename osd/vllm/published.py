"""What the registry has for a vLLM that was started with an export of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from osd.registry import layouts
from osd.registry.local_storage import LocalStorage
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.storage import Storage
from osd.registry.versions import Registry, VersionError
from osd.vllm.settings import REGISTRY, SettingsError, VllmSettings

_PROVENANCE = "osd.json"
_CACHE, _KEPT = Path("~/.cache/osd/vllm"), 2  # of versions from an object store


@dataclass(frozen=True)
class Checkpoint:
    """A version's tensors by the names under which vLLM loads them, and the ``sha256`` that its weights had."""

    number: int
    sha256: str
    tensors: dict[str, Tensor]


class Published:
    """The rollout pointer and the versions of the ``domain`` that an export in ``folder`` is of.

    ``started`` is the version that was exported.

    Raises:
        SettingsError: no registry is named, or the folder holds no export of ours.
    """

    def __init__(self, settings: VllmSettings, folder: str | None) -> None:
        if settings.registry is None:
            raise SettingsError(f"{REGISTRY} must name the registry, a folder or s3://bucket/path")
        try:
            about = json.loads(Path(folder or "", _PROVENANCE).read_bytes())
            self.domain, self.started = str(about["domain"]), int(about["version"])
            self._drafter: dict[str, Any] = dict(about["drafter"])
            self._file = next(iter(sorted(Path(folder or "").glob("*.safetensors"))))
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            raise SettingsError(
                f"{folder} holds no drafter that osd drafters export wrote, so that no version can follow it"
            ) from None
        storage = _storage(settings.registry)
        self._registry, self._pointer = Registry(storage), PointerFiles(storage)

    def rollout(self) -> Rollout | None:
        """What is in service and on trial, None while nothing is.

        Raises:
            OSError: the registry does not say.
        """
        return self._pointer.read(self.domain)

    def checkpoint(self, number: int) -> Checkpoint:
        """A version, with its hash verified, that takes the place of the export tensor by tensor.

        Raises:
            VersionError: it is missing or damaged, or another kind or shape of drafter than the export.
        """
        version = self._registry.load(self.domain, number)
        for name, value in self._drafter.items():
            if version.config.get(name) != value:
                raise self._other(number, f"its {name} is another one")
        known = self._exported()
        tensors = layouts.LAYOUTS[self._drafter["kind"]](version.config, version.weights)
        tensors = {name: weight for name, weight in tensors.items() if name in known}
        for name, weight in tensors.items():
            if list(weight.shape) != known[name]:
                raise self._other(number, f"{name} has shape {list(weight.shape)}, not {known[name]}")
        return Checkpoint(number, str(version.manifest["sha256"]), tensors)

    def _exported(self) -> dict[str, list[int]]:
        """The shapes of what vLLM was started with."""
        try:
            with safe_open(self._file, "pt") as file:
                return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict
        except (SafetensorError, OSError) as error:
            raise VersionError(f"{self._file} cannot be read: {error}") from None

    def _other(self, number: int, what: str) -> VersionError:
        return VersionError(
            f"version {number} of {self.domain} cannot take the place of version {self.started}: {what}; "
            "export it and start vLLM anew"
        )


def _storage(place: str) -> Storage:
    if not place.startswith("s3://"):
        return LocalStorage(Path(place).expanduser())
    from osd.registry.object_storage import ObjectStorage

    return ObjectStorage(place, _CACHE.expanduser(), _KEPT)
