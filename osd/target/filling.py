"""Weights from safetensors files into a model that has none yet, by name, and no more of them than are asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers, layers_name
from osd.runtime.memory import give_back


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
    chosen = {name for name, value in wanted.items() if id(value) not in left_out}
    shapes, read = _read(directory, chosen, dtype)
    if shapes != {name: list(value.shape) for name, value in wanted.items()}:
        return False
    model.load_state_dict(read, strict=False, assign=True)
    owner: Any = model
    owner.tie_weights()
    return True


@contextmanager
def layer_by_layer(model: nn.Module, directory: Path, dtype: torch.dtype) -> Generator[None]:
    """Whenever a decoder layer of ``model`` runs inside, have it read its weights before, and let go of them after it.

    They are on the meta device at other times, and the directory's files name them as the model does.
    """
    name = layers_name(model)

    def arrive(prefix: str, layer: nn.Module, _inputs: object) -> None:
        names = {prefix + part for part in layer.state_dict()}
        read = _read(directory, names, dtype)[1]
        layer.load_state_dict({part.removeprefix(prefix): value for part, value in read.items()}, assign=True)

    def leave(layer: nn.Module, _inputs: object, _output: object) -> None:
        layer.to("meta")
        give_back()

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers(model)):
            stack.enter_context(layer.register_forward_pre_hook(partial(arrive, f"{name}.{number}.")))
            stack.enter_context(layer.register_forward_hook(leave))
        yield


def _read(
    directory: Path, names: Collection[str], dtype: torch.dtype | None
) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """The shapes of all tensors in a directory's files, and those called ``names``."""
    shapes: dict[str, list[int]] = {}
    read: dict[str, Tensor] = {}
    for file in _files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                shapes[name] = tensors.get_slice(name).get_shape()
                if name in names:
                    read[name] = tensors.get_tensor(name).to(dtype)
    return shapes, read


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
