"""Loading of the target, or another model of transformers, from the directory that ``osd.target.load`` returns."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers  # imports its modelling code lazily
from torch import nn
from transformers.utils import logging

from osd.runtime.causal_lm import decoder_layers, inverse_frequencies
from osd.runtime.device import pick_device
from osd.runtime.model import runs_own_code
from osd.target import filling
from osd.target.files import TargetError
from osd.target.llama import empty_weights, read_config

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(directory: Path, dtype: str, device: str, layers: int | None = None) -> nn.Module:
    """Return a causal language model from a directory, ready to run.

    Args:
        directory: holds configuration and weights.
        dtype: "bfloat16", "float32", or "auto" for the dtype of the file.
        device: as in ``pick_device``.
        layers: number of decoder layers of the returned model, its first ones; None for all.

    Raises:
        TargetError: weights are missing, or do not fit the configuration.
    """
    if layers is None:
        return _pretrained(directory, dtype).to(pick_device(device))
    config = shortened(auto_config(directory), layers)
    with _silent():  # transformers warns about the weights of the omitted layers
        return _pretrained(directory, dtype, config=config).to(pick_device(device))


@contextmanager
def layer_by_layer(directory: Path) -> Generator[nn.Module]:
    """Yield a causal language model in float32 on the CPU that loads each decoder layer only while it runs.

    A model whose files use other weight names than the model is loaded whole.
    """
    model = on_meta(auto_config(directory))
    if not filling.fill(model, directory, torch.float32, ()):
        yield load_model(directory, "float32", "cpu")
        return
    # Files hold no buffers such as rotary angles. A model with one layer of each kind computes all of them.
    kinds = getattr(load_config(directory), "layer_types", None) or [""]
    shortest = 1 + max(kinds.index(kind) for kind in kinds)
    for path, buffer in load_model(directory, "float32", "cpu", shortest).named_buffers():
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, buffer)
    with filling.layer_by_layer(model, directory, torch.float32):
        yield model.eval()


def load_weights(directory: Path, dtype: str, device: str) -> nn.Module:
    """Return a model for reading its weights and configuration; it may have no forward pass.

    A Llama-shaped model is loaded without the modelling code of transformers, whose import takes seconds and memory.
    """
    if (config := read_config(directory)) is not None:
        model = empty_weights(directory, config)
        if filling.fill(model, directory, DTYPES.get(dtype)):
            return model.to(pick_device(device))
    return load_model(directory, dtype, device)


def load_part(directory: Path, dtype: str = "auto", layers: Collection[int] = ()) -> nn.Module:
    """Return the model on the CPU with only the given decoder ``layers`` and all weights outside the layers.

    The other layers stay on the meta device. A model whose files use other weight names is loaded whole.
    """
    config = read_config(directory)
    model = on_meta(load_config(directory)) if config is None else empty_weights(directory, config)
    filled = filling.fill(model, directory, DTYPES.get(dtype), layers)
    return model if filled else load_model(directory, dtype, "cpu")


def load_served(directory: Path, dtype: str, device: str) -> nn.Module:
    """Return the model for a ``SlotModel``: ``load_weights``, or ``load_model`` if the model's own code will run."""
    model = load_weights(directory, dtype, device)
    return load_model(directory, dtype, device) if runs_own_code(model) else model


def check_rotary(directory: Path) -> int:
    """Check that the model in a directory uses rotary positions, without loading weights; return its number of layers.

    Raises:
        ValueError: it has no rotary positions, or a kind that ``inverse_frequencies`` does not support.
    """
    if (config := read_config(directory)) is not None:
        return config.num_hidden_layers
    model = on_meta(load_config(directory))
    inverse_frequencies(model)
    return len(decoder_layers(model))


def load_config(directory: Path) -> Any:
    """Return the text configuration of the model in a directory."""
    return read_config(directory) or auto_config(directory).get_text_config()


def shortened(config: Any, layers: int) -> Any:
    """Return a copy of ``config`` with only its first ``layers`` decoder layers."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _pretrained(directory: Path, dtype: str, **settings: Any) -> Any:
    from osd.runtime.generic import NAME

    try:
        result: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES.get(dtype, dtype), attn_implementation=NAME, local_files_only=True,
            output_loading_info=True, **settings,
        )  # fmt: skip
    except RuntimeError as error:
        raise TargetError(f"target.source: weights of {directory} do not fit its config.json: {error}") from error
    model, loaded = result
    if missing := loaded["missing_keys"]:  # transformers gives them random values
        raise TargetError(f"target.source: {directory} holds no weight {min(missing)}, which its config.json asks for")
    return model


def auto_config(directory: Path) -> Any:
    """Return transformers' own configuration of the model in a directory."""
    return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def on_meta(config: Any, **settings: Any) -> Any:
    """Return the model of a configuration on the meta device, without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **settings)


@contextmanager
def _silent() -> Generator[None]:
    """Silence the warnings of transformers inside the block."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
