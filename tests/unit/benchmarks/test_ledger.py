from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.ledger import DRAFTED, PLAIN, Block, Plan, Traffic, conclude, measure
from osd.cli.app import app
from osd.drafters.recall.drafter import Recall
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running


@pytest.mark.parametrize("traffic", [Traffic(users=2), Traffic(users=1, rate=200.0)])
def test_every_block_is_answered_in_both_ways_which_take_turns(tmp_path, traffic):
    plan = Plan(blocks=2, requests=3, tokens=6)
    asked = [tuple(prompt) for prompt in prompts([5] * plan.prompts)]
    with running(make_tiny(tmp_path), drafter=Recall(), prefix_cache=False) as client:
        found = list(measure(client.engine, asked, traffic, plan))
        counters = client.engine.counters()
    assert [(block.way, block.number) for block in found] == [(PLAIN, 1), (DRAFTED, 1), (DRAFTED, 2), (PLAIN, 2)]
    assert counters.requests == 2 * plan.prompts
    assert sum(block.tokens for block in found) == counters.completion_tokens * 2 // 3, "the first block warms up"
    for block in found:
        assert 0 < block.busy_seconds < counters.busy_seconds
        assert block.seconds >= block.busy_seconds
        assert (block.saved_seconds != 0) == (block.way == DRAFTED), "who is not drafted for saves nothing"


def test_users_ask_again_when_they_have_their_answer_and_no_sooner(tmp_path):
    plan = Plan(blocks=1, requests=6, tokens=4)
    asked = [tuple(prompt) for prompt in prompts([5] * plan.prompts)]
    with running(make_tiny(tmp_path), drafter=Recall(), prefix_cache=False) as client:
        engine, most = client.engine, 0
        submit = engine.submit

        def watched(request, on_update):
            nonlocal most
            submit(request, on_update)
            load = engine.load()
            most = max(most, load.running + load.waiting)

        engine.submit = watched
        list(measure(engine, asked, Traffic(users=2), plan))
    assert most <= 2


def pair(number: int, *, plain: float, busy: float, saved: float, tokens: int = 10) -> list[Block]:
    return [Block(PLAIN, number, tokens, 9.0, plain, 0.0), Block(DRAFTED, number, 10, 9.0, busy, saved)]


def test_a_ledger_that_is_wrong_shows_and_longer_plain_answers_do_not_hide_it():
    right = conclude([*pair(1, plain=2.0, busy=1.0, saved=1.0), *pair(2, plain=4.0, busy=2.0, saved=0.0, tokens=20)])
    assert right.off == pytest.approx(0.0)
    assert right.speedup.median == pytest.approx(1.5)
    wrong = conclude([*pair(1, plain=2.0, busy=1.0, saved=1.2), *pair(2, plain=4.0, busy=2.0, saved=2.0)])
    assert wrong.off == pytest.approx(0.2 / 6.0)
    assert wrong.by_block.most == pytest.approx(0.1)


def test_a_stream_with_too_few_prompts_is_refused_by_its_options(tmp_path, monkeypatch):
    monkeypatch.setenv("OSD_HOME", str(tmp_path / "home"))
    directory = make_tiny(tmp_path)
    few = tmp_path / "few.jsonl"
    lines = [{"id": str(n), "domain": "d", "messages": [{"role": "user", "content": "hello"}]} for n in range(3)]
    few.write_text("\n".join(map(json.dumps, lines)) + "\n")
    sizes = ["--blocks", "1", "--requests", "2", "--set", f"target.source={directory}"]
    done = CliRunner().invoke(app, ["bench", "ledger", "--stream", str(few), *sizes])
    assert done.exit_code == 2
    assert "--blocks and --requests" in done.stderr
    assert "has 3 prompts" in done.stderr
    assert "not 4" in done.stderr
