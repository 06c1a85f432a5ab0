"""Longest text that the target decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from osd.config import Settings
from osd.runtime.decoder import fixed_up_to
from osd.runtime.device import pick_device
from osd.runtime.kv_cache import heads_of, places_within
from osd.runtime.machine import usable_memory
from osd.target.model import DTYPES, load_config

_USUAL = 2048
"""Tokens that the memory never limits further, and length of a model whose configuration does not state it."""

_SHARE = 4
"""Without ``engine.kv_mb`` the keys and values of all slots take at most this part of the memory: a quarter."""

_STEP = 256


def context_of(settings: Settings, directory: Path) -> int:
    """Return the largest number of tokens of prompt and completion.

    It is ``engine.context``, limited by the positions of the model unless its attention reads selected tokens only.
    Without this setting it is the length of the model, limited by the memory.

    Args:
        settings: all settings.
        directory: directory of the target.
    """
    chosen, config = settings.engine.context, load_config(directory)
    if chosen is None:
        return min(_length(config), max(_affordable(settings, config), _USUAL))
    if settings.target.attention.selection is not None:
        return chosen
    return min(chosen, getattr(config, "max_position_embeddings", None) or chosen)


def describe_context(settings: Settings, directory: Path) -> str:
    """Return the largest number of tokens and its reason, as text for the operator."""
    context, length = context_of(settings, directory), _length(load_config(directory))
    if context == settings.engine.context:
        reason = "engine.context"
    elif context == length:
        reason = "the length of the model"
    else:
        limit = "the memory" if settings.engine.kv_mb is None else "engine.kv_mb"
        reason = f"limited by {limit}; the model allows {length:,} (engine.context)"
    return f"{context:,} tokens for a prompt with its completion: {reason}"


def _length(config: Any) -> int:
    """Return the longest text for which a model's rotary angles are fixed, or else the number of its positions."""
    return fixed_up_to(config)[1] or getattr(config, "max_position_embeddings", None) or _USUAL


def _affordable(settings: Settings, config: Any) -> int:
    """Return the length that the memory allows: of a request in half of ``engine.kv_mb``, or else of all slots."""
    engine, (heads, dim) = settings.engine, heads_of(config)
    if engine.kv_mb is not None:
        memory = (engine.kv_mb << 20) // 2
    else:
        device = pick_device(settings.target.device)
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory * settings.target.tensor_parallel
        else:
            memory = usable_memory()
        memory //= _SHARE * engine.slots
    width = dim * DTYPES[settings.target.dtype].itemsize
    places = places_within(config.num_hidden_layers, heads, memory, width) - engine.max_draft - 1
    return places // _STEP * _STEP
