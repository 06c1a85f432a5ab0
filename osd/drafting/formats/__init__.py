"""Drafters as other libraries store them, by name, and what a directory holds."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from osd.drafting.formats.base import CONFIG, PROVENANCE, WEIGHTS, Format, FormatError, Origin, read_json
from osd.drafting.formats.medusa import MedusaHeads
from osd.drafting.formats.speculators import Speculators
from osd.drafting.formats.transformers import Transformers
from osd.drafting.trainable import Trainable

FORMATS: dict[str, Format] = {
    "speculators": Speculators(),
    "transformers": Transformers(),
    "medusa": MedusaHeads(),
}
"""What ``osd drafters export --format`` may name; the first that recognises a directory reads it."""

__all__ = ["FORMATS", "FormatError", "Origin", "read", "vllm_config", "write"]


def write(drafter: Trainable, name: str, origin: Origin, folder: Path) -> None:
    """Write a drafter to a new directory, which appears when it is whole.

    Raises:
        FormatError: the format has no such drafter, or the directory is there and not empty.
        OSError: the disk does not take it.
    """
    chosen = FORMATS[name]
    if chosen.kind != drafter.kind:
        usable = [f"export it with --format {other}" for other, one in FORMATS.items() if one.kind == drafter.kind]
        raise FormatError(
            f"{name} has no {drafter.kind} drafter; {usable[0] if usable else 'no format has one, and vLLM loads none'}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FormatError(f"{folder} is there already and not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        chosen.write(drafter, origin, temporary)
        provenance = {"domain": origin.domain, "version": origin.version, "drafter": drafter.config()}
        provenance |= {"sha256": _hash(temporary / chosen.weights)}
        (temporary / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        os.replace(temporary, folder)  # onto an empty directory or nothing
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def vllm_config(drafter: Trainable, name: str, folder: Path, depth: int) -> dict[str, Any]:
    """Return ``--speculative-config`` of vLLM for a drafter in ``folder``, for ``depth`` tokens where it can."""
    return {"model": str(folder), **FORMATS[name].in_vllm(drafter, depth)}


def read(folder: Path, target: Path) -> tuple[str, Trainable]:
    """Read a drafter of a target's in any format, and return the name of the format too.

    Raises:
        FormatError: no format recognises it, it does not match its hash, or we have no such drafter.
        osd.drafting.base.DrafterError: a weight is missing, unknown, of a wrong shape or not finite.
    """
    if not (folder / CONFIG).is_file():
        raise FormatError(f"{folder} must hold {CONFIG} and {WEIGHTS}")
    config = read_json(folder / CONFIG)
    for name, one in FORMATS.items():
        if one.recognises(config):
            _check_whole(folder, one.weights)
            return name, one.read(folder, config, target)
    raise FormatError(f"{folder / CONFIG} is of none of the formats {', '.join(FORMATS)}")


def _check_whole(folder: Path, weights: str) -> None:
    if not (folder / weights).is_file():
        raise FormatError(f"{folder} must hold {CONFIG} and {weights}")
    if (folder / PROVENANCE).is_file():
        expected = read_json(folder / PROVENANCE).get("sha256")
        if expected != _hash(folder / weights):
            raise FormatError(f"{folder / weights} does not match the sha256 of {PROVENANCE}")


def _hash(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
