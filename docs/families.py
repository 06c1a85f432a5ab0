"""Tiny random models of many architectures, and the table of supported architectures: ``python -m docs.families``."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from osd.config import TargetSettings
from osd.runtime.causal_lm import inverse_frequencies
from osd.runtime.decoder import llama_shaped
from osd.target.files import TargetError
from osd.target.load import resolve
from osd.target.opening import load_target

_SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
_ALL_HEADS = {"num_key_value_heads": None, "head_dim": None}
"""For configurations without these fields, whose attention has as many heads for keys as for queries."""

_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4,
}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [2.0 + plane for plane in range(8)], "original_max_position_embeddings": 64,
}  # fmt: skip

_NOISE = 0.12
"""Standard deviation of the noise that is added to the initial matrices, so that answers vary."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOWS,
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "gemma": {},
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "glm": {},
    "glm4": {},
    "gpt2": _ALL_HEADS,
    "gpt_bigcode": _ALL_HEADS,
    "gpt_neox": _ALL_HEADS,
    "granite": {},
    "granitemoe": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "mixtral": _EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmoe": _EXPERTS,
    "opt": _ALL_HEADS,
    "persimmon": _ALL_HEADS,
    "phi": {},
    "phi3": {},
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "bloom": _ALL_HEADS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "diffllama": {},
    "falcon": _ALL_HEADS,
    "gpt_neo": {
        **_ALL_HEADS, "num_hidden_layers": None, "num_attention_heads": None, "num_layers": 4, "num_heads": 4,
        "attention_types": [[["global", "local"], 2]], "window_size": 8,
    },
    "gpt_oss": {**_EXPERTS, **_WINDOWS},
    "gptj": _ALL_HEADS,
    "jamba": _EXPERTS,
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    },
    "llama4_text": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
        "moe_layers": [], "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 1, 1, 0],
    },
    "mamba": {"num_attention_heads": None, "num_key_value_heads": None, "state_size": 8, "intermediate_size": None},
    "mpt": _ALL_HEADS,
    "nemotron": {},
    "qwen3_next": _EXPERTS,
    "stablelm": {},
}  # fmt: skip
"""Fields of the configuration that differ from the common sizes, by ``model_type``; None leaves a field out."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 with longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "qwen2_moe with sliding windows": ("qwen2_moe", {**_EXPERTS, **_WINDOWS, "use_sliding_window": True}),
    "phimoe with sliding windows": ("phimoe", {**_EXPERTS, **_WINDOWS}),
    "qwen3 with sliding windows": (
        "qwen3", {**_WINDOWS, "use_sliding_window": True, "max_window_layers": 0},
    ),
}  # fmt: skip
"""Further models: their family, and fields of the configuration."""


def make_model(name: str, directory: Path) -> Path:
    """Write a model of ``FAMILIES`` or ``VARIANTS`` with random weights in float32, without a tokenizer.

    Returns:
        The directory.
    """
    kind, fields = VARIANTS.get(name, (name, FAMILIES.get(name, {})))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{k: v for k, v in {**_SIZES, **fields}.items() if v is not None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * _NOISE)
    model.save_pretrained(directory)
    return directory


HEADER = "| model | served | layers | tensor parallel | selected context |\n|---|---|---|---|---|\n"


def row(name: str, directory: Path) -> str:
    """Return the row of the table for a model, which is written to ``directory`` and checked as before a start."""
    model = make_model(name, directory / "model")
    settings = TargetSettings(source=str(model), dtype="float32")
    try:
        resolve(settings.source, directory)
        target = load_target(settings, model, slots=2, context=64, scratch=4)
    except TargetError as error:
        reason = str(error).removeprefix("target.source: ").rpartition("which osd does not support: ")[2]
        reason = re.sub(r" \(by .*", "", reason)  # the number differs between machines
        return f"| `{name}` | no: {reason} | | | |"
    llama = llama_shaped(target.model)
    try:
        inverse_frequencies(target.model)
        moves = "yes"
    except ValueError:
        moves = "no"
    return f"| `{name}` | yes | {'own' if llama else 'transformers'} | {'yes' if llama else 'no'} | {moves} |"


def table() -> str:
    """Write and check all models, and return their table."""
    rows: list[str] = []
    for name in [*FAMILIES, *VARIANTS]:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(row(name, Path(directory)))
    return HEADER + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
