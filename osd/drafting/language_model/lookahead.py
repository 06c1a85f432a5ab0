"""Prompt tokens of a draft model: embeddings that it reads behind its text, and answers with the tokens after next.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). With n of them one call of a small model gives ``1 + n`` tokens of a draft; those after
the first depend on none of the others. As in the paper only the embeddings learn from the answers at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from osd.drafting.alternative_tokens import Texts
from osd.drafting.base import DrafterError
from osd.drafting.prompt_tokens.cuts import like_words, read_behind
from osd.runtime.causal_lm import check_table, decoder_layers, decoder_of, ends_of
from osd.runtime.taps import tapped
from osd.verification.tree import repeats

PREFIX = "lookahead."
"""Of the tensors of a version."""


class Lookahead(nn.Module):
    """``prompts`` [tokens, hidden]; ``steps`` are the micro-steps that they have learnt in."""

    steps: Tensor

    def __init__(self, model: nn.Module, tokens: int) -> None:
        """Make ``tokens`` new prompt tokens for ``model``, a causal language model of transformers."""
        super().__init__()
        try:
            check_table(model)
        except ValueError as error:
            raise DrafterError(f"no prompt token can stand beside the draft model's words: {error}") from None
        words = ends_of(model)[0].weight.detach().float()
        self.prompts = nn.Parameter(like_words(words, tokens, 1)[:, 0])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        """How many tokens further it looks."""
        return len(self.prompts)

    def states(self, model: nn.Module, texts: Texts, text: Tensor, row: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        """Answers of ``model`` at its first ``levels`` prompt tokens behind rows ``row`` [C] of ``text`` [C].

        Returns:
            The inputs of its head and the outputs of its last layer, both [C, levels, hidden].
        """
        decoder, last = decoder_of(model), len(decoder_layers(model)) - 1
        number = repeats(text)
        chosen = row.new_zeros(len(texts.true), int(number.max()) + 1).index_put((text, number), row)  # [B, W]
        cache = transformers.DynamicCache()
        with torch.no_grad():
            decoder(**texts.inputs, past_key_values=cache, use_cache=True)
        with tapped(model, (last,)) as outputs:
            said = read_behind(
                frozen(decoder),
                self.prompts[:levels, None], texts.seen(chosen), texts.positions(chosen) + 1, cache,
            ).last_hidden_state  # fmt: skip
        found = (one.unflatten(1, (-1, levels))[text, number] for one in (said, outputs[last]))
        return next(found), next(found)


def frozen(module: nn.Module) -> Callable[..., Any]:
    """Return ``module`` with fixed weights: gradients run through it and do not reach them."""
    weights = {name: weight.detach() for name, weight in module.named_parameters()}

    def call(*given: Tensor, **more: Any) -> Any:
        return functional_call(module, weights, given, more)

    return call
