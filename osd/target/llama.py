"""Llama-shaped models as configuration and weights alone, read without what transformers runs them with.

Importing that takes seconds and more than a hundred megabytes, and the decoders of ours that compute such a model, like
drafters that share its embedding and head, read nothing of it but these. Names are those of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""By ``model_type``."""

_SAID = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""What a ``config.json`` must say itself: transformers has other defaults for each kind of model."""

_OTHERWISE = ("mlp_bias", "use_sliding_window", "partial_rotary_factor", "quantization_config", "per_layer_config")
"""What may not be set: such a model is laid out otherwise, or computed otherwise."""

_FIXED_ANGLES = ("default", "linear", "yarn", "llama3")


class LlamaShapedConfig(PreTrainedConfig):
    """The configuration of a llama-shaped model, with the fields that transformers' own class has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False


class LlamaWeights(nn.Module):
    """The weights of a causal language model under transformers' names; nothing here computes with them.

    Attributes:
        model: without its head.
        lm_head: the head.
    """

    def __init__(self, config: LlamaShapedConfig, generation_config: GenerationConfig) -> None:
        """Make the weights, of which nothing is there yet: they are on the meta device."""
        super().__init__()
        self.config, self.generation_config = config, generation_config
        with torch.device("meta"):
            self.model = _Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.rotary_emb = Rotary(config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Have the head be the embedding where the model has one for both."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_decoder(self) -> nn.Module:
        """The model without its head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head


class _Decoder(nn.Module):
    def __init__(self, config: LlamaShapedConfig) -> None:
        super().__init__()
        table = torch.empty(config.vocab_size, config.hidden_size)  # drawing one at random imports PyTorch's compiler
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb: nn.Module


class _Layer(nn.Module):
    def __init__(self, config: LlamaShapedConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class _Attention(nn.Module):
    def __init__(self, config: LlamaShapedConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.head_dim * config.num_attention_heads
        narrow = config.head_dim * config.num_key_value_heads
        reads = config.model_type == "qwen2" or config.attention_bias
        self.q_proj = nn.Linear(hidden, wide, bias=reads)
        self.k_proj = nn.Linear(hidden, narrow, bias=reads)
        self.v_proj = nn.Linear(hidden, narrow, bias=reads)
        self.o_proj = nn.Linear(wide, hidden, bias=config.attention_bias)


class _Mlp(nn.Module):
    def __init__(self, config: LlamaShapedConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Rotary(nn.Module):
    """Angles of a rotary embedding that turns the halves of whole heads, each plane by a fixed one from place to place.

    Attributes:
        inv_freq: [head_dim / 2] float32, these angles.
    """

    turns_halves = True
    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim))
            self._scale = 1.0
        else:
            inverse, self._scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., head_dim] at ``places`` [...], in the dtype of ``x`` and on its device."""
        angles = places[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)


def read_config(directory: Path) -> LlamaShapedConfig | None:
    """The configuration of the model in a directory; None where it is of another shape, or leaves something unsaid."""
    try:
        said = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = said.get("model_type") if isinstance(said, dict) else None
    if kind not in _ARCHITECTURES or said.get("architectures") != [_ARCHITECTURES[kind]]:
        return None
    if any(name not in said for name in _SAID) or any(said.get(name) for name in _OTHERWISE):
        return None
    if said["hidden_act"] != "silu" or len(set(said.get("layer_types") or ["full_attention"])) > 1:
        return None
    window = said.get("sliding_window", ...)
    if kind == "mistral" and window is ...:  # transformers' default for it is no constant of the architecture
        return None
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) not in _FIXED_ANGLES or "partial_rotary_factor" in rope:
        return None
    said["sliding_window"] = window if kind == "mistral" else None
    said["head_dim"] = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
    return LlamaShapedConfig(**said)


def empty_weights(directory: Path, config: LlamaShapedConfig) -> LlamaWeights:
    """The model in a directory, all of whose weights are still on the meta device."""
    return LlamaWeights(config, generation_config(directory, config))


def generation_config(directory: Path, config: PreTrainedConfig) -> GenerationConfig:
    """What a model in a directory says of generating, or what its configuration does."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return GenerationConfig.from_model_config(config)
