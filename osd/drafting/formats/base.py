"""What a format is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from osd.drafting.trainable import Trainable

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "osd.json"


class FormatError(ValueError):
    """A drafter cannot be written or read in a format; one line that says why."""


@dataclass(frozen=True)
class Origin:
    """What an exported drafter is: ``version`` of ``domain``, for the target in ``target``.

    ``name`` is what another library finds the target by: a hub id, else a directory. ``depth`` is how many tokens a
    draft has when nobody says otherwise.
    """

    domain: str
    version: int
    name: str
    target: Path
    depth: int


class Format(Protocol):
    """One way to store drafters of a ``kind``, as ``config.json`` and a file of ``weights`` in safetensors."""

    kind: str
    weights: str

    def write(self, drafter: Trainable, origin: Origin, folder: Path) -> None:
        """Write a drafter of its kind: both files, and what else the format has."""
        ...

    def in_vllm(self, drafter: Trainable, depth: int) -> dict[str, Any]:
        """What vLLM's ``--speculative-config`` says beside ``model`` to draft with it, ``depth`` tokens where it can.

        Raises:
            FormatError: vLLM does not load it.
        """
        ...

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a ``config.json`` is of this format."""
        ...

    def read(self, folder: Path, config: dict[str, Any], target: Path) -> Trainable:
        """Read a drafter for the target in ``target``.

        Raises:
            FormatError: the config describes what we do not have.
            osd.drafting.base.DrafterError: a weight is wrong.
        """
        ...


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FormatError: there is none.
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} cannot be read: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{file} is not a JSON object")
    return value
