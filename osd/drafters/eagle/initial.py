"""EAGLE's first weights: the target's own embedding, head and last layer, so that it learns fast from nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from osd.drafters.base import DrafterError
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.eagle.shape import EagleShape
from osd.runtime.taps import tapped


def eagle_from_config(config: dict[str, Any], target: nn.Module) -> Eagle:
    """Make the module that ``config`` describes around the embedding of ``target``."""
    fields = {name: value for name, value in config.items() if name != "kind"}
    fields["taps"] = tuple(fields["taps"])
    return Eagle(EagleShape(**fields), _embedding(target), _head(target))


def eagle_from_target(target: nn.Module, vocabulary: int) -> Eagle:
    """Make the drafter that a target starts with.

    Args:
        target: a causal language model of transformers, float32.
        vocabulary: how many target ids it may draft.

    Raises:
        DrafterError: the target is too small for three taps or ``vocabulary``.
    """
    config = target.config.get_text_config()  # type: ignore[union-attr, operator]
    layers = config.num_hidden_layers
    if layers < 3:
        raise DrafterError(f"drafter.kind eagle needs a target of at least 3 layers, this one has {layers}")
    heads = config.num_attention_heads
    shape = EagleShape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        target_vocabulary=config.vocab_size,
        vocabulary=min(vocabulary, config.vocab_size),
        taps=(layers // 6, layers // 2, layers - 2),
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
    )
    drafter = Eagle(shape, _embedding(target), _head(target))
    with torch.no_grad():
        _start(drafter, target)
    return drafter


def _embedding(target: nn.Module) -> Tensor:
    return target.get_input_embeddings().weight.detach().to(torch.bfloat16)  # type: ignore[operator]


def _start(drafter: Eagle, target: nn.Module) -> None:
    """Fill a new drafter from the target.

    The highest tap passes through at its own size, so that the layer behind it, a copy of the target's
    last one where the shapes agree, starts on the numbers that it knows.
    """
    shape, state = drafter.shape, target.state_dict()
    drafter.set_vocabulary(torch.arange(shape.vocabulary))
    drafter.head.weight.copy_(_head(target)[: shape.vocabulary])
    drafter.fuse.weight.mul_(0.1)
    drafter.fuse.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
    drafter.tap_norm[-1] *= _size_of_hidden(target, shape.taps[-1])
    last = f"layers.{target.config.num_hidden_layers - 1}."  # type: ignore[union-attr]
    for mine, theirs in LAST_LAYER.items():
        found = [value for name, value in state.items() if name.endswith(last + theirs)]
        weight = drafter.get_parameter(mine)
        if found and found[0].shape == weight.shape:
            weight.copy_(found[0])
        elif found and found[0].shape == weight[:, shape.hidden :].shape:  # [out, embedding | feature]
            weight[:, : shape.hidden] *= 0.5
            weight[:, shape.hidden :] = found[0]
    final = [value for name, value in state.items() if name.endswith(("model.norm.weight", "ln_f.weight"))]
    if final:
        drafter.norm.weight.copy_(final[0])


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


def _head(target: nn.Module) -> Tensor:
    return target.get_output_embeddings().weight.detach().to(torch.bfloat16)  # type: ignore[operator]


def _size_of_hidden(target: nn.Module, tap: int) -> float:
    """The median root mean square of the output of layer ``tap``, over some frequent tokens."""
    vocabulary: int = target.config.vocab_size  # type: ignore[union-attr, assignment]
    ids = torch.arange(min(64, vocabulary // 2), min(192, vocabulary))[None]  # the first ids are often special ones
    restore = target.config._attn_implementation  # type: ignore[union-attr]
    target.set_attn_implementation("eager")  # type: ignore[operator]
    with tapped(target, (tap,)) as outputs:
        target(input_ids=ids, use_cache=False)
    target.set_attn_implementation(restore)  # type: ignore[operator]
    return float(outputs[tap].pow(2).mean(-1).sqrt().median())
