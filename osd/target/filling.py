"""Loader of safetensors weights into a model on the meta device, limited to the layers that are needed."""

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

from osd.freed_memory import give_back
from osd.runtime.causal_lm import decoder_layers, layers_name


def fill(model: nn.Module, directory: Path, dtype: torch.dtype | None, layers: Collection[int] | None = None) -> bool:
    """Load the weights of a directory into a causal language model on the meta device.

    Weights whose dtype does not change stay memory-mapped: the system reads them at their first use.

    Args:
        model: on the meta device.
        directory: holds ``model.safetensors``, or an index and its shards.
        dtype: None keeps the dtype of the file.
        layers: numbers of the decoder layers to load, None for all; the other layers stay on the meta device.

    Returns:
        False, with nothing loaded, if names or shapes of the file's weights differ from the model's.
    """
    wanted = _untied(model)
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
    """Load each decoder layer of ``model`` when its forward starts, and free it when its forward ends.

    Outside its own forward a layer is on the meta device. The names of the weights in ``directory`` must be those of
    the model.
    """
    name = layers_name(model)

    def load_layer(prefix: str, layer: nn.Module, _inputs: object) -> None:
        names = {prefix + part for part in layer.state_dict()}
        read = _read(directory, names, dtype)[1]
        layer.load_state_dict({part.removeprefix(prefix): value for part, value in read.items()}, assign=True)

    def free_layer(layer: nn.Module, _inputs: object, _output: object) -> None:
        layer.to("meta")
        give_back()

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers(model)):
            stack.enter_context(layer.register_forward_pre_hook(partial(load_layer, f"{name}.{number}.")))
            stack.enter_context(layer.register_forward_hook(free_layer))
        yield


def read_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the shapes of all tensors in a directory's files by their name."""
    return _read(directory, (), None)[0]


def read_tensors(directory: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors called ``names`` of a directory's files, in their dtype."""
    return _read(directory, names, None)[1]


def _read(
    directory: Path, names: Collection[str], dtype: torch.dtype | None
) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Return the shapes of all tensors in a directory's files, and the tensors called ``names``."""
    shapes: dict[str, list[int]] = {}
    read: dict[str, Tensor] = {}
    for file in _files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - ``tensors`` is not a dictionary
                shapes[name] = tensors.get_slice(name).get_shape()
                if name in names:
                    read[name] = tensors.get_tensor(name).to(dtype)
    return shapes, read


def _untied(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights, each under the first of its names: a file stores tied weights once."""
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
