"""Prompt tokens in an engine: greedy text, no drafting forward, learning, changes of kind, and refusals by name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.capture.trace import Trace
from osd.config import (
    BestFirstSettings,
    ChainSettings,
    ConfidenceSettings,
    DynamicTreeSettings,
    GrowthSettings,
    HeuristicSettings,
    PromptTokensSettings,
    SparseTreeSettings,
    StaticTreeSettings,
    TopKTreeSettings,
    TrainerSettings,
)
from osd.drafters import DrafterError, initial
from osd.drafters.acceptance_head import WithAcceptanceHead
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.prompt_tokens.drafter import PromptTokens
from osd.drafters.session import Kept, Runtime, TargetRows, Tree
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.learning.batch import collate, pack
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.registry.pointer import Rollout
from osd.runtime.batch import following
from osd.runtime.model import SlotModel
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.tree import DraftBatch
from tests.device import only_on_a_cpu
from tests.unit.engine import test_law
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running
from tests.unit.engine.rounds import Rounds, as_drawn, conditioned, three_words
from tests.unit.engine.test_medusa import begin, swapped_to
from tests.unit.speculation.enumeration import BATCH, law_of

LENGTHS = (1, 5, 40, 16, 3)
RANKS = ((0.6, 0.2, 0.1), (0.5, 0.2), (0.4,))
model = test_law.model


def fresh(directory: Path, **more: int) -> PromptTokens:
    torch.manual_seed(1)
    drafter = initial(PromptTokensSettings(**more), directory, directory)
    assert isinstance(drafter, PromptTokens)
    return drafter


@pytest.fixture(scope="module")
def goals(oracle: Oracle) -> list[list[int]]:
    """What transformers answers greedily."""
    return [oracle.greedy(prompt, 16) for prompt in prompts(LENGTHS)]


def ask(client: Client, goals: list[list[int]], names: str = "{}", **more: Any) -> None:
    """Ask for greedy answers, and check that they are those of transformers."""
    for index, prompt in enumerate(prompts(LENGTHS)):
        client.submit(names.format(index), prompt, 16, ignore_eos=True, **more)
    results = client.wait()
    assert [results[names.format(index)].tokens for index in range(len(LENGTHS))] == goals


GREEDY: dict[str, GrowthSettings] = {
    "chain": ChainSettings(depth=3, governed=False),
    "governed chain": ChainSettings(depth=3),
    "confidence": ConfidenceSettings(depth=3, eta=0.05, governed=False),
    "heuristic": HeuristicSettings(depth=3, governed=False),
    "best_first": BestFirstSettings(budget=8, governed=False),
    "governed": BestFirstSettings(budget=8),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "static_tree": StaticTreeSettings(budget=6, depth=3, governed=False),
    "sparse_tree": SparseTreeSettings(budget=6, ranks=RANKS, governed=False),
    "dynamic_tree": DynamicTreeSettings(budget=6, governed=False),
    "dynamic_tree by level": DynamicTreeSettings(budget=6, threshold=0.1, governed=False),
}
WAYS = [*((name, False) for name in GREEDY), ("sparse_tree", True)]


@pytest.mark.parametrize(("growth", "bucketed"), WAYS)
def test_greedy_output_is_that_of_transformers(
    target_dir: Path, goals: list[list[int]], growth: str, bucketed: bool
) -> None:
    drafter = fresh(target_dir, copies=2 if bucketed else 1, rows=8)  # too few for every node to have all
    with running(target_dir, drafter=drafter, growth=GREEDY[growth], bucketed=bucketed) as client:
        ask(client, goals)
        counters = client.engine.counters()
    assert counters.failed == 0
    counts = counters.speculation()
    assert counts.by_source.keys() <= {"prompt_tokens"}
    if "governed" not in growth:
        assert counts.drafted > counts.accepted > 0


def test_a_round_is_one_forward_of_the_target_and_nothing_else(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    forward, embed = SlotModel.forward, torch.nn.Module.__call__

    def counted(self: SlotModel, *given: Any, **more: Any) -> Any:
        calls["forwards"] += 1
        return forward(self, *given, **more)

    with running(target_dir, drafter=fresh(target_dir), depth=3) as client:
        client.submit("r", prompts([9])[0], 30, ignore_eos=True)
        client.wait()
        before = client.engine.counters()
        monkeypatch.setattr(SlotModel, "forward", counted)
        monkeypatch.setattr(torch.nn.Module, "__call__", lambda *given, **more: pytest.fail("a module was called"))
        client.submit("again", prompts([9])[0], 30, ignore_eos=True)
        client.wait()
        monkeypatch.setattr(torch.nn.Module, "__call__", embed)
        after = client.engine.counters()
    assert after.speculation().drafted > before.speculation().drafted
    assert calls["forwards"] == after.forwards - before.forwards


def test_they_learn_from_the_traces_of_their_own_rounds_and_then_more_is_accepted(target_dir: Path) -> None:
    drafter, found = fresh(target_dir), list[Trace]()

    def accepted(client: Client) -> float:
        for index, prompt in enumerate(prompts([8] * 12, seed=2)):
            client.submit(f"{index}", prompt, 40, ignore_eos=True, capture=True)
        client.wait()
        return client.engine.counters().by_version["general", client.engine.drafter_version].acceptance_rate

    with running(target_dir, drafter=drafter, traces=found, slots=8, depth=3) as client:
        before = accepted(client)
        assert all(trace.hidden is None for trace in found)
        batches = [collate(group) for group in pack(found, 512)]
        start = evaluate(drafter, batches, 4, "forward_kl")
        distiller = Distiller(drafter, TrainerSettings(learning_rate=0.005, update_tokens=1))
        losses = [distiller.step(batches[step % len(batches)]).loss for step in range(60)]
        end = evaluate(drafter, batches, 4, "forward_kl")
        client.engine.stage(2, drafter.weights())
        swapped_to(client.engine, 2)
        after = accepted(client)
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {start.per_depth} -> {end.per_depth}, {before:.3f} -> {after:.3f}"
    )
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert end.divergence < start.divergence
    assert all(new > old for old, new in zip(start.per_depth[:3], end.per_depth[:3], strict=True))
    assert after > before + 0.02


@pytest.mark.parametrize("growth", [SparseTreeSettings(ranks=RANKS), BestFirstSettings()], ids=lambda one: one.kind)
def test_a_domain_changes_from_eagle_to_prompt_tokens_and_back_while_requests_run(
    target_dir: Path, oracle: Oracle, growth: GrowthSettings
) -> None:
    eagle, mine, asked = make_drafter("eagle", target_dir), fresh(target_dir), prompts((17, 3))
    assert eagle is not None
    answers, policy = [oracle.greedy(prompt, 24) for prompt in asked], Policy.of(growth)
    room = {"riders": mine.needs.riders, "embeddings": mine.needs.embeddings}
    with running(target_dir, "eagle", slots=8, **room) as client:
        handle = client.engine.drafters("general")

        begin(client, "eagle", asked, policy)
        handle.try_canary(Rollout(1, 2, 1.0, 1.0), mine.weights(), mine)
        begin(client, "canary", asked, policy)
        handle.stage(2, mine.weights(), mine)
        swapped_to(client.engine, 2)
        handle.end_canary()
        begin(client, "promoted", asked, policy)
        other = {**mine.weights(), "prompts": mine.weights()["prompts"] + 0.1}
        handle.stage(3, other)
        swapped_to(client.engine, 3)
        handle.stage(4, eagle.weights(), eagle)
        swapped_to(client.engine, 4)
        begin(client, "rolled back", asked, policy)
        results = client.wait()
        counters = client.engine.counters()
    for name, result in results.items():
        assert result.tokens == answers[int(name.split()[-1])], name
    kinds = {key[1]: counts.by_source.keys() for key, counts in counters.by_version.items()}
    assert kinds[2] == {"prompt_tokens"}
    assert kinds[4] == {"eagle"}
    assert counters.failed == 0


def test_two_versions_ride_in_one_forward_and_neither_reads_the_others_embeddings(target_dir: Path) -> None:
    """Each drafts beside the other what it drafts alone."""
    versions = [fresh(target_dir), fresh(target_dir)]
    with torch.no_grad():
        versions[1].prompts.normal_(0, 0.3)
    asked = prompts((17, 9), seed=5)

    def drafted(drafter: PromptTokens, other: PromptTokens | None) -> list[int]:
        found: list[Trace] = []
        with running(target_dir, drafter=drafter, traces=found, slots=4, prefix_cache=False) as client:
            assert client.engine.pool is not None
            with client.engine.loop.changed:
                if other is not None:
                    client.engine.pool.open("code", 7, other.weights(), other)
                    client.submit("code", asked[1], 30, ignore_eos=True, domain="code", capture=True)
                client.submit("general", asked[0], 30, ignore_eos=True, capture=True)
            client.wait()
        return next(trace for trace in found if trace.request_id == "general").drafted.numpy().tolist()

    for mine, other in (versions, versions[::-1]):
        assert drafted(mine, other) == drafted(mine, None)
    assert drafted(versions[0], None) != drafted(versions[1], None)


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
def test_beside_recall_both_draft_and_the_output_is_that_of_transformers(
    target_dir: Path, goals: list[list[int]], bucketed: bool
) -> None:
    growth = BestFirstSettings(governed=False)
    with running(target_dir, drafter=Mixed(fresh(target_dir)), growth=growth, bucketed=bucketed) as client:
        for name in ("first {}", "again {}"):
            ask(client, goals, name, capture=True)
        sources = client.engine.counters().speculation().by_source
    assert sources["prompt_tokens"].drafted > 0
    assert sources["recall"].accepted > 0


@only_on_a_cpu("a GPU's places are padded, and there is room")
def test_what_there_is_no_room_for_or_what_is_not_this_drafters_is_refused_by_name(
    target_dir: Path, goals: list[list[int]]
) -> None:
    mine, eagle = fresh(target_dir), make_drafter("eagle", target_dir)
    assert eagle is not None
    for room, message in (
        ({}, "this prompt_tokens drafter has 32 riders, and there is room for 0"),
        ({"riders": 32, "embeddings": 2}, "this prompt_tokens drafter has 3 embeddings, and there is room for 2"),
    ):
        with running(target_dir, "eagle", **room) as client:
            assert client.engine.pool is not None
            with pytest.raises(DrafterError, match=message):
                client.engine.pool.open("code", 7, mine.weights(), mine)
    with running(target_dir, drafter=mine) as client:
        with pytest.raises(DrafterError, match="tensor 'd2t' is unknown"):
            client.engine.stage(2, eagle.weights())
        ask(client, goals)
        assert client.engine.drafter_version == 1


def test_without_a_head_each_token_is_as_probably_accepted_as_not(target_dir: Path, goals: list[list[int]]) -> None:
    with running(target_dir, drafter=fresh(target_dir)) as client:
        ask(client, goals, policy=test_law.named("acceptance head"))
        assert client.engine.counters().speculation().drafted > 0


def of_law(model: LlamaForCausalLM, copies: int = 1) -> PromptTokens:
    torch.manual_seed(5)
    drafter = PromptTokens.from_target(copy.deepcopy(model), 2, copies, 6)
    with torch.no_grad():
        drafter.prompts.normal_(0, 0.3)
    return drafter


def test_rows_of_its_own_leave_the_law_of_the_output_alone(model: LlamaForCausalLM) -> None:
    policy, drafter = test_law.named("traversal"), of_law(model, 2)
    assert test_law.p_value(model, SamplingParams(1.0), policy, count=1000, drafter=drafter) > 1e-4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", test_law.POLICIES)
def test_in_a_hundred_thousand_runs_no_policy_changes_the_law(model: LlamaForCausalLM, name: str, copies: int) -> None:
    policy, drafter = test_law.named(name), WithAcceptanceHead(of_law(model, copies))
    assert test_law.p_value(model, SamplingParams(1.0), policy, count=100_000, drafter=drafter) > 1e-4


class Ahead(Rounds):
    """Every slot stands behind a round in which so many prompt tokens rode."""

    def __init__(self, growth: Growth, rule: str, depth: int, spoil: Callable[[DraftBatch], DraftBatch]) -> None:
        target = three_words()
        with torch.no_grad():
            for parameter in target.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.4)
        drafter = PromptTokens.from_target(target, 2)
        super().__init__(drafter.session(Runtime(BATCH, 16, 10)), growth, rule, spoil, 5)
        slotted = SlotModel(copy.deepcopy(target), slots=1, context=16, scratch=9, embeddings=2)
        rows = following(0, 0, [2, 0, 1, *(3 + level for level in range(depth))])
        rows = replace(rows, embedded=drafter.weights()["prompts"].flatten(0, 1))
        logits = slotted.forward(rows, torch.arange(2, 3 + depth)).logits
        tree = Tree([], [], (), [-1 - level for level in range(depth)], list(range(-1, depth - 1)))
        self.kept = Kept([1], None, TargetRows(tree, [], logits, None))

    def begin(self, slot: int) -> None:
        self.session.open(slot, 2)
        self.session.commit(slot, self.kept)


LAWS: dict[str, tuple[Growth, str, int]] = {
    "chain": (GROWTHS["chain"](3), "chain", 2),
    "block": (GROWTHS["chain"](3), "block", 2),
    "one token ahead": (GROWTHS["chain"](3), "chain", 1),
    "siblings": (GROWTHS["dynamic_tree"](budget=3), "siblings", 2),
    "by level": (GROWTHS["dynamic_tree"](budget=3, threshold=0.1), "traversal", 2),
    "traversal": (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)]), "traversal", 2),
    "sparse": (GROWTHS["sparse_tree"](ranks=RANKS, budget=4), "naive", 2),
    "sparse, drawn": (GROWTHS["sparse_tree"](ranks=RANKS, budget=3, draw="without_replacement"), "siblings", 2),
    "top k": (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=3), "naive", 2),
    "best first": (GROWTHS["best_first"](budget=4), "naive", 2),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_output_is_the_targets_by_enumeration(name: str) -> None:
    growth, rule, depth = LAWS[name]
    rounds = Ahead(growth, rule, depth, as_drawn)
    found = law_of(rounds, rounds.toy, 4)
    print(found)
    assert found.error < 1e-9
    assert found.accepted > 0.1


@pytest.mark.parametrize("name", ["chain", "block", "traversal"])
def test_second_tokens_verified_by_a_q_that_knows_the_first_would_be_seen(name: str) -> None:
    growth, rule, depth = LAWS[name]
    rounds = Ahead(growth, rule, depth, conditioned)
    assert law_of(rounds, rounds.toy, 4).error > 1e-3
