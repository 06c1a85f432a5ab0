"""A draft model with prompt tokens in an engine: the law of the output, greedy text, learning, and its versions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.capture.trace import Trace
from osd.config import (
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    ConfidenceSettings,
    DynamicTreeSettings,
    GrowthSettings,
    LanguageModelSettings,
    StaticTreeSettings,
    TopKTreeSettings,
    TrainerSettings,
)
from osd.drafters import Trainable, initial
from osd.drafters.acceptance_head import suited
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.session import Kept, Runtime
from osd.engine.request import SamplingParams
from osd.learning.batch import collate, pack
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.runtime.model import SlotModel
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.tree import DraftBatch
from tests.device import only_on_a_cpu
from tests.unit.engine import test_law
from tests.unit.engine.harness import Client, Oracle, prompts, running
from tests.unit.engine.rounds import Rounds, as_drawn, conditioned, three_words
from tests.unit.engine.test_medusa import begin, swapped_to
from tests.unit.speculation.enumeration import BATCH, law_of

LENGTHS = (1, 5, 40, 16, 3)
model = test_law.model


def looking(target: LlamaForCausalLM, tokens: int) -> LanguageModel:
    """Its own first layer, and prompt tokens that say something of their own."""
    torch.manual_seed(5)
    target.config.max_position_embeddings = 256  # so that no text is too long for it
    drafter = LanguageModel.first_layers(target, 1, tokens)
    assert drafter.lookahead is not None
    with torch.no_grad():
        for weight in drafter.trained().values():
            weight.add_(torch.randn_like(weight) * 0.2)
        drafter.lookahead.prompts.normal_(0, 1.0)
    return drafter


class Text(Rounds):
    """The same prompt in every slot."""

    def __init__(self, growth: Growth, rule: str, tokens: int, spoil: Callable[[DraftBatch], DraftBatch]) -> None:
        target = three_words()
        with torch.no_grad():
            for parameter in target.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.4)
        drafter = looking(target, tokens)
        super().__init__(drafter.session(Runtime(BATCH, 16, 10)), growth, rule, spoil, 9)

    def begin(self, slot: int) -> None:
        self.session.open(slot, 2)
        self.session.commit(slot, Kept([0, 1, 1]))


LAWS: dict[str, tuple[Growth, str, int]] = {
    "chain": (GROWTHS["chain"](3), "chain", 1),
    "block": (GROWTHS["chain"](3), "block", 2),
    "siblings": (GROWTHS["dynamic_tree"](budget=3), "siblings", 1),
    "traversal": (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)]), "traversal", 1),
    "naive": (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=3), "naive", 1),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_output_is_the_targets_by_enumeration(name: str) -> None:
    growth, rule, tokens = LAWS[name]
    rounds = Text(growth, rule, tokens, as_drawn)
    found = law_of(rounds, rounds.toy, 4)
    print(found)
    assert found.error < 1e-9
    assert found.ways > 10


@pytest.mark.parametrize("name", ["chain", "block", "traversal"])
def test_second_tokens_verified_by_a_q_that_knows_the_first_would_be_seen(name: str) -> None:
    growth, rule, tokens = LAWS[name]
    rounds = Text(growth, rule, tokens, conditioned)
    assert law_of(rounds, rounds.toy, 4).error > 1e-3


def fresh(directory: Path, tokens: int = 2) -> Trainable:
    torch.manual_seed(4)
    drafter = initial(LanguageModelSettings(layers=2, prompt_tokens=tokens), directory, directory)
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
    "longer chain": ChainSettings(depth=5, governed=False),
    "confidence": ConfidenceSettings(depth=4, eta=0.05, governed=False),
    "acceptance_head": AcceptanceHeadSettings(depth=5, h=0.9, governed=False),
    "governed": BestFirstSettings(budget=8),
    "top_k_tree": TopKTreeSettings(budget=12, depth=5, governed=False),
    "static_tree": StaticTreeSettings(budget=6, depth=3, governed=False),
    "dynamic_tree": DynamicTreeSettings(budget=8, governed=False),
}
WAYS = [*((name, False) for name in GREEDY), ("chain", True), ("top_k_tree", True)]


@pytest.mark.parametrize(("growth", "bucketed"), WAYS)
def test_greedy_output_is_that_of_transformers(target_dir: Path, oracle: Oracle, growth: str, bucketed: bool) -> None:
    drafter = suited(fresh(target_dir), GREEDY[growth])
    with running(target_dir, drafter=drafter, growth=GREEDY[growth], bucketed=bucketed) as client:
        ask(client, oracle)
        counters = client.engine.counters()
    assert counters.failed == 0
    counts = counters.speculation()
    assert counts.by_source.keys() <= {"language_model"}
    if growth != "governed":
        assert counts.drafted > counts.accepted > 0


def test_beside_recall_the_text_stays_the_same(target_dir: Path, oracle: Oracle) -> None:
    growth = BestFirstSettings(budget=8, governed=False)
    with running(target_dir, drafter=Mixed(fresh(target_dir)), growth=growth) as client:
        for name in ("first {}", "again {}"):
            ask(client, oracle, name, capture=True)
        counts = client.engine.counters().speculation()
    assert counts.by_source["language_model"].drafted > 0
    assert counts.by_source["recall"].accepted > 0


@only_on_a_cpu("calls that are one graph are not seen")
def test_the_same_number_of_tokens_is_drafted_in_fewer_calls(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], SlotModel.forward

    def counted(self: SlotModel, *given: Any, **more: Any) -> Any:
        calls[0] += 1
        return forward(self, *given, **more)

    monkeypatch.setattr(SlotModel, "forward", counted)
    found: dict[int, float] = {}
    for tokens in (0, 2):
        with running(target_dir, drafter=fresh(target_dir, tokens), depth=3) as client:
            client.submit("first", prompts([9])[0], 4, ignore_eos=True)  # what is measured at the start is over then
            client.wait()
            before, calls[0] = client.engine.counters(), 0
            client.submit("r", prompts([9])[0], 40, ignore_eos=True)
            client.wait()
            after = client.engine.counters()
        drafted = after.speculation().drafted - before.speculation().drafted
        found[tokens] = (calls[0] - (after.forwards - before.forwards)) / drafted
    print(found)
    assert found[0] == pytest.approx(1.0, abs=0.05)
    assert found[2] == pytest.approx(1 / 3, abs=0.05)


def test_they_learn_from_traces_and_then_more_of_the_later_tokens_is_accepted(target_dir: Path) -> None:
    drafter, found = fresh(target_dir), list[Trace]()

    def accepted(client: Client) -> float:
        for index, prompt in enumerate(prompts([8] * 12, seed=2)):
            client.submit(f"{index}", prompt, 40, ignore_eos=True, capture=True)
        client.wait()
        return client.engine.counters().by_version["general", client.engine.drafter_version].acceptance_rate

    with running(target_dir, drafter=drafter, traces=found, slots=8, depth=3) as client:
        before = accepted(client)
        batches = [collate(group) for group in pack(found, 512)]
        start = evaluate(drafter, batches, 3, "forward_kl")
        distiller = Distiller(drafter, TrainerSettings(learning_rate=0.003, update_tokens=1))
        for step in range(60):
            distiller.step(batches[step % len(batches)])
        end = evaluate(drafter, batches, 3, "forward_kl")
        client.engine.stage(2, drafter.weights())
        swapped_to(client.engine, 2)
        after = accepted(client)
    print(f"{start.per_depth} -> {end.per_depth}, {before:.3f} -> {after:.3f}")
    assert all(new > old for old, new in zip(start.per_depth, end.per_depth, strict=True))
    assert after > before + 0.05


def test_a_domain_gets_prompt_tokens_and_loses_them_while_requests_run(target_dir: Path, oracle: Oracle) -> None:
    plain, mine, asked = fresh(target_dir, 0), fresh(target_dir), prompts((17, 3))
    answers = [oracle.greedy(prompt, 24) for prompt in asked]
    with running(target_dir, drafter=plain, slots=8) as client:
        handle = client.engine.drafters("general")
        begin(client, "plain", asked, None)
        handle.stage(2, mine.weights(), mine)
        swapped_to(client.engine, 2)
        begin(client, "ahead", asked, None)
        handle.stage(3, plain.weights(), plain)
        swapped_to(client.engine, 3)
        begin(client, "back", asked, None)
        results = client.wait()
        counters = client.engine.counters()
    for name, result in results.items():
        assert result.tokens == answers[int(name.split()[-1])], name
    assert (counters.failed, counters.swaps) == (0, 2)


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_prompt_tokens_of_a_draft_model_leave_the_law_alone(model: LlamaForCausalLM, name: str) -> None:
    drafter = looking(copy.deepcopy(model), 1)
    assert test_law.p_value(model, SamplingParams(1.0), test_law.named(name), count=1000, drafter=drafter) > 1e-4
