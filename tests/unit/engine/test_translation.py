"""Drafters whose tokens are not the target's: the same text, and the law of the output by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from osd.config import (
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    DynamicTreeSettings,
    GrowthSettings,
    LanguageModelSettings,
)
from osd.drafters import Trainable, initial
from osd.drafters.acceptance_head import suited
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.session import Asked, Kept, Runtime
from osd.engine.request import SamplingParams
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.sampling import SamplingSettings
from osd.speculation.tree import DraftBatch
from osd.speculation.verification import VERIFICATIONS, Verdict
from tests.unit.drafters.other_tokens import make_pair, translated
from tests.unit.engine.harness import Oracle, prompts, running
from tests.unit.speculation.enumeration import BATCH, ForkingNoise, Law, Toy, law_of

LENGTHS = (1, 5, 70, 16)
GROWTH: dict[str, GrowthSettings] = {
    "chain": ChainSettings(depth=3, governed=False),
    "dynamic tree": DynamicTreeSettings(budget=6, governed=False),
    "acceptance head": AcceptanceHeadSettings(depth=3, h=0.9, governed=False),
    "mixed": BestFirstSettings(budget=8, governed=False),
}
WAYS = [("chain", False), ("chain", True), ("dynamic tree", False), ("acceptance head", False), ("mixed", False)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), positions=96)


def drafter_of(pair: tuple[Path, Path]) -> Trainable:
    made = initial(LanguageModelSettings(source=str(pair[1])), pair[0], pair[0])
    assert isinstance(made, Trainable)
    return made


@pytest.mark.parametrize(("growth", "bucketed"), WAYS)
def test_greedy_output_is_that_of_transformers_past_the_drafters_own_places(
    pair: tuple[Path, Path], growth: str, bucketed: bool
) -> None:
    """Its 96 positions are fewer than the places of a text and a draft, so that older text is dropped, too."""
    oracle, settings = Oracle(pair[0]), GROWTH[growth]
    trained = suited(drafter_of(pair), settings)
    drafter = Mixed(trained) if growth == "mixed" else trained
    with running(pair[0], drafter=drafter, growth=settings, bucketed=bucketed) as client:
        for index, prompt in enumerate(prompts(LENGTHS)):
            client.submit(str(index), prompt, 24, ignore_eos=True, capture=True)
        drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
        client.submit("drawn", prompts(LENGTHS)[1], 20, drawn, ignore_eos=True)
        results = client.wait()
        counters = client.engine.counters()
    for index, prompt in enumerate(prompts(LENGTHS)):
        assert results[str(index)].tokens == oracle.greedy(prompt, 24)
    counts = counters.speculation()
    assert counters.failed == 0
    assert counts.by_source["language_model"].drafted > counts.by_source["language_model"].accepted > 0


def test_versions_are_swapped_in_and_refused_in_the_middle_of_a_request(pair: tuple[Path, Path]) -> None:
    drafter, prompt = drafter_of(pair), prompts([9], seed=4)[0]
    weights = {name: value.clone() for name, value in drafter.weights().items()}
    wrong = weights | {"translation.ends": weights["translation.ends"] * 0}
    with running(pair[0], drafter=drafter, growth=GROWTH["chain"]) as client:
        handle = client.engine.drafters("general")
        client.submit("r", prompt, 60, ignore_eos=True)
        while client.results["r"].updates < 2:
            client.next()
        with pytest.raises(ValueError, match=r"translation\.ends"):
            handle.stage(2, wrong)
        handle.stage(3, {name: value * 0 if "proj" in name else value for name, value in weights.items()})
        assert client.wait()["r"].tokens == Oracle(pair[0]).greedy(prompt, 60)
        assert handle.drafter_version == 3


SPELLED, SHARED, VOCABULARY, PROMPT = [[1], [4, 0], [2], [3]], {0, 2, 3}, 4, [2, 1, 0, 1]


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


Spoil = Callable[[DraftBatch], DraftBatch]


class Rounds:
    """Rounds after the same prompt: the real session drafts by what it shares with a target of four tokens."""

    def __init__(self, growth: Growth, rule: str, spoil: Spoil) -> None:
        torch.manual_seed(1)
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        drafter = translated(target, SPELLED, SHARED, 6, noise=0.5)
        self.session = drafter.session(Runtime(BATCH, 16, 10))
        expand = self.session.expand
        self.session.expand = lambda *asked: expand(*asked).double()  # type: ignore[method-assign]
        self.growth, self.rule, self.spoil = growth, VERIFICATIONS[rule], spoil
        self.toy = Toy.random(3, VOCABULARY, 3)

    def __call__(self, noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        for slot in range(batch):
            self.session.open(slot, PROMPT[0])
            self.session.commit(slot, Kept(PROMPT[1:]))
        settings: list[SamplingSettings] = [Settings()] * batch
        asked = Asked(range(batch), [self.growth.max_nodes] * batch, settings)
        draft = self.session.propose(asked, self.growth, noise).draft  # type: ignore[arg-type]
        assert draft is not None
        draft.check_integrity()
        drawn = draft.tokens[draft.valid]
        assert set(drawn.tolist()) <= SHARED
        draft = self.spoil(draft)
        return draft, self.rule.verify(draft, self.toy.target(draft), noise)  # type: ignore[arg-type]


RULES: dict[str, tuple[Growth, str]] = {
    "chain": (GROWTHS["chain"](2), "chain"),
    "block": (GROWTHS["chain"](2), "block"),
    "drawn tree": (GROWTHS["dynamic_tree"](budget=3), "siblings"),
    "traversal": (GROWTHS["dynamic_tree"](budget=3), "traversal"),
    "naive": (GROWTHS["top_k_tree"](budget=3, top_k=2, depth=2), "naive"),
}


def law(name: str, spoil: Spoil = lambda draft: draft) -> Law:
    rounds = Rounds(*RULES[name], spoil)
    found = law_of(rounds, rounds.toy, 3)
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_way_of_drawing_keeps_the_law(name: str) -> None:
    found = law(name)
    assert found.error < 1e-9
    assert found.accepted > 0.1


def whole(draft: DraftBatch) -> Tensor:
    """[E, shared] what the draft model says of the shared tokens when a quarter of its mass is on others."""
    assert draft.q is not None
    return draft.q * 0.75


def leaking(draft: DraftBatch) -> Tensor:
    """[E, shared] the q of a vocabulary without its last token, which was drawn from all the same."""
    assert draft.q is not None
    kept = draft.q.clone()
    kept[:, -1] = 1e-12
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("wrong", [whole, leaking], ids=["not renormalised", "outside the intersection"])
@pytest.mark.parametrize("name", ["chain", "drawn tree"])
def test_a_q_that_is_not_the_one_that_was_drawn_from_is_caught(name: str, wrong: Callable[[DraftBatch], Any]) -> None:
    assert law(name, lambda draft: replace(draft, q=wrong(draft))).error > 1e-3
