"""Tensor names of other libraries for the weights of a version; no drafter object is needed.

EAGLE-3 follows ``Eagle3SpeculatorConfig`` of vllm-project/speculators, Medusa follows FasterDecoding/Medusa, and a
language model keeps its names of transformers.
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
"""Tensor names in the speculators library, by the name in a version."""

_Weights = dict[str, Tensor]


def eagle(config: dict[str, Any], weights: _Weights) -> _Weights:
    """Return the tensors of an EAGLE-3 drafter.

    The vocabulary maps ``t2d`` and ``d2t`` are left out when drafter and target share the vocabulary. The norms of the
    tapped layers become one tensor per layer (``tap_norm`` is "each"), one tensor for all ("joint"), or none.
    """
    tensors = {exported: weights[name] for name, exported in EAGLE.items()}
    if config["vocabulary"] == config["target_vocabulary"]:
        del tensors["t2d"], tensors["d2t"]
    norm = config.get("tap_norm", "each")
    if norm == "each":
        tensors |= {f"fc_norm.{tap}.weight": row for tap, row in enumerate(weights["tap_norm"])}
    elif norm == "joint":
        tensors["input_norm.weight"] = weights["tap_norm"].flatten()
    return tensors


def medusa(config: dict[str, Any], weights: _Weights) -> _Weights:
    """Return the residual blocks of a Medusa drafter; the vocabulary maps keep their names."""
    tensors = {name: weights[name] for name in ("d2t", "t2d")}
    for head in range(config["heads"]):
        tensors |= {f"{head}.0.linear.{name}": weights[name][head] for name in ("weight", "bias")}
    return tensors


def language_model(config: dict[str, Any], weights: _Weights) -> _Weights:
    """Return the weights of a causal language model unchanged: they have the names of transformers."""
    return weights


LAYOUTS: dict[str, Callable[[dict[str, Any], _Weights], _Weights]] = {
    "eagle": eagle,
    "medusa": medusa,
    "language_model": language_model,
}
"""Functions from the config and the weights of a version to the tensors of a checkpoint, by kind of drafter."""
