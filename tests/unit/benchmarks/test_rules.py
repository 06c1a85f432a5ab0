from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import Result

from benchmarks.engine import closed_forms
from benchmarks.engine.rules import RulePlan, measure
from benchmarks.engines import ModelPair, encode, load_pair
from osd.config import DRAFTER_SETTINGS, Settings, TargetSettings
from osd.engine.request import SamplingParams
from osd.traffic.prompt import Prompt
from tests.unit.benchmarks.recorded import osd, write_prompts

PLAN = RulePlan(drafts=2, depth=2, contexts=48, batch=8, steps=3, repeats=4)
TEXTS = [Prompt(f"p{number}", "d", (f"What is {number} times {number}?",)) for number in range(8)]


def pair_on(directory: Path, draft: str, **drafter: int) -> ModelPair:
    torch.set_num_threads(1)
    target = TargetSettings(source=str(directory), dtype="float32")
    settings = Settings(
        target=target,
        drafter=DRAFTER_SETTINGS["eagle" if draft == "eagle" else "language_model"](**drafter),
        home=directory,
    )
    return load_pair(settings, draft, slots=PLAN.batch, context=256, nodes=len(PLAN.paths))


@pytest.mark.parametrize(("draft", "drafter"), [("skip_layers", {}), ("eagle", {"vocabulary": 100})])
def test_rules_stay_below_bound_and_agree_with_formulas(tiny_target: Path, draft: str, drafter: dict[str, int]) -> None:
    plan = replace(PLAN, contexts=144)  # with 48, block was 3.3 errors below chain by chance on one CPU
    pair = pair_on(tiny_target, draft, **drafter)
    table = measure(pair, encode(pair.tokenizer, TEXTS, 100), SamplingParams(temperature=1.0), plan)
    assert table.broken == []
    assert table.contexts == plan.contexts
    assert {row.rule for row in table.rows if row.draw == "iid"} == {"siblings", "traversal", "naive", "k_seq"}
    for row in table.rows:
        print(f"{row.draw} {row.rule}: {row.first}, formula {row.exact}, bound {row.bound:.4f}")
        assert row.length is not None
        assert row.length.value >= 1
        if row.exact is not None:
            assert abs(row.first.value - row.exact) < 4 * row.first.error + 0.02
            assert row.gap > -1e-6


def test_drafter_equal_to_target_is_always_accepted(tiny_target: Path) -> None:
    pair = pair_on(tiny_target, "language_model", layers=4)
    table = measure(pair, encode(pair.tokenizer, TEXTS, 100), SamplingParams(temperature=0.7, top_p=0.9), PLAN)
    for row in table.rows:
        if row.rule in ("chain", "block", "siblings", "traversal"):
            assert row.length is not None
            assert row.length.value > 2.8, row  # of 3; the session computes in half precision
            assert row.bound > 0.95


def rules(tiny_target: Path, tmp_path: Path, *arguments: object) -> Result:
    options = ["--prompts", write_prompts(tmp_path / "prompts.jsonl", TEXTS), "--contexts", 8, "--drafts", 2]
    return osd(tiny_target, tmp_path, *arguments, *options)


@pytest.mark.parametrize("command", [("bench", "rules"), ("analyze", "drafts", "--live")])
def test_rules_command_writes_figures_and_plot(command: tuple[str, ...], tiny_target: Path, tmp_path) -> None:
    figures, picture = tmp_path / "rules.json", tmp_path / "rules.svg"
    arguments = ["--report", figures, "--plot", picture, "--depth", 2, "--temperature", 0.6, "--temperature", 1]
    result = rules(tiny_target, tmp_path, *command, *arguments)
    assert result.exit_code == 0, result.output
    assert "traversal" in result.stdout
    written = json.loads(figures.read_text())
    assert [table["temperature"] for table in written["tables"]] == [0.6, 1.0]
    assert all("gap" in row for table in written["tables"] for row in table["rows"])
    trees = result.stdout.count("dynamic_tree, siblings - static_tree, siblings")
    assert trees == len(written["growth"]) == (2 if command[0] == "bench" else 0)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - our own file


def test_rule_above_its_bound_gives_exit_code_1(tiny_target: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(closed_forms, "bound", lambda p, *given: torch.zeros(len(p), dtype=torch.float64))
    result = rules(tiny_target, tmp_path, "bench", "rules", "--temperature", 1, "--part", "rules")
    assert result.exit_code == 1
    assert "above the bound" in result.stderr
