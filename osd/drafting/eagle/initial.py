"""EAGLE's first weights: the target's own embedding, head and last layer, so that it learns fast from nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from osd.drafting.shapes import EagleShape
from osd.runtime.causal_lm import end_weights, text_config
from osd.runtime.taps import tapped


@torch.no_grad()
def fill(weights: dict[str, nn.Parameter], shape: EagleShape, target: nn.Module, size: float) -> None:
    """Fill the parameters of a new drafter, which drafts the lowest ids, from what is there of the target.

    The highest tap passes through at its own size, which is ``size_of_hidden``, so that the layer behind it, a copy of
    the target's last one where the shapes agree, starts on the numbers that it knows.
    """
    state = target.state_dict()
    weights["head.weight"].copy_(end_weights(target)[1][: shape.vocabulary])
    weights["fuse.weight"].mul_(0.1)
    weights["fuse.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    weights["tap_norm"][-1] *= size
    last = f"layers.{text_config(target).num_hidden_layers - 1}."
    for mine, theirs in LAST_LAYER.items():
        found = [value for name, value in state.items() if name.endswith(last + theirs)]
        weight = weights[mine]
        if found and found[0].shape == weight.shape:
            weight.copy_(found[0])
        elif found and found[0].shape == weight[:, shape.hidden :].shape:  # [out, embedding | feature]
            weight[:, : shape.hidden] *= 0.5
            weight[:, shape.hidden :] = found[0]
    final = [value for name, value in state.items() if name.endswith(("model.norm.weight", "ln_f.weight"))]
    if final:
        weights["norm.weight"].copy_(final[0])


LAST_LAYER = {
    "feature_norm.weight": "input_layernorm.weight",
    "q_proj.weight": "self_attn.q_proj.weight",
    "k_proj.weight": "self_attn.k_proj.weight",
    "v_proj.weight": "self_attn.v_proj.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}


@torch.no_grad()
def size_of_hidden(target: nn.Module, tap: int) -> float:
    """The median root mean square of the output of layer ``tap``, over some frequent tokens; runs ``target`` once."""
    model: Any = target
    vocabulary: int = text_config(model).vocab_size
    ids = torch.arange(min(64, vocabulary // 2), min(192, vocabulary))[None]  # the first ids are often special ones
    restore = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with tapped(model, (tap,)) as outputs:
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(restore)
    return float(outputs[tap].pow(2).mean(-1).sqrt().median())
