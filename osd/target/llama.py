"""Configuration and weights of Llama-shaped models, loaded without the modelling code of transformers.

Importing that code takes seconds and more than 100 MB. Our own decoders, and drafters that share the target's embedding
and head, need only configuration and weights. Names are those of transformers.
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
"""Accepted architecture by ``model_type``."""

_REQUIRED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Fields that ``config.json`` must contain, because their defaults in transformers differ between model types."""

_FORBIDDEN_FIELDS = (
    "mlp_bias",
    "use_sliding_window",
    "partial_rotary_factor",
    "quantization_config",
    "per_layer_config",
)
"""Fields that must be unset, because they change the layout or the computation of the model."""

_FIXED_ANGLES = ("default", "linear", "yarn", "llama3")


class LlamaShapedConfig(PreTrainedConfig):
    """Configuration of a Llama-shaped model, with the field names of transformers."""

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
    """Weights of a causal language model under transformers' names, without a forward pass.

    Attributes:
        model: the model without its head.
        lm_head: the head.
    """

    def __init__(self, config: LlamaShapedConfig, generation_config: GenerationConfig) -> None:
        """Create the modules on the meta device, without values."""
        super().__init__()
        self.config, self.generation_config = config, generation_config
        with torch.device("meta"):
            self.model = _Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.rotary_emb = Rotary(config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head share the embedding's weight if the configuration ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_decoder(self) -> nn.Module:
        """Return the model without its head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the linear layer that computes the logits."""
        return self.lm_head


class _Decoder(nn.Module):
    def __init__(self, config: LlamaShapedConfig) -> None:
        super().__init__()
        table = torch.empty(config.vocab_size, config.hidden_size)  # a random table would import PyTorch's compiler
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
    """Rotary embedding over the halves of each whole head, with one fixed angle per position and plane.

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
        """Return cosines and sines [..., head_dim] at ``places`` [...], in the dtype and on the device of ``x``."""
        angles = places[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)


def read_config(directory: Path) -> LlamaShapedConfig | None:
    """Return the configuration of the model in a directory; None if it is not Llama-shaped or a field is missing."""
    try:
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind not in _ARCHITECTURES or fields.get("architectures") != [_ARCHITECTURES[kind]]:
        return None
    if any(name not in fields for name in _REQUIRED_FIELDS) or any(fields.get(name) for name in _FORBIDDEN_FIELDS):
        return None
    if fields["hidden_act"] != "silu" or len(set(fields.get("layer_types") or ["full_attention"])) > 1:
        return None
    window = fields.get("sliding_window", ...)
    if kind == "mistral" and window is ...:  # transformers has a default for it that the architecture does not fix
        return None
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) not in _FIXED_ANGLES or "partial_rotary_factor" in rope:
        return None
    fields["sliding_window"] = window if kind == "mistral" else None
    fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return LlamaShapedConfig(**fields)


def empty_weights(directory: Path, config: LlamaShapedConfig) -> LlamaWeights:
    """Return the model of a directory with all its weights on the meta device."""
    return LlamaWeights(config, generation_config(directory, config))


def generation_config(directory: Path, config: PreTrainedConfig) -> GenerationConfig:
    """Return the generation settings stored in a directory, else those derived from its configuration."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return GenerationConfig.from_model_config(config)
