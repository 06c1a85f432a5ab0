from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.engine.growth import RULES, GrowthComparison, GrowthSize, measure
from benchmarks.engines import encode, load_pair
from osd.config import LanguageModelSettings, Settings, TargetSettings
from osd.engine.request import SamplingParams
from osd.traffic.prompt import Prompt

PLAN = GrowthSize(budget=4, depth=4, contexts=96, steps=6, repeats=2)
TEXTS = [Prompt(f"p{number}", "d", (f"What is {number} times {number}?",)) for number in range(16)]


def compared(directory: Path, layers: int, temperature: float, plan: GrowthSize = PLAN) -> GrowthComparison:
    torch.set_num_threads(1)
    target = TargetSettings(source=str(directory), dtype="float32")
    settings = Settings(target=target, drafter=LanguageModelSettings(layers=layers), home=directory)
    pair = load_pair(settings, "language_model", slots=plan.batch, context=256, nodes=plan.budget)
    comparison = measure(pair, encode(pair.tokenizer, TEXTS, 100), SamplingParams(temperature=temperature), plan)
    print(*comparison.rows, comparison.differences, sep="\n")
    return comparison


def test_trees_of_a_perfect_drafter_become_chains(tiny_target: Path) -> None:
    comparison = compared(tiny_target, 4, 0.0)
    accepted = {row.growth: row.accepted.value for row in comparison.rows}
    assert comparison.static_tree == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert accepted["chain"] > 3.9  # the session computes in half precision
    assert accepted["static_tree"] == accepted["sparse_tree"] == accepted["chain"]


def test_policies_draft_one_size_at_the_same_positions(tiny_target: Path) -> None:
    comparison = compared(tiny_target, 1, 1.0)
    assert comparison.contexts == PLAN.contexts
    assert {(row.growth, row.rule) for row in comparison.rows} == {(g, r) for g, rules in RULES.items() for r in rules}
    by = {(row.growth, row.rule): row for row in comparison.rows}
    assert all(row.drafted == PLAN.budget for row in comparison.rows)
    assert by["chain", "chain"].calls == PLAN.budget
    assert by["static_tree", "siblings"].calls < PLAN.budget + 1
    name = "dynamic_tree, traversal - chain, block"
    gain = by["dynamic_tree", "traversal"].accepted.value - by["chain", "block"].accepted.value
    assert abs(comparison.differences[name].value - gain) < 1e-9
