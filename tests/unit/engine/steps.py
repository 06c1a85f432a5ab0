"""Decoding steps of a real session and a real rule over a toy target, with enumeration of all outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.growth import Growth
from osd.drafting.session import CommittedTokens, DraftRequest
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.sampling import SamplingParams
from osd.verification.tree import DraftBatch
from tests.unit.verification.enumeration import ForkingNoise, Toy, check_integrity

Distortion = Callable[[DraftBatch], DraftBatch]


def as_drawn(draft: DraftBatch) -> DraftBatch:
    return draft


def conditioned(draft: DraftBatch) -> DraftBatch:
    """Return a wrong draft: the q of second tokens depends on the first ones, unlike the q that drew them."""
    q = draft.q.clone()
    for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        for node, parent in enumerate(parents[: int(draft.sizes[row])]):
            if parent >= 0 and parents[parent] < 0:
                at = draft.q_row[row, node]
                q[at] = draft.q[at] * (2.0 ** torch.arange(q.shape[1])).roll(tokens[parent])
                q[at] /= q[at].sum()
    return replace(draft, q=q)


def few_token_target(words: int = 3, layers: int = 1, **more: object) -> LlamaForCausalLM:
    """Return a target with a vocabulary of a few tokens."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=words, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def randomised(model: Any, deviation: float = 0.4) -> Any:
    """Return the model with random matrices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, deviation)
    return model


@dataclass
class EnumeratedSteps:
    """Step in every slot after the tokens ``first`` and ``kept``; ``toy`` is the target.

    The rule verifies the drafts after ``distort``.
    """

    session: AutoregressiveSession
    first: int
    kept: CommittedTokens
    growth: Growth
    rule: str
    toy: Toy
    distort: Distortion = as_drawn

    def __post_init__(self) -> None:
        expand = self.session.expand
        self.session.expand = lambda *args: expand(*args).double()  # type: ignore[method-assign]

    def __call__(self, noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        slots = list(range(batch))
        for slot in slots:
            self.session.open(slot, self.first)
            self.session.commit(slot, self.kept)
        request = DraftRequest(slots, [self.growth.max_nodes] * batch, [SamplingParams()] * batch)
        draft = self.session.propose(request, self.growth, noise).draft  # type: ignore[arg-type]
        check_integrity(draft)
        draft = self.distort(draft)
        return draft, VERIFICATIONS[self.rule].verify(draft, self.toy.target(draft), noise)  # type: ignore[arg-type]
