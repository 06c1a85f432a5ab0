"""Base class of formats."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from osd.drafting.trainable import Trainable

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "osd.json"


class FormatError(ValueError):
    """Error of a drafter that cannot be written or read in a format; the message gives the reason in one line."""


@dataclass(frozen=True)
class ExportOrigin:
    """Origin of an exported drafter: ``version`` of ``domain``, for the target in the directory ``target``.

    ``name`` is the target's hub id or directory, for other libraries. ``depth`` is the default number of draft tokens.
    ``label`` is the target's label in traces; by default it follows from ``name`` and ``target``.
    """

    domain: str
    version: int
    name: str
    target: Path
    depth: int
    label: str = ""


class Format(ABC):
    """Format of drafters of a ``kind``: ``config.json`` and a safetensors file named ``weights``.

    Every method except ``recognises`` raises FormatError for a drafter or a file that the format does not support.
    """

    kind: str
    weights: str

    @abstractmethod
    def write(self, drafter: Any, origin: ExportOrigin, folder: Path) -> None:
        """Write the files of a drafter of the kind."""

    @abstractmethod
    def in_vllm(self, drafter: Any, depth: int) -> dict[str, Any]:
        """Return vLLM's ``--speculative-config`` without ``model``, with ``depth`` tokens if possible."""

    @abstractmethod
    def recognises(self, config: dict[str, Any]) -> bool:
        """Return whether the content of a ``config.json`` is in this format; an unknown content is no error."""

    @abstractmethod
    def read(self, folder: Path, config: dict[str, Any], target: Path) -> Trainable:
        """Return the drafter in ``folder`` for the target in ``target``; raise DrafterError for wrong weights."""

    def save(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write ``config.json`` and the file of weights."""
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        # ``save_file`` would restrict the permissions to the owner.
        owned = {name: tensor.clone() for name, tensor in tensors.items()}
        (folder / self.weights).write_bytes(safetensors.torch.save(owned, {"format": "pt"}))

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors in the file of weights."""
        try:
            return safetensors.torch.load_file(folder / self.weights)
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{folder / self.weights} cannot be read: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise FormatError if there is none."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} cannot be read: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{file} is not a JSON object")
    return value
