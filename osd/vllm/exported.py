"""Origin of an exported drafter, from the file that ``osd drafters export`` writes next to its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from osd.vllm.settings import SettingsError

_PROVENANCE = "osd.json"


@dataclass(frozen=True)
class ExportedDrafter:
    """Exported drafter.

    Attributes:
        folder: the directory of the export.
        domain: the domain of the drafter.
        version: the number of the exported version.
        drafter: the configuration of the drafter.
        target: the label of its target, "" in exports of earlier releases.
        weights: the file of its weights.
    """

    folder: Path
    domain: str
    version: int
    drafter: dict[str, Any]
    target: str
    weights: Path

    @classmethod
    def read(cls, folder: str | None) -> Self:
        """Read the origin of the export in ``folder``.

        Raises:
            SettingsError: ``folder`` has no export of osd.
        """
        path = Path(folder or "")
        try:
            origin = json.loads((path / _PROVENANCE).read_bytes())
            domain, version = str(origin["domain"]), int(origin["version"])
            weights = next(iter(sorted(path.glob("*.safetensors"))))
            return cls(path, domain, version, dict(origin["drafter"]), str(origin.get("target", "")), weights)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise SettingsError(
                f"{folder} holds no drafter that osd drafters export wrote: start vLLM with such an export"
            ) from None
