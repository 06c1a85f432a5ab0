"""Read a target, or another model of transformers, from the directory that ``osd.target.load`` has found."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers  # what it runs models with is imported where its classes are first used
from torch import nn
from transformers.utils import logging

from osd.runtime.causal_lm import decoder_layers, inverse_frequencies
from osd.runtime.device import pick_device
from osd.runtime.model import runs_own_code
from osd.target import filling
from osd.target.llama import empty_weights, read_config

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(directory: Path, dtype: str, device: str, layers: int | None = None) -> nn.Module:
    """Read a causal language model from a directory, ready to run; "auto" keeps the dtype of its file.

    Of its decoder layers the first ``layers`` are read, and the model has no others; None for all.
    """
    if layers is None:
        return _pretrained(directory, dtype).to(pick_device(device))
    config = shortened(auto_config(directory), layers)
    with _silent():  # about the other layers, for which such a model has no place
        return _pretrained(directory, dtype, config=config).to(pick_device(device))


@contextmanager
def layer_by_layer(directory: Path) -> Generator[nn.Module]:
    """A causal language model in float32 on the CPU to run inside, of whose decoder layers each is read when it runs.

    None is in memory longer than that. A model whose files name its weights otherwise than it does is read whole.
    """
    model = on_meta(auto_config(directory))
    if not filling.fill(model, directory, torch.float32, ()):
        yield load_model(directory, "float32", "cpu")
        return
    # No file has the tables of rotary angles and their like, which a model makes for itself, for each kind of layer.
    kinds = getattr(load_config(directory), "layer_types", None) or [""]
    every = 1 + max(kinds.index(kind) for kind in kinds)
    for name, made in load_model(directory, "float32", "cpu", every).named_buffers():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, made)
    with filling.layer_by_layer(model, directory, torch.float32):
        yield model.eval()


def load_weights(directory: Path, dtype: str, device: str) -> nn.Module:
    """``load_model`` for what only looks at weights and configuration: what comes need not run.

    A llama-shaped model comes without what transformers runs it with, which takes seconds and memory to import.
    """
    if (config := read_config(directory)) is not None:
        model = empty_weights(directory, config)
        if filling.fill(model, directory, DTYPES.get(dtype)):
            return model.to(pick_device(device))
    return load_model(directory, dtype, device)


def load_part(directory: Path, dtype: str = "auto", layers: Collection[int] = ()) -> nn.Module:
    """``load_weights`` on the CPU of all that stands around the decoder layers, and of ``layers`` alone among these.

    The other layers are on the meta device. A model whose files name its weights otherwise than it does is read whole.
    """
    config = read_config(directory)
    model = on_meta(load_config(directory)) if config is None else empty_weights(directory, config)
    filled = filling.fill(model, directory, DTYPES.get(dtype), layers)
    return model if filled else load_model(directory, dtype, "cpu")


def load_served(directory: Path, dtype: str, device: str) -> nn.Module:
    """``load_weights`` for a ``SlotModel``, and ``load_model`` where that runs the model's own code."""
    model = load_weights(directory, dtype, device)
    return load_model(directory, dtype, device) if runs_own_code(model) else model


def check_rotary(directory: Path) -> int:
    """Check that the model in a directory has rotary positions, without its weights; return its number of layers.

    Raises:
        ValueError: it has none, or some that ``inverse_frequencies`` does not know.
    """
    if (config := read_config(directory)) is not None:
        return config.num_hidden_layers
    model = on_meta(load_config(directory))
    inverse_frequencies(model)
    return len(decoder_layers(model))


def load_config(directory: Path) -> Any:
    """Read the text configuration of the model in a directory."""
    own = read_config(directory)
    return own or auto_config(directory).get_text_config()


def shortened(config: Any, layers: int) -> Any:
    """The configuration of a model that is the first ``layers`` decoder layers of the one that ``config`` describes."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _pretrained(directory: Path, dtype: str, **settings: Any) -> Any:
    from osd.runtime.generic import NAME

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES.get(dtype, dtype), attn_implementation=NAME, local_files_only=True, **settings
    )


def auto_config(directory: Path) -> Any:
    """The configuration of the model in a directory, as transformers makes models of it."""
    return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)


def on_meta(config: Any, **settings: Any) -> Any:
    """The model of a configuration, without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **settings)


@contextmanager
def _silent() -> Generator[None]:
    """Nothing is told but errors while a model is read."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
