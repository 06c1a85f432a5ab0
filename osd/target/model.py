"""Read a target, or another model of transformers, from the directory that ``osd.target.load`` has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from osd.runtime.causal_lm import decoder_layers, inverse_frequencies
from osd.runtime.device import pick_device
from osd.runtime.generic import NAME

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(directory: Path, dtype: str, device: str) -> nn.Module:
    """Read a causal language model from a directory, ready for ``SlotModel``; "auto" keeps the dtype of its file."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES.get(dtype, dtype), attn_implementation=NAME, local_files_only=True
    )
    return model.to(pick_device(device))


def check_rotary(directory: Path) -> int:
    """Check that the model in a directory has rotary positions, without its weights; return its number of layers.

    Raises:
        ValueError: it has none, or some that ``inverse_frequencies`` does not know.
    """
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(load_config(directory))
    inverse_frequencies(model)
    return len(decoder_layers(model))


def load_config(directory: Path) -> Any:
    """Read the text configuration of the model in a directory."""
    return AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
