"""Drafters with another vocabulary: unchanged text, and the output distribution by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from osd.config import (
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    DynamicTreeSettings,
    GrowthSettings,
    LanguageModelSettings,
)
from osd.drafting import Trainable, initial, with_required_head
from osd.drafting.growth import GROWTHS, Growth
from osd.drafting.mixed import Mixed
from osd.drafting.session import CommittedTokens, Runtime
from osd.engine.request import SamplingParams
from osd.verification.tree import DraftBatch
from tests.unit.drafting.other_tokens import make_pair, translated
from tests.unit.engine.harness import Oracle, prompts, running, tokens_of
from tests.unit.engine.steps import Distortion, EnumeratedSteps, as_drawn, few_token_target
from tests.unit.verification.enumeration import BATCH, Law, Toy, law_of

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
def test_translated_drafts_keep_greedy_output(pair: tuple[Path, Path], growth: str, bucketed: bool) -> None:
    """The drafter has 96 positions, fewer than text and draft, so that it also drops older text."""
    oracle, settings = Oracle(pair[0]), GROWTH[growth]
    trained = with_required_head(drafter_of(pair), settings)
    drafter = Mixed(trained) if growth == "mixed" else trained
    with running(pair[0], drafter=drafter, growth=settings, bucketed=bucketed) as client:
        drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
        client.submit("drawn", prompts(LENGTHS)[1], 20, drawn, ignore_eos=True)
        assert tokens_of(client.ask(prompts(LENGTHS), 24, capture=True)) == oracle.all(prompts(LENGTHS), 24)
        counters = client.engine.counters()
    counts = counters.speculation()
    assert counters.failed == 0
    assert counts.by_source["language_model"].drafted > counts.by_source["language_model"].accepted > 0


def test_translated_versions_are_swapped_or_refused(pair: tuple[Path, Path]) -> None:
    drafter, prompt = drafter_of(pair), prompts([9], seed=4)[0]
    weights = {name: value.clone() for name, value in drafter.weights().items()}
    wrong = weights | {"translation.ends": weights["translation.ends"] * 0}
    with running(pair[0], drafter=drafter, growth=GROWTH["chain"]) as client:
        handle = client.engine.drafters("general")
        client.submit("r", prompt, 60, ignore_eos=True)
        client.until("r", 2)
        with pytest.raises(ValueError, match=r"translation\.ends"):
            handle.stage(2, wrong)
        handle.stage(3, {name: value * 0 if "proj" in name else value for name, value in weights.items()})
        assert client.wait()["r"].tokens == Oracle(pair[0]).greedy(prompt, 60)
        assert handle.drafter_version == 3


SPELLED, SHARED, PROMPT = [[1], [4, 0], [2], [3]], {0, 2, 3}, [2, 1, 0, 1]


RULES: dict[str, tuple[Growth, str]] = {
    "chain": (GROWTHS["chain"](2), "chain"),
    "block": (GROWTHS["chain"](2), "block"),
    "drawn tree": (GROWTHS["dynamic_tree"](budget=3), "siblings"),
    "traversal": (GROWTHS["dynamic_tree"](budget=3), "traversal"),
    "naive": (GROWTHS["top_k_tree"](budget=3, top_k=2, depth=2), "naive"),
}


def enumerated(name: str, distort: Distortion = as_drawn) -> Law:
    """Enumerate a real session that shares three tokens with a target of four tokens."""

    def shared(draft: DraftBatch) -> DraftBatch:
        assert set(draft.tokens[draft.valid].tolist()) <= SHARED
        return distort(draft)

    drafter = translated(few_token_target(4, 2, bos_token_id=None, eos_token_id=None), SPELLED, SHARED, 6, noise=0.5)
    session, toy = drafter.session(Runtime(BATCH, 16, 10)), Toy.random(3, 4, 3)
    result = law_of(EnumeratedSteps(session, PROMPT[0], CommittedTokens(PROMPT[1:]), *RULES[name], toy, shared), toy, 3)
    print(f"{name}: {result}")
    return result


@pytest.mark.parametrize("name", RULES)
def test_translated_drafts_keep_the_output_distribution(name: str) -> None:
    result = enumerated(name)
    assert result.error < 1e-9
    assert result.accepted > 0.1


def whole(draft: DraftBatch) -> Tensor:
    """Return [E, shared], a q that is not renormalised to the shared tokens."""
    return draft.q * 0.75


def leaking(draft: DraftBatch) -> Tensor:
    """Return [E, shared], a q without the last token, although it may be drawn."""
    kept = draft.q.clone()
    kept[:, -1] = 1e-12
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("wrong", [whole, leaking], ids=["not renormalised", "outside the intersection"])
@pytest.mark.parametrize("name", ["chain", "drawn tree"])
def test_wrong_q_of_shared_tokens_is_detected(name: str, wrong: Callable[[DraftBatch], Any]) -> None:
    assert enumerated(name, lambda draft: replace(draft, q=wrong(draft))).error > 1e-3
