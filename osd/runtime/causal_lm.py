"""The parts of a causal language model of transformers, which gives them no types that a checker could follow."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def text_config(model: nn.Module) -> Any:
    """The configuration of the part that reads text."""
    return cast(Any, model).config.get_text_config()


def decoder_of(model: nn.Module) -> Any:
    """The model without its head."""
    return cast(Any, model).get_decoder()


def ends_of(model: nn.Module) -> tuple[Any, Any]:
    """The input embedding and the head."""
    return cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers.

    Raises:
        NotImplementedError: it keeps them where no known model does.
    """
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise NotImplementedError(f"{type(model).__name__}: cannot find its decoder layers")
