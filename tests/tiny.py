"""Tiny random Llama with a byte-level tokenizer, for tests that need no language."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from osd.target.model import load_model

VOCABULARY, HIDDEN = 259, 64
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}<|assistant|>"
)
"""Chat template with tools in the format of Hermes."""


def make_tiny(directory: Path, *, seed: int = 0, layers: int = 4, sharpness: float = 4.0, **config: Any) -> Path:
    """Write a Llama with ``layers`` layers to ``directory``; ``sharpness`` scales its logits."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "bos_token_id": 256,
        "eos_token_id": 257, "pad_token_id": 258, "tie_word_embeddings": True,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes | config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
        model.model.norm.weight.fill_(sharpness)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def _loaded(directory: Path, device: str) -> nn.Module:
    return load_model(directory, "float32", device)


def loaded(directory: Path, device: str = "cpu") -> nn.Module:
    """Return a copy of the model in ``directory``, which is read once."""
    return copy.deepcopy(_loaded(directory, device))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def thinking_tokenizer(special: bool) -> PreTrainedTokenizerFast:
    """Return ``tokenizer`` with tokens for the marks of thinking, which are special tokens if ``special``."""
    fast = tokenizer()
    fast.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")], special_tokens=special)
    return fast


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Words with U+2581 for a space, bytes as ``<0xNN>``; as Llama 2 has it, the decoder drops the first space."""
    words = ["\u2581The", "\u2581sky", "\u2581is", "\u2581blue", "\u2581", "ly", ".", "\u2581\u2581"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
