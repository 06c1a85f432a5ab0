"""Formats in which other libraries store drafters, by name."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from osd.drafting.formats.base import CONFIG, PROVENANCE, WEIGHTS, ExportOrigin, Format, FormatError, read_json
from osd.drafting.formats.medusa import MedusaHeads
from osd.drafting.formats.speculators import Speculators
from osd.drafting.formats.transformers import Transformers
from osd.drafting.trainable import Trainable
from osd.target.identity import identify

FORMATS: dict[str, Format] = {
    "speculators": Speculators(),
    "transformers": Transformers(),
    "medusa": MedusaHeads(),
}
"""Values of ``osd drafters export --format``; the first format that recognises a directory reads it."""

__all__ = ["FORMATS", "ExportOrigin", "FormatError", "read", "vllm_config", "write"]


def write(drafter: Trainable, name: str, origin: ExportOrigin, folder: Path) -> None:
    """Write a drafter to a new directory, which appears when it is complete.

    Raises:
        FormatError: the format does not support the drafter, or the directory exists and is not empty.
        OSError: the files cannot be written.
    """
    chosen = FORMATS[name]
    if chosen.kind != drafter.kind:
        suitable = [f"export it with --format {other}" for other, form in FORMATS.items() if form.kind == drafter.kind]
        advice = suitable[0] if suitable else "no format does, and vLLM cannot load it"
        raise FormatError(f"{name} does not support {drafter.kind} drafters; {advice}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FormatError(f"{folder} exists and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        chosen.write(drafter, origin, temporary)
        provenance = {"domain": origin.domain, "version": origin.version, "drafter": drafter.config()}
        label = origin.label or identify(origin.name, origin.target).label
        provenance |= {"sha256": _hash(temporary / chosen.weights), "target": label}
        (temporary / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        os.replace(temporary, folder)  # onto an empty directory or nothing
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def vllm_config(drafter: Trainable, name: str, folder: Path, depth: int) -> dict[str, Any]:
    """Return vLLM's ``--speculative-config`` for a drafter in ``folder``, with ``depth`` tokens if possible."""
    return {"model": str(folder), **FORMATS[name].in_vllm(drafter, depth)}


def read(folder: Path, target: Path) -> tuple[str, Trainable]:
    """Return the name of the format in ``folder`` and its drafter for a target.

    Raises:
        FormatError: no format recognises it, it does not match its hash, or its drafter is not supported.
        osd.drafting.base.DrafterError: a weight is missing, unknown, of a wrong shape or not finite.
    """
    if not (folder / CONFIG).is_file():
        raise FormatError(f"{folder} must hold {CONFIG} and {WEIGHTS}")
    config = read_json(folder / CONFIG)
    for name, form in FORMATS.items():
        if form.recognises(config):
            _check_hash(folder, form.weights)
            return name, form.read(folder, config, target)
    raise FormatError(f"{folder / CONFIG} is in none of the formats {', '.join(FORMATS)}")


def _check_hash(folder: Path, weights: str) -> None:
    if not (folder / weights).is_file():
        pickled = next(folder.glob("*.bin"), None)
        advice = f"; convert {pickled.name}, which can contain code, to safetensors" if pickled else ""
        raise FormatError(f"{folder} must hold {CONFIG} and {weights}{advice}")
    if (folder / PROVENANCE).is_file():
        expected = read_json(folder / PROVENANCE).get("sha256")
        if expected != _hash(folder / weights):
            raise FormatError(f"{folder / weights} does not match the sha256 of {PROVENANCE}")


def _hash(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
