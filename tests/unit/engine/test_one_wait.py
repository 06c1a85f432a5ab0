"""Rounds on a device that counts who waits for it: one look at what was drafted and decided, and nothing before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osd.config import ChainSettings, ConfidenceSettings, GrowthSettings, TopKTreeSettings
from osd.drafting import taps_beside
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import only_on_a_cpu
from tests.other_device import WAITS, Away, OtherDevice
from tests.unit.engine.harness import make_drafter, prompts, settings, tokenizer

pytestmark = only_on_a_cpu("the device is simulated")

SAMPLED = [SamplingParams(0.9, seed=1), SamplingParams(1.0, top_p=0.9, top_k=40, min_p=0.01, seed=2)]
REPEATABLE = [SamplingParams(0.9, seed=1, repeatable=True), SamplingParams(0.7, seed=2)]
GREEDY = [SamplingParams(0.0), SamplingParams(0.0)]
CHAIN = ChainSettings(depth=3)


def put(model: nn.Module) -> nn.Module:
    """The model, all of whose weights are there."""
    known: dict[int, Any] = {}  # tied ones stay tied
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                away = nn.Parameter(Away(value.detach()), requires_grad=False)
                module._parameters[name] = known.setdefault(id(value), away)
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else Away(value)
    return model


def waits(
    directory: Path, kind: str, asked: list[SamplingParams], growth: GrowthSettings, rule: str | None
) -> list[Counter[str]]:
    """What each round waits for, once prompts are read and every graph is made; all of them draft."""
    chosen, drafter, model = (
        settings(directory, slots=2),
        make_drafter(kind, directory),
        load_model(directory, "float32", "cpu"),
    )
    taps: tuple[int, ...] = ()
    if drafter is not None:
        make, taps = drafter.session, taps_beside(drafter, len(decoder_layers(model)))
        drafter.session = lambda runtime: make(replace(runtime, bucketed=True))  # type: ignore[method-assign]
    put(model)
    policy, found = Policy.of(growth, rule), []
    updates: list[Update] = []
    with OtherDevice(), torch.inference_mode():
        scratch = chosen.engine.max_draft + 1
        target = SlotModel(model, slots=2, context=chosen.engine.context, scratch=scratch, taps=taps, bucketed=True)
        engine = Engine(target, tokenizer(), chosen, drafter, 1)
        for number, (prompt, sampling) in enumerate(zip(prompts([20, 30]), asked, strict=True)):
            request = Request(str(number), tuple(prompt), 60, sampling, ignore_eos=True, policy=policy)
            engine.submit(request, updates.append)
        for _ in range(9):
            drafted = engine.counters().speculation().drafted
            WAITS.clear()
            engine.loop.step()
            found.append(WAITS.copy())
            moved = engine.counters().speculation().drafted - drafted
            assert len(found) < 4 or moved or kind == "none"
    assert engine.counters().failed == 0
    assert len([update for update in updates if update.token_ids]) > 10
    return found[3:]


WAYS: list[tuple[list[SamplingParams], GrowthSettings, str]] = [
    (GREEDY, CHAIN, "chain"), (SAMPLED, CHAIN, "chain"), (SAMPLED, ConfidenceSettings(depth=4, eta=0.01), "block"),
    (SAMPLED, CHAIN, "naive"), (REPEATABLE, CHAIN, "chain"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "eagle", "language_model"])
@pytest.mark.parametrize(
    ("asked", "growth", "rule"), WAYS, ids=["greedy", "chain", "block after confidence", "naive", "repeatable"]
)
def test_a_round_of_chains_waits_once(
    target_dir: Path, kind: str, asked: list[SamplingParams], growth: GrowthSettings, rule: str
) -> None:
    assert waits(target_dir, kind, asked, growth, rule) == [Counter({"aten::to": 1})] * 6


def test_a_tree_that_is_grown_level_by_level_is_seen_to_wait(target_dir: Path) -> None:
    found = waits(target_dir, "eagle", GREEDY, TopKTreeSettings(budget=6, depth=2), "naive")
    every = [sum(one.values()) for one in found]
    print(every)
    assert 1 < max(every) <= 15
