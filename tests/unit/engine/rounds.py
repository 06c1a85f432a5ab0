"""One round of a drafter's real session and a real rule over a made-up target, with every outcome followed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.session import Asked
from osd.speculation.growth import Growth
from osd.speculation.sampling import SamplingSettings
from osd.speculation.tree import DraftBatch
from osd.speculation.verification import VERIFICATIONS, Verdict
from tests.unit.speculation.enumeration import ForkingNoise, Toy


@dataclass(frozen=True)
class Plain:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def as_drawn(draft: DraftBatch) -> DraftBatch:
    return draft


def conditioned(draft: DraftBatch) -> DraftBatch:
    """What must not be: second tokens are verified by a q that knows the first ones, which they were not drawn from."""
    assert draft.q is not None
    q = draft.q.clone()
    for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        for node, parent in enumerate(parents[: int(draft.sizes[row])]):
            if parent >= 0 and parents[parent] < 0:
                at = draft.q_row[row, node]
                q[at] = draft.q[at] * (2.0 ** torch.arange(q.shape[1])).roll(tokens[parent])
                q[at] /= q[at].sum()
    return replace(draft, q=q)


def three_words() -> LlamaForCausalLM:
    """A target of one layer that knows three tokens."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=3, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Rounds(ABC):
    """A round in every slot, all of which stand where ``begin`` leaves them."""

    def __init__(
        self,
        session: AutoregressiveSession,
        growth: Growth,
        rule: str,
        spoil: Callable[[DraftBatch], DraftBatch],
        seed: int,
    ) -> None:
        """Verify by a toy of a ``seed`` what ``spoil`` makes of the drafts."""
        self.session = session
        expand = session.expand
        session.expand = lambda *asked: expand(*asked).double()  # type: ignore[method-assign]
        self.growth, self.rule, self.spoil = growth, VERIFICATIONS[rule], spoil
        self.toy = Toy.random(seed, 3, 4)

    @abstractmethod
    def begin(self, slot: int) -> None:
        """Open a slot and commit a text to it."""

    def __call__(self, noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        slots = list(range(batch))
        for slot in slots:
            self.begin(slot)
        settings: list[SamplingSettings] = [Plain()] * batch
        asked = Asked(slots, [self.growth.max_nodes] * batch, settings)
        draft = self.session.propose(asked, self.growth, noise).draft  # type: ignore[arg-type]
        assert draft is not None
        draft.check_integrity()
        draft = self.spoil(draft)
        return draft, self.rule.verify(draft, self.toy.target(draft), noise)  # type: ignore[arg-type]
