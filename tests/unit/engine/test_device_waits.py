"""Waits for the device during a step, counted by a simulated device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osd.config import ChainSettings, ConfidenceSettings, GrowthSettings, TopKTreeSettings
from osd.drafting import serving_taps
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import skip_unless_cpu
from tests.other_device import WAITS, DeviceTensor, OtherDevice
from tests.unit.engine.harness import make_drafter, prompts, settings, tokenizer

pytestmark = skip_unless_cpu("the device is simulated")

SAMPLED = [SamplingParams(0.9, seed=1), SamplingParams(1.0, top_p=0.9, top_k=40, min_p=0.01, seed=2)]
REPEATABLE = [SamplingParams(0.9, seed=1, repeatable=True), SamplingParams(0.7, seed=2)]
GREEDY = [SamplingParams(0.0), SamplingParams(0.0)]
CHAIN = ChainSettings(depth=3)


def on_device(model: nn.Module) -> nn.Module:
    """Return the model with its weights on the simulated device."""
    known: dict[int, Any] = {}  # keeps tied weights tied
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                away = nn.Parameter(DeviceTensor(value.detach()), requires_grad=False)
                module._parameters[name] = known.setdefault(id(value), away)
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else DeviceTensor(value)
    return model


def waits(
    directory: Path, kind: str, samplings: list[SamplingParams], growth: GrowthSettings, rule: str | None
) -> list[Counter[str]]:
    """Return the waits of each drafting step after prompts are read and graphs are recorded."""
    chosen, drafter, model = (
        settings(directory, slots=2),
        make_drafter(kind, directory),
        load_model(directory, "float32", "cpu"),
    )
    taps: tuple[int, ...] = ()
    if drafter is not None:
        make, taps = drafter.session, serving_taps(drafter, len(decoder_layers(model)))
        drafter.session = lambda runtime: make(replace(runtime, bucketed=True))  # type: ignore[method-assign]
    on_device(model)
    policy, counts = Policy.of(growth, rule), []
    updates: list[Update] = []
    with OtherDevice(), torch.inference_mode():
        scratch = chosen.engine.max_draft + 1
        target = SlotModel(model, slots=2, context=chosen.engine.context, scratch=scratch, taps=taps, bucketed=True)
        engine = Engine(target, tokenizer(), chosen, drafter, 1)
        for number, (prompt, sampling) in enumerate(zip(prompts([20, 30]), samplings, strict=True)):
            request = Request(str(number), tuple(prompt), 60, sampling, ignore_eos=True, policy=policy)
            engine.submit(request, updates.append)
        for _ in range(9):
            drafted = engine.counters().speculation().drafted
            WAITS.clear()
            engine.loop.step()
            counts.append(WAITS.copy())
            moved = engine.counters().speculation().drafted - drafted
            assert len(counts) < 4 or moved or kind == "none"
    assert engine.counters().failed == 0
    assert len([update for update in updates if update.token_ids]) > 10
    return counts[3:]


WAYS: list[tuple[list[SamplingParams], GrowthSettings, str]] = [
    (GREEDY, CHAIN, "chain"), (SAMPLED, CHAIN, "chain"), (SAMPLED, ConfidenceSettings(depth=4, eta=0.01), "block"),
    (SAMPLED, CHAIN, "naive"), (REPEATABLE, CHAIN, "chain"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "eagle", "language_model"])
@pytest.mark.parametrize(
    ("samplings", "growth", "rule"), WAYS, ids=["greedy", "chain", "block after confidence", "naive", "repeatable"]
)
def test_step_of_chains_waits_for_the_device_once(
    target_dir: Path, kind: str, samplings: list[SamplingParams], growth: GrowthSettings, rule: str
) -> None:
    assert waits(target_dir, kind, samplings, growth, rule) == [Counter({"aten::to": 1})] * 6


def test_waits_of_tree_growth_are_counted(target_dir: Path) -> None:
    counts = waits(target_dir, "eagle", GREEDY, TopKTreeSettings(budget=6, depth=2), "naive")
    every = [sum(waited.values()) for waited in counts]
    print(every)
    assert 1 < max(every) <= 15
