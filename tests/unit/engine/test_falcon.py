"""Several tokens of a call: the law of the output by enumeration and in the engine, greedy text, and its versions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from osd.config import (
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    ConfidenceSettings,
    DynamicTreeSettings,
    FalconSettings,
    GrowthSettings,
    HeuristicSettings,
    SparseTreeSettings,
    StaticTreeSettings,
    TopKTreeSettings,
)
from osd.drafters import DrafterError, Trainable, initial
from osd.drafters.acceptance_head import suited
from osd.drafters.falcon.drafter import Falcon
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.session import Kept, Runtime
from osd.engine.request import SamplingParams
from osd.registry.pointer import Rollout
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.noise import Noise
from osd.speculation.tree import DraftBatch
from tests.unit.engine import test_law
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running
from tests.unit.engine.rounds import Rounds, as_drawn, conditioned, three_words
from tests.unit.engine.test_kangaroo import running_tapped, wait_for
from tests.unit.speculation.enumeration import BATCH, law_of, plain_sampling

PROMPT, LENGTHS = [2, 0, 1, 1], (1, 5, 40, 16, 3)
model = test_law.model


class Text(Rounds):
    """The same prompt in every slot."""

    def __init__(self, growth: Growth, rule: str, block: int, spoil: Callable[[DraftBatch], DraftBatch]) -> None:
        drafter = Falcon.from_target(three_words(), block, 3)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.4)
            drafter.rows.normal_(0, 0.4)
            drafter.target_head.normal_(0, 0.4)
        super().__init__(drafter.session(Runtime(BATCH, 16, 10)), growth, rule, spoil, 9)
        self.hidden = torch.randn(len(PROMPT) - 1, 16)

    def begin(self, slot: int) -> None:
        self.session.open(slot, PROMPT[0])
        self.session.commit(slot, Kept(PROMPT[1:], self.hidden))


LAWS: dict[str, tuple[Growth, str, int]] = {
    "chain": (GROWTHS["chain"](3), "chain", 2),
    "block": (GROWTHS["chain"](3), "block", 3),
    "siblings": (GROWTHS["dynamic_tree"](budget=3), "siblings", 2),
    "traversal": (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)]), "traversal", 2),
    "naive": (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=3), "naive", 2),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_output_is_the_targets_by_enumeration(name: str) -> None:
    growth, rule, block = LAWS[name]
    rounds = Text(growth, rule, block, as_drawn)
    found = law_of(rounds, rounds.toy, 4)
    print(found)
    assert found.error < 1e-9
    assert found.ways > 10


@pytest.mark.parametrize("name", ["chain", "block", "traversal"])
def test_second_tokens_verified_by_a_q_that_knows_the_first_would_be_seen(name: str) -> None:
    growth, rule, block = LAWS[name]
    rounds = Text(growth, rule, block, conditioned)
    assert law_of(rounds, rounds.toy, 4).error > 1e-3


class Doubting:
    """A drafter of ``block`` tokens a call that never is sure; see ``osd.speculation.growth.Expander``."""

    def __init__(self, block: int) -> None:
        self.support, self.levels, self.reach, self.block = None, None, None, block

    def __call__(self, builder: Any, rows: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros(len(rows), 9)

    def acceptance(self) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(("block", "tokens"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_chains_that_doubt_end_where_a_block_does(block: int, tokens: int) -> None:
    ids, drafter = torch.arange(3), Doubting(block)
    growth, limits = GROWTHS["confidence"](eta=0.5, depth=6), torch.full((3,), 6)
    draft = growth.grow(drafter, plain_sampling(3), Noise(ids, ids, ids), limits)
    assert draft.sizes.tolist() == [tokens] * 3


def falcon(directory: Path, block: int = 2) -> Trainable:
    torch.manual_seed(4)
    drafter = initial(FalconSettings(vocabulary=200, block=block), directory, directory)
    assert isinstance(drafter, Trainable)
    return drafter


def ask(client: Client, oracle: Oracle, names: str = "{}", **more: Any) -> None:
    """Ask for greedy answers, and check that they are those of transformers."""
    for index, prompt in enumerate(prompts(LENGTHS)):
        client.submit(names.format(index), prompt, 12, ignore_eos=True, **more)
    results = client.wait()
    for index, prompt in enumerate(prompts(LENGTHS)):
        assert results[names.format(index)].tokens == oracle.greedy(prompt, 12)


GREEDY: dict[str, GrowthSettings] = {
    "chain": ChainSettings(depth=3, governed=False),
    "confidence": ConfidenceSettings(depth=4, eta=0.05, governed=False),
    "heuristic": HeuristicSettings(depth=4, governed=False),
    "acceptance_head": AcceptanceHeadSettings(depth=3, h=0.9, governed=False),
    "best_first": BestFirstSettings(budget=8, governed=False),
    "governed": BestFirstSettings(budget=8),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "static_tree": StaticTreeSettings(budget=6, depth=3, governed=False),
    "sparse_tree": SparseTreeSettings(budget=6, governed=False),
    "dynamic_tree": DynamicTreeSettings(budget=6, governed=False),
}
WAYS = [*((name, False) for name in GREEDY), ("top_k_tree", True)]


@pytest.mark.parametrize(("growth", "bucketed"), WAYS)
def test_greedy_output_is_that_of_transformers(target_dir: Path, oracle: Oracle, growth: str, bucketed: bool) -> None:
    drafter = suited(falcon(target_dir, 2 if bucketed else 3), GREEDY[growth])
    with running(target_dir, drafter=drafter, growth=GREEDY[growth], bucketed=bucketed) as client:
        ask(client, oracle)
        counters = client.engine.counters()
    assert counters.failed == 0
    counts = counters.speculation()
    assert counts.by_source.keys() <= {"falcon"}
    if growth != "governed":
        assert counts.drafted > counts.accepted


def test_beside_recall_the_text_stays_the_same(target_dir: Path, oracle: Oracle) -> None:
    growth = BestFirstSettings(budget=8, governed=False)
    with running(target_dir, drafter=Mixed(falcon(target_dir)), growth=growth) as client:
        for name in ("first {}", "again {}"):
            ask(client, oracle, name, capture=True)
        counts = client.engine.counters().speculation()
    assert counts.by_source["falcon"].drafted > 0
    assert counts.by_source["recall"].accepted > 0


def test_a_domain_goes_from_eagle_to_it_and_back_while_requests_run(target_dir: Path, oracle: Oracle) -> None:
    prompt, eagle, mine = prompts([9], seed=4)[0], make_drafter("eagle", target_dir), falcon(target_dir)
    assert eagle is not None
    with running_tapped(target_dir, (0, 2, 3), eagle) as client:
        handle = client.engine.drafters("general")
        handle.try_canary(Rollout(1, 2, 1.0, 1.0), mine.weights(), mine)
        client.submit("canary", prompt, 40, ignore_eos=True)
        while client.results["canary"].updates < 3:
            client.next()
        handle.stage(2, mine.weights(), mine)
        wait_for(client, 2)
        handle.end_canary()
        client.submit("swapped", prompt, 30, ignore_eos=True)
        while client.results["swapped"].updates < 3:
            client.next()
        handle.stage(3, eagle.weights(), eagle)
        wait_for(client, 3)
        results = client.wait()
        counters = client.engine.counters()
    assert results["canary"].tokens == oracle.greedy(prompt, 40)
    assert results["swapped"].tokens == oracle.greedy(prompt, 30)
    assert counters.by_version["general", 2].by_source.keys() == {"falcon"}
    assert (counters.failed, counters.swaps) == (0, 2)


def test_what_does_not_fit_is_refused_and_the_running_version_stays(target_dir: Path, oracle: Oracle) -> None:
    one, eagle = falcon(target_dir), make_drafter("eagle", target_dir)
    assert eagle is not None
    broken = {**one.weights(), "q_proj.weight": torch.zeros(3, 3)}
    with running(target_dir, drafter=one) as client:
        handle = client.engine.drafters("general")
        with pytest.raises(DrafterError, match=r"'q_proj.weight' has shape \[3, 3\] instead of \[64, 64\]"):
            handle.stage(2, broken)
        with pytest.raises(DrafterError, match=r"tensor 'attention_norm\.weight' is missing"):
            handle.stage(2, eagle.weights())
        ask(client, oracle)
        assert client.engine.drafter_version == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [2, 4])
@pytest.mark.parametrize("name", test_law.POLICIES)
def test_in_a_hundred_thousand_runs_no_policy_changes_the_law(model: LlamaForCausalLM, name: str, block: int) -> None:
    policy, drafter = test_law.named(name), Falcon.from_target(copy.deepcopy(model), block, 4)
    assert test_law.p_value(model, SamplingParams(1.0), policy, count=100_000, drafter=drafter) > 1e-4
