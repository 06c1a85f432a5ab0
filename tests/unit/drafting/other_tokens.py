"""Separate draft models, with the target's tokens or with a different tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.language_model.translation import Translation
from tests.tiny import make_tiny
from tests.unit.analysis.tokenizers_of import byte_level, sentencepiece

PRINTED = [chr(code) for code in range(32, 127)]
PAIRS = [first + second for first in "abcdefghijklm" for second in "aeiou "]
LONG = [f"{first}{second}{first}" for first in "npqrstvwxyz" for second in "aeiou"]
LEFT = [bytes([code]) for code in range(128, 128 + 256 - len(PRINTED) - len(PAIRS) - len(LONG))]
OF_TARGET = [*PRINTED, *PAIRS, *LONG, *LEFT]
"""256 tokens: shared characters and pairs, longer tokens that the draft model spells, and bytes that it cannot."""

OF_DRAFT = ["<unk>", *reversed(PRINTED), *PAIRS]
PIECES = [token.replace(" ", "\u2581") for token in OF_DRAFT]
"""Tokens of the draft model, with SentencePiece's spelling of a space."""

END = len(PIECES)  # the id of the draft model's </s>
SHARED = {*range(len(PRINTED) + len(PAIRS)), 257}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SPELLED = [
    *([OF_DRAFT.index(token)] for token in (*PRINTED, *PAIRS)),
    *([OF_DRAFT.index(letter) for letter in token] for token in LONG),
    *([0] for _ in LEFT),
    [OF_DRAFT.index(letter) for letter in "<s>"], [END], [OF_DRAFT.index(letter) for letter in "<pad>"],
]  # fmt: skip
"""Draft ids of each token of the target."""


def near(target: Any, spelled: list[list[int]], shared: set[int], vocabulary: int, noise: float = 0.0) -> nn.Module:
    """Return the target's layers with ``vocabulary`` tokens; the shared tokens have the target's embeddings."""
    config = type(target.config)(
        **{**target.config.to_dict(), "vocab_size": vocabulary, "max_position_embeddings": 1024} | dict.fromkeys(_IDS)
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state = target.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.shape == state[name].shape:
                value.copy_(state[name])
            else:
                for id in sorted(shared):
                    value[spelled[id][0]] = state[name][id]
            value.add_(torch.randn_like(value) * noise)
    return model


def translated(target: Any, spelled: list[list[int]], shared: set[int], vocabulary: int, noise: float) -> LanguageModel:
    """Return a drafter with a model of ``near``."""
    return LanguageModel(near(target, spelled, shared, vocabulary, noise), False, Translation.of(spelled, shared))


def make_pair(directory: Path, noise: float = 0.0, positions: int = 1024) -> tuple[Path, Path]:
    """Write a target and a draft model with different tokenizers; return their directories."""
    target_dir, source = make_tiny(directory / "target"), directory / "source"
    target_tokenizer = byte_level(OF_TARGET, ["<s>", "</s>", "<pad>"])
    PreTrainedTokenizerFast(tokenizer_object=target_tokenizer, eos_token="</s>").save_pretrained(target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir)
    model: Any = near(target, SPELLED, SHARED, END + 1, noise)
    model.config.eos_token_id = model.generation_config.eos_token_id = END
    model.config.max_position_embeddings = positions
    model.save_pretrained(source)
    draft_tokenizer = sentencepiece(PIECES)
    draft_tokenizer.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=draft_tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(
        source
    )
    return target_dir, source


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "gpt_neox": {"num_key_value_heads": None},
}


def random_model(kind: str) -> LanguageModel:
    """Return a random drafter of an architecture, with the target's tokens."""
    settings = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        **ARCHITECTURES[kind],
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{key: value for key, value in settings.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return rounded(LanguageModel(model, shared=False))


def rounded(drafter: LanguageModel) -> LanguageModel:
    """Return the drafter with weights that bfloat16 represents exactly."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return drafter
