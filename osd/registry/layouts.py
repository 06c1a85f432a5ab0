"""Tensors of a version by the names that other libraries load them under; the drafter itself is not made for that.

EAGLE-3's are those of ``Eagle3SpeculatorConfig`` (vllm-project/speculators), Medusa's those of FasterDecoding/Medusa,
and a language model's are its own, of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

EAGLE = {
    "fuse.weight": "fc.weight",
    "embedding_norm.weight": "layers.0.input_layernorm.weight",
    "feature_norm.weight": "layers.0.hidden_norm.weight",
    "q_proj.weight": "layers.0.self_attn.q_proj.weight",
    "k_proj.weight": "layers.0.self_attn.k_proj.weight",
    "v_proj.weight": "layers.0.self_attn.v_proj.weight",
    "o_proj.weight": "layers.0.self_attn.o_proj.weight",
    "mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
    "gate_proj.weight": "layers.0.mlp.gate_proj.weight",
    "up_proj.weight": "layers.0.mlp.up_proj.weight",
    "down_proj.weight": "layers.0.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "t2d": "t2d",
    "d2t": "d2t",
}
"""Our names and theirs."""

_Weights = dict[str, Tensor]


def eagle(config: dict[str, Any], weights: _Weights) -> _Weights:
    """EAGLE-3: maps of the vocabulary only where it is not the target's, and norms by where they stand."""
    tensors = {theirs: weights[mine] for mine, theirs in EAGLE.items()}
    if config["vocabulary"] == config["target_vocabulary"]:
        del tensors["t2d"], tensors["d2t"]
    norm = config.get("tap_norm", "each")
    if norm == "each":
        tensors |= {f"fc_norm.{place}.weight": row for place, row in enumerate(weights["tap_norm"])}
    elif norm == "joint":
        tensors["input_norm.weight"] = weights["tap_norm"].flatten()
    return tensors


def medusa(config: dict[str, Any], weights: _Weights) -> _Weights:
    """Medusa's residual blocks, and the draft vocabulary as we have it."""
    tensors = {name: weights[name] for name in ("d2t", "t2d")}
    for head in range(config["heads"]):
        tensors |= {f"{head}.0.linear.{name}": weights[name][head] for name in ("weight", "bias")}
    return tensors


def language_model(config: dict[str, Any], weights: _Weights) -> _Weights:
    """A causal language model of transformers."""
    return weights


LAYOUTS: dict[str, Callable[[dict[str, Any], _Weights], _Weights]] = {
    "eagle": eagle,
    "medusa": medusa,
    "language_model": language_model,
}
"""By kind of drafter: from the config and the weights of a version to the tensors of a checkpoint."""
