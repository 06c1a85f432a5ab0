from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import lossless
from benchmarks.lossless import Tally, compare, policies, slots
from benchmarks.report import identity
from benchmarks.streams import Answer
from osd.analysis.identity import differs_at
from osd.cli.app import app
from osd.engine.request import TokenLogprobs
from osd.speculation.growth import GROWTHS
from osd.speculation.verification import VERIFICATIONS
from tests.unit.engine.harness import prompts, running

ASKED = [tuple(prompt) for prompt in prompts([5, 9, 3])]


def test_every_growth_policy_and_every_rule_is_compared() -> None:
    ways = [(growth, rule) for growth, rule, _ in policies()]
    assert len(set(ways)) == len(ways)
    assert {growth.split(",")[0] for growth, _ in ways} == set(GROWTHS)
    assert {rule for _, rule in ways} == set(VERIFICATIONS)


def test_every_answer_is_that_of_plain_decoding(tiny_target: Path) -> None:
    done: list[int] = []
    with running(tiny_target, "eagle", slots=slots()) as client:
        tallies = compare(client.engine, ASKED, 8, done.append)
    assert done == [1, 2, 3]
    assert all(tally.identical == tally.total == 3 for tally in tallies)
    assert all(tally.drafted > 0 for tally in tallies)
    assert sum(tally.accepted for tally in tallies) > 0


def test_an_engine_that_keeps_a_wrong_token_is_caught(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        return ([0], best[1]) if tokens else ([], best[0])

    spoilt = [(growth, rule, replace(policy, walk=careless)) for growth, rule, policy in policies()]
    monkeypatch.setattr(lossless, "policies", lambda: spoilt)
    with running(tiny_target, "eagle", slots=slots()) as client:
        tallies = compare(client.engine, ASKED, 8)
    assert all(tally.identical < tally.total for tally in tallies)


def test_the_first_token_that_differs_is_found_and_shown_with_the_gap_between_the_best() -> None:
    assert differs_at([1, 2, 3], [1, 2, 3]) is None
    assert differs_at([1, 2, 3], [1, 4, 3]) == 1
    assert differs_at([1, 2], [1, 2, 3]) == 2
    clear = TokenLogprobs(1, -0.1, ((1, -0.1), (7, -3.0)))
    near = TokenLogprobs(2, -0.7, ((2, -0.7), (4, -0.70001)))
    plain = Answer([1, 2], logprobs=[clear, near])
    tally = Tally("chain", "block")
    tally.add(0, plain, Answer([1, 2]))
    tally.add(1, plain, Answer([1, 4]))
    tally.add(2, plain, Answer([7, 2]))
    assert (tally.total, tally.identical, tally.ties) == (3, 1, 1)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(identity("eagle", [tally]))
    text = console.export_text()
    assert "prompt 1, token 1: 1e-05 between the best" in text
    assert "prompt 2, token 0: 2.9 between the best" in text


def test_the_command_ends_well_when_nothing_differs_and_writes_its_figures(tiny_target: Path, tmp_path: Path) -> None:
    figures = tmp_path / "lossless.json"
    source = tmp_path / "asked.jsonl"
    asked = ({"id": str(n), "domain": "d", "messages": [{"role": "user", "content": f"Say {n}"}]} for n in range(2))
    source.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    settings = ["--set", f"target.source={tiny_target}", "--set", f"home={tmp_path}", "--set", "engine.threads=1"]
    chosen = ["--prompts", str(source), "--draft", "language_model", "--tokens", "4", "--json", str(figures)]
    result = CliRunner().invoke(app, ["bench", "lossless", *settings, *chosen, "--count", "2"])
    assert result.exit_code == 0, result.output
    ways = json.loads(figures.read_text())["ways"]
    assert all(way["identical"] == way["total"] == 2 for way in ways)
    result = CliRunner().invoke(app, ["bench", "lossless", *settings, *chosen, "--count", "3"])
    assert result.exit_code == 2
    assert "hold only 2 prompts" in result.output
