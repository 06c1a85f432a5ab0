"""The trainer's own state on disk: one safetensors file, with everything that is not a tensor as JSON in its header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

_STATE = "state"


class CheckpointError(ValueError):
    """A checkpoint is there and cannot be read; one line."""


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace the checkpoint; a crash at any moment leaves the old one or the new one.

    Args:
        path: the file; its directory is made.
        tensors: what to keep, by name.
        state: JSON.

    Raises:
        OSError: the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    data = safetensors.torch.save(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, {_STATE: json.dumps(state)}
    )
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read what ``save`` wrote, None when there is no checkpoint yet.

    Raises:
        CheckpointError: the file is damaged.
    """
    for stale in path.parent.glob(f".{path.name}.*"):  # of a trainer that was killed while it saved
        stale.unlink(missing_ok=True)
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            state = json.loads((file.metadata() or {})[_STATE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name} cannot be read: its state is no object")
    return tensors, state
