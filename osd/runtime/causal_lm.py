"""Access to the parts of a causal language model of transformers, whose classes have no usable type annotations."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from osd.runtime.decoder import fixed_angles
from osd.runtime.kv_cache import heads_of

_TURN = "apply_rotary_pos_emb"
"""Name in transformers of the function that rotates queries and keys, in each model's module."""


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language part."""
    return cast(Any, model).config.get_text_config()


def decoder_of(model: nn.Module) -> Any:
    """Return the model without its head."""
    return cast(Any, model).get_decoder()


def ends_of(model: nn.Module) -> tuple[Any, Any]:
    """Return the input embedding and the head."""
    return cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()


def end_weights(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weights of embedding and head, each [vocabulary, hidden] in bfloat16, as drafters share them."""
    embedding, head = ends_of(model)
    return embedding.weight.detach().to(torch.bfloat16), head.weight.detach().to(torch.bfloat16)


def check_table(model: nn.Module) -> None:
    """Check that the input embedding is a plain table, so that it can hold rows that are not tokens.

    Raises:
        ValueError: it is another module, for example one with scaled rows.
    """
    embedding, _ = ends_of(model)
    if type(embedding) is not nn.Embedding:
        raise ValueError(f"{type(model).__name__} embeds by {type(embedding).__name__}, must embed by a plain table")


def attention_of(model: nn.Module) -> dict[str, Any]:
    """Return the attention's ``heads``, ``kv_heads``, ``head_dim``, ``eps`` of its norms, and ``rope_theta``."""
    config = text_config(model)
    kv_heads, dim = heads_of(config)
    return {
        "heads": config.num_attention_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
    }


def inverse_frequencies(model: nn.Module) -> Tensor:
    """Return the angles of the rotary position embedding, [head_dim / 2] float32, in radians per position.

    Angle i rotates dimensions i and i + head_dim / 2 of each head. Only the configuration and the classes are read, so
    the model may be on the meta device.

    Raises:
        ValueError: the model has no rotary embedding or an unsupported one: it pairs other dimensions, rotates only a
            part of each head, or its angles depend on the length of the text.
    """
    name, config = type(model).__name__, text_config(model)
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is None or not getattr(config, "rope_parameters", None):
        raise ValueError(f"{name} has no rotary positions")
    if getattr(rotary, "turns_halves", False):  # our own class; other classes are tested below
        return rotary.inv_freq
    made = type(rotary)(config=config)
    inverse, turn = getattr(made, "inv_freq", None), getattr(sys.modules[type(model).__module__], _TURN, None)
    dim = attention_of(model)["head_dim"]
    if inverse is not None and turn is not None and 2 * len(inverse) == dim and fixed_angles(config):
        x, places = torch.randn(1, 1, 3, dim, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1, 50]])
        cosines, sines = made(x, places)
        turned = turn(x, x, cosines, sines)[0]
        angles = places[0, :, None] * inverse.float()
        first, second = (x * turned[0, 0, 0].norm() / x[0, 0, 0].norm()).chunk(
            2, -1
        )  # some models also scale the heads
        goal = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        if torch.allclose(turned, torch.cat(goal, -1), atol=1e-4):
            return inverse.float()
    raise ValueError(f"{name} has rotary positions that do not turn the halves of whole heads by fixed angles")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers.

    Raises:
        NotImplementedError: the model has them under an unknown name.
    """
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise NotImplementedError(f"{type(model).__name__}: cannot find its decoder layers")


def layers_name(model: nn.Module) -> str:
    """Return the path of the decoder layers from the root of ``model``."""
    layers = decoder_layers(model)
    return next(name for name, module in model.named_modules() if module is layers)


def final_norm(model: nn.Module) -> nn.Module:
    """Return the norm between the last decoder layer and the head.

    Raises:
        NotImplementedError: the model has it under an unknown name.
    """
    decoder = decoder_of(model)
    for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f"):
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise NotImplementedError(f"{type(model).__name__}: cannot find the norm before its head")
