"""DSpark in the engine: versions that change within requests keep the output distribution."""

from __future__ import annotations

import copy
import itertools

import torch
from transformers import LlamaForCausalLM

from osd.drafting.dspark.drafter import DSpark
from osd.engine.engine import Engine
from osd.engine.request import SamplingParams
from tests.unit.engine import test_distribution
from tests.unit.engine.harness import with_noise

model = test_distribution.model


def test_swaps_within_requests_keep_the_distribution(model: LlamaForCausalLM) -> None:
    torch.manual_seed(6)
    drafter = DSpark.from_target(copy.deepcopy(model), 3, 2, 4, 4).add_head()
    first = with_noise(drafter.weights(), 0.1)
    drafter.load_weights(first)
    versions, calls = itertools.cycle(enumerate([first, with_noise(first, 0.3)], 1)), itertools.count()
    swaps: list[int] = []

    def swap(engine: Engine) -> None:
        if next(calls) % 100 == 0:
            engine.stage(*next(versions))
        swaps.append(engine.counters().swaps)

    ways = [test_distribution.policy_named(name) for name in ("acceptance head", "block", "siblings", "naive")]
    assert test_distribution.p_value(model, SamplingParams(1.0), ways, drafter=drafter, on_update=swap) > 1e-4
    assert swaps[-1] > 20
