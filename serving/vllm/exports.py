"""Folder of exported drafter versions, which the start of a service writes and all replicas with vLLM read."""

from __future__ import annotations

from pathlib import Path

from osd.config import Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer_file import PointerFiles


def export_folder(settings: Settings) -> Path:
    """Return the folder of the exports of the service's domain; each export is in a folder named by its version."""
    return settings.home_dir / "vllm" / settings.domain


def exported_versions(settings: Settings) -> list[int]:
    """Return the numbers of all exported versions in order."""
    folder = export_folder(settings)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def stable_exports(settings: Settings) -> list[Path]:
    """Return the exports to start with: the stable version, then earlier ones, then later ones.

    A replica that starts with another version loads the stable version after its start.
    """
    rollout = PointerFiles(storage_of(settings)).read(settings.domain)
    stable = 0 if rollout is None else rollout.stable
    numbers = exported_versions(settings)
    earlier = [number for number in numbers if number <= stable]
    later = [number for number in numbers if number > stable]
    return [export_folder(settings) / str(number) for number in (*reversed(earlier), *later)]
