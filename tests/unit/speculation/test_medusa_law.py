"""Medusa's own way of drawing keeps the target's law: q depends on the depth alone, and a path ends with the heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.medusa.drafter import Medusa
from osd.drafters.session import Kept, Runtime
from osd.speculation import tree
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.tree import DraftBatch, TreeBuilder
from osd.speculation.verification import VERIFICATIONS, Verdict
from tests.unit.speculation.enumeration import ForkingNoise, Toy, law_of, plain_sampling, round_of

VOCABULARY, DRAFTED, HEADS, NODES = 4, 3, 2, 4


@dataclass(frozen=True)
class Heads(Toy):
    """A toy target, for which a real session of Medusa drafts."""

    session: AutoregressiveSession | None = None

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        assert self.session is not None
        return self.session.expand([0] * len(builder.tokens), builder, rows, nodes).double()

    def acceptance(self) -> Tensor:
        assert self.session is not None
        return self.session.acceptance().double()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "BLOCK", 2)


@pytest.fixture(scope="module")
def toy() -> Heads:
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    medusa = Medusa(LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=1)), HEADS, DRAFTED)
    with torch.no_grad():
        medusa.target_head.normal_(0, 0.5)
        medusa.adapt_vocabulary(torch.tensor([1.0, 0.0, 2.0, 3.0]))
        for parameter in medusa.add_head().parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.5)
    session = medusa.session(Runtime(1, 8, NODES + 1))
    session.open(0, 0)
    session.commit(0, Kept([1], torch.randn(1, 16)))
    plain = Toy.random(7, VOCABULARY, NODES + 1)
    return Heads(plain.p, plain.q, VOCABULARY, medusa.draft_ids, levels=HEADS, session=session)


WAYS: list[tuple[Growth, str]] = [
    *((GROWTHS["chain"](depth=3), rule) for rule in VERIFICATIONS),
    (GROWTHS["confidence"](depth=3, eta=0.36), "block"),
    (GROWTHS["acceptance_head"](depth=3, h=0.4), "chain"),
    (GROWTHS["dynamic_tree"](budget=3), "siblings"),
    (GROWTHS["dynamic_tree"](budget=3), "traversal"),
    (GROWTHS["dynamic_tree"](budget=4, threshold=0.2), "traversal"),
    (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0), (0, 0, 0)]), "siblings"),
    (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)], draw="iid"), "k_seq"),
    (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)], draw="top_then_drawn"), "greedy_multidraft"),
    (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=3), "naive"),
    (GROWTHS["best_first"](budget=4), "naive"),
]


@pytest.mark.parametrize(("growth", "rule"), WAYS, ids=[f"{growth.name}-{rule}" for growth, rule in WAYS])
def test_what_heads_draft_is_verified_without_bias(toy: Heads, growth: Growth, rule: str) -> None:
    law = law_of(round_of(growth, VERIFICATIONS[rule], toy), toy, HEADS + 1)
    print(law)
    assert law.error < 1e-9
    assert law.accepted > 0.2


def test_a_q_of_another_depth_than_a_node_was_drawn_from_is_caught(toy: Heads) -> None:
    def swapped(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = GROWTHS["chain"](depth=2).grow(toy, plain_sampling(batch), noise, torch.full((batch,), 2))
        assert draft.q is not None
        broken = replace(draft, q=draft.q.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
        return draft, VERIFICATIONS["chain"].verify(broken, toy.target(draft), noise)

    assert law_of(swapped, toy, HEADS + 1).error > 1e-3
