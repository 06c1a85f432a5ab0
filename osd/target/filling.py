"""Weights from safetensors files into a model that has none yet, by name, and no more of them than are asked for."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers


def fill(model: nn.Module, directory: Path, dtype: torch.dtype | None, layers: Collection[int] | None = None) -> bool:
    """Give a causal language model on the meta device the weights of a directory; False where they have other names.

    Of its decoder layers only ``layers`` are read, None for all; the others stay on the meta device. ``dtype`` is None
    for that of the file. Weights whose dtype need not change stay in the file, and come into memory when they are
    looked at.
    """
    wanted = _once(model)
    left_out = {
        id(value)
        for number, layer in enumerate(decoder_layers(model))
        if layers is not None and number not in layers
        for value in layer.state_dict(keep_vars=True).values()
    }
    shapes: dict[str, list[int]] = {}
    read: dict[str, Tensor] = {}
    for file in _files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                shapes[name] = tensors.get_slice(name).get_shape()
                if name in wanted and id(wanted[name]) not in left_out:
                    read[name] = tensors.get_tensor(name).to(dtype)
    if shapes != {name: list(value.shape) for name, value in wanted.items()}:
        return False
    model.load_state_dict(read, strict=False, assign=True)
    owner: Any = model
    owner.tie_weights()
    return True


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under the first of their names each: what is tied stands in a file once."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        names.setdefault(id(value), name)
    return {name: state[name] for name in names.values()}


def _files(directory: Path) -> list[Path]:
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    return [directory / part for part in sorted(set(parts))]
