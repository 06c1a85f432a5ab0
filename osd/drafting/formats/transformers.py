"""Small language models in the format of transformers' ``save_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from osd.drafting.formats.base import WEIGHTS, ExportOrigin, Format, FormatError
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.language_model.translation import translation_of
from osd.drafting.trainable import Trainable
from osd.runtime.causal_lm import ends_of
from osd.target.load import load_tokenizer
from osd.target.model import load_part


class Transformers(Format):
    """Complete model, with its embedding even if that is the target's.

    The tokenizer is written too if it is the target's. The tokenizer of a translated model is not: no version holds it.
    """

    kind, weights = LanguageModel.kind, WEIGHTS

    def write(self, drafter: LanguageModel, origin: ExportOrigin, folder: Path) -> None:
        if drafter.lookahead is not None:
            raise FormatError(
                f"transformers does not support prompt tokens, and this drafter has {len(drafter.lookahead)}"
            )
        model: Any = drafter.model
        model.save_pretrained(folder, max_shard_size="1TB")
        if drafter.translation is None:
            load_tokenizer(origin.target).save_pretrained(folder)

    def in_vllm(self, drafter: LanguageModel, depth: int) -> dict[str, Any]:
        if drafter.translation is not None:
            raise FormatError("vLLM drafts in the target's tokens only, and this drafter has a different tokenizer")
        return {"method": "draft_model", "num_speculative_tokens": depth}

    def recognises(self, config: dict[str, Any]) -> bool:
        return "model_type" in config and not {"speculators_model_type", "medusa_num_heads"} & set(config)

    def read(self, folder: Path, config: dict[str, Any], target: Path) -> Trainable:
        """Return the model, see ``Format.read``; it shares the target's embedding and head, frozen, if equal."""
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="sdpa",
                output_loading_info=True, trust_remote_code=False,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise FormatError(f"{folder} is no causal language model of transformers: {_line(error)}") from None
        model, info = loaded
        wrong = {name: info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]}
        for name, keys in wrong.items():
            raise FormatError(f"{folder}: {name.replace('_keys', '')} weight {min(map(str, keys))}")
        of_target = load_part(target, "float32")
        translation = translation_of(model, folder, of_target, target)
        return LanguageModel(model, translation is None and _same_ends(model, of_target), translation)


def _same_ends(model: nn.Module, target: nn.Module) -> bool:
    pairs = zip(ends_of(model), ends_of(target), strict=True)
    return all(torch.equal(ours.weight, theirs.weight) for ours, theirs in pairs)


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
