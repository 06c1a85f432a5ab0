"""First weights of EAGLE: the target's embedding, head and last layer, which speed up learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from osd.drafting.shapes import EagleShape
from osd.runtime.causal_lm import end_weights, text_config
from osd.runtime.taps import tapped


@torch.no_grad()
def fill_ends(weights: dict[str, nn.Parameter], shape: EagleShape, target: nn.Module) -> None:
    """Fill the head of a new drafter with the target's for the lowest ids, and the fusing layer.

    The fusing layer lets the highest tap pass.
    """
    weights["head.weight"].copy_(end_weights(target)[1][: shape.vocabulary])
    weights["fuse.weight"].mul_(0.1)
    weights["fuse.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)


@torch.no_grad()
def fill(weights: dict[str, nn.Parameter], shape: EagleShape, target: nn.Module, size: float) -> None:
    """Fill the parameters of a new drafter for the lowest ids with parts of the target.

    The highest tap passes through the fusing layer at its ``size_of_hidden``, ``size``. The decoder layer is a copy of
    the target's last one if the shapes agree, and so starts with the inputs that it was trained on.
    """
    fill_ends(weights, shape, target)
    state = target.state_dict()
    weights["tap_norm"][-1] *= size
    for name, value in of_layer(state, text_config(target).num_hidden_layers - 1, LAST_LAYER).items():
        weight = weights[name]
        if value.shape == weight.shape:
            weight.copy_(value)
        elif value.shape == weight[:, shape.hidden :].shape:  # [out, embedding | feature]
            weight[:, : shape.hidden] *= 0.5
            weight[:, shape.hidden :] = value
    copy_final_norm(weights["norm.weight"], state)


def of_layer(state: Mapping[str, Tensor], layer: int, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a target layer by our names; ``names`` maps these to the target's."""
    ends = {ours: f"layers.{layer}.{theirs}" for ours, theirs in names.items()}
    return {ours: value for ours, end in ends.items() for name, value in state.items() if name.endswith(end)}


@torch.no_grad()
def copy_final_norm(weight: Tensor, state: Mapping[str, Tensor]) -> None:
    """Copy the target's final norm to ``weight``, if it has one."""
    for name, value in state.items():
        if name.endswith(("model.norm.weight", "ln_f.weight")):
            weight.copy_(value)
            return


LAST_LAYER = {
    "feature_norm.weight": "input_layernorm.weight",
    **{f"{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@torch.no_grad()
def size_of_hidden(target: nn.Module, tap: int) -> float:
    """Return the median root mean square of the output of layer ``tap`` for frequent tokens; runs ``target`` once."""
    with tapped(target, (tap,)) as outputs:
        run_on_frequent_tokens(target)
    return float(outputs[tap].pow(2).mean(-1).sqrt().median())


@torch.no_grad()
def run_on_frequent_tokens(target: nn.Module) -> None:
    """Run ``target`` once on frequent tokens, for hooks that measure its states."""
    model: Any = target
    vocabulary: int = text_config(model).vocab_size
    ids = torch.arange(min(64, vocabulary // 2), min(192, vocabulary))[None]  # the first ids are often special ones
    restore = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(restore)
