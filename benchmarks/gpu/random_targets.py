"""Targets with random weights, created on their device; the time of a forward does not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from osd.drafting.eagle.drafter import Eagle
from osd.drafting.shapes import EagleShape
from osd.runtime.causal_lm import decoder_layers, end_weights, text_config
from osd.runtime.generic import NAME

_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "small": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of Llama 3.2 1B (1.24 billion parameters), Llama 3 8B, and a small one for a CPU."""

DRAFTED = 32_000
"""Size of the draft vocabulary, as in EAGLE-3's heads for Llama 3."""


def make_target(shape: str, dtype: torch.dtype, device: torch.device, sharpness: float = 1.0) -> nn.Module:
    """Return a Llama of one of ``SHAPES`` with random weights; ``sharpness`` scales its logits.

    The small shape has the same weights on every device.
    """
    config = LlamaConfig(**SHAPES[shape], rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    rotary = type(model.model.rotary_emb)(config=config)
    model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = rotary.to(device)
    # Random numbers of the CPU are the same on every machine, but take minutes for billions of weights.
    generator_device = torch.device("cpu") if shape == "small" else device
    generator = torch.Generator(generator_device).manual_seed(0)
    deviation = 0.02 if shape != "small" else 0.08
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                drawn = torch.empty(
                    weight.shape, device=generator_device, dtype=torch.float32 if shape == "small" else dtype
                )
                weight.copy_(drawn.normal_(0, deviation, generator=generator))
            else:
                weight.fill_(1.0)
        model.model.norm.weight.fill_(sharpness)
    return model.eval().requires_grad_(False)


def make_drafter(target: nn.Module) -> Eagle:
    """Return an untrained EAGLE head of the usual size for the target, with its embedding and head."""
    taps = Eagle.usual_taps(len(decoder_layers(target)))
    shape = EagleShape.like(target, DRAFTED, intermediate=text_config(target).intermediate_size, taps=taps)
    drafter = Eagle(shape, *end_weights(target))
    drafter.set_vocabulary(torch.arange(shape.vocabulary))
    return drafter


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with ``vocabulary`` ids: one for each byte, the rest unused."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<|{number}|>" for number in range(len(alphabet), vocabulary))]
    raw = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)
