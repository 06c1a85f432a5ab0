"""Prompt tokens of a draft model: embeddings after its text at which it predicts the tokens after the next one.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). With n prompt tokens one call of a small model gives ``1 + n`` tokens of a draft. All but
the first are independent of the others. As in the paper, only the embeddings learn from their predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from osd.drafting.alternative_tokens import Texts
from osd.drafting.prompt_tokens.cuts import new_prompts, read_at_cuts
from osd.runtime.causal_lm import decoder_layers, decoder_of
from osd.runtime.taps import tapped
from osd.verification.tree import repeats

PREFIX = "lookahead."
"""Prefix of its tensors in a version."""


class Lookahead(nn.Module):
    """Embeddings ``prompts`` [tokens, hidden], and the number ``steps`` of their micro-steps."""

    steps: Tensor

    def __init__(self, model: nn.Module, tokens: int) -> None:
        """Make ``tokens`` new prompt tokens for ``model``, a causal language model of transformers."""
        super().__init__()
        self.prompts = nn.Parameter(new_prompts(model, tokens, 1)[:, 0])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.prompts)

    def states(self, model: nn.Module, texts: Texts, text: Tensor, row: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        """Run ``model`` on its first ``levels`` prompt tokens after rows ``row`` [C] of texts ``text`` [C].

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
            prompts, seen, first = self.prompts[:levels, None], texts.seen(chosen), texts.positions(chosen) + 1
            read = read_at_cuts(frozen(decoder), prompts, seen, first, cache).last_hidden_state
        inputs, states = (part.unflatten(1, (-1, levels))[text, number] for part in (read, outputs[last]))
        return inputs, states


def frozen(module: nn.Module) -> Callable[..., Any]:
    """Return a function of ``module`` with constant weights, through which gradients pass."""
    weights = {name: weight.detach() for name, weight in module.named_parameters()}

    def call(*arguments: Tensor, **keywords: Any) -> Any:
        return functional_call(module, weights, arguments, keywords)

    return call
