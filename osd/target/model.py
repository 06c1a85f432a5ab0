"""Read a target, or another model of transformers, from the directory that ``osd.target.load`` has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # what it runs models with is imported where its classes are first used
from torch import nn

from osd.runtime.causal_lm import decoder_layers, inverse_frequencies
from osd.runtime.device import pick_device
from osd.runtime.model import runs_own_code
from osd.target.llama import read_config, read_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(directory: Path, dtype: str, device: str) -> nn.Module:
    """Read a causal language model from a directory, ready to run; "auto" keeps the dtype of its file."""
    from osd.runtime.generic import NAME

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES.get(dtype, dtype), attn_implementation=NAME, local_files_only=True
    )
    return model.to(pick_device(device))


def load_weights(directory: Path, dtype: str, device: str) -> nn.Module:
    """``load_model`` for what only looks at weights and configuration: what comes need not run.

    A llama-shaped model comes without what transformers runs it with, which takes seconds and memory to import.
    """
    config = read_config(directory)
    model = None if config is None else read_weights(directory, config, DTYPES.get(dtype))
    return load_model(directory, dtype, device) if model is None else model.to(pick_device(device))


def load_served(directory: Path, dtype: str, device: str, weights: str) -> nn.Module:
    """``load_weights`` for a ``SlotModel`` with such ``weights``, and ``load_model`` where it runs the model's code."""
    model = load_weights(directory, dtype, device)
    return load_model(directory, dtype, device) if runs_own_code(model, weights) else model


def check_rotary(directory: Path) -> int:
    """Check that the model in a directory has rotary positions, without its weights; return its number of layers.

    Raises:
        ValueError: it has none, or some that ``inverse_frequencies`` does not know.
    """
    if (config := read_config(directory)) is not None:
        return config.num_hidden_layers
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(load_config(directory))
    inverse_frequencies(model)
    return len(decoder_layers(model))


def load_config(directory: Path) -> Any:
    """Read the text configuration of the model in a directory."""
    own = read_config(directory)
    return own or transformers.AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
