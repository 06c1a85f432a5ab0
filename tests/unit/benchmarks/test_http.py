from __future__ import annotations

import io
from contextlib import contextmanager

import pytest
from rich.console import Console

from benchmarks.engines import BenchError
from benchmarks.service.http import HTTP, PROCESS, HttpPlan, LoadBlock, measure, table
from osd.cli.common import RunError
from osd.traffic.prompt import Prompt
from tests.unit.benchmarks.conftest import PIECE
from tests.unit.engine.harness import running

PROMPTS = [Prompt(str(number), "d", (f"say {number}", "and again")) for number in range(3)]
TOKENS = 6  # of the service's answers


@contextmanager
def measured(tiny_target, service, plan, prompts=PROMPTS):
    with running(tiny_target, prefix_cache=False) as client:
        yield measure(client.engine, f"http://127.0.0.1:{service.server_port}", None, prompts, plan), client.engine


def test_both_ways_answer_the_same_requests(tiny_target, service):
    with measured(tiny_target, service, HttpPlan((1, 2), rounds=2, tokens=TOKENS, turns=2)) as (blocks, engine):
        measured_blocks = list(blocks)
        counters = engine.counters()
    ways = [(block.turn, block.users, block.way) for block in measured_blocks]
    turns = [[(1, PROCESS), (1, HTTP)], [(2, HTTP), (2, PROCESS)]]
    assert ways == [(turn, users, way) for users in (1, 2) for pairs in turns for turn, way in pairs]
    assert counters.requests == len(service.bodies) == 3 * (2 + 4), "with a warm-up turn"
    assert counters.completion_tokens == counters.requests * TOKENS
    assert {len(body["messages"]) for body in service.bodies} == {1}, "only the first turns are sent"
    for body in service.bodies:
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (TOKENS, True, 0.0)
    for block in (block for block in measured_blocks if block.way == HTTP):
        assert block.first_token >= PIECE
        assert block.rate < block.users * TOKENS / (3 * PIECE)


def test_first_token_counts_from_the_users_request(tiny_target, service):
    with measured(tiny_target, service, HttpPlan((1,), rounds=40, tokens=TOKENS, turns=1)) as (blocks, _):
        process = next(block for block in blocks if block.way == PROCESS)
    assert process.first_token < 10 * TOKENS / process.rate, "not from the first user's request"


def test_refused_or_short_answer_ends_the_measurement(tiny_target, service):
    refused = [Prompt("0", "d", ("refuse",))]
    with (
        measured(tiny_target, service, HttpPlan((1,), rounds=1, tokens=TOKENS, turns=1), refused) as (blocks, _),
        pytest.raises(RunError, match="1 requests failed: HTTP 503"),
    ):
        list(blocks)
    with (
        measured(tiny_target, service, HttpPlan((1,), rounds=1, tokens=TOKENS + 2, turns=1)) as (blocks, _),
        pytest.raises(RunError, match="6 tokens instead of 8"),
    ):
        list(blocks)


def test_prompt_without_room_for_answer_is_refused(tiny_target, service):
    long = [Prompt("0", "d", ("a" * 500,))]
    with (
        measured(tiny_target, service, HttpPlan((1,), rounds=1, tokens=TOKENS, turns=1), long) as (blocks, _),
        pytest.raises(BenchError, match=r"more than the \d+ tokens that engine\.context leaves"),
    ):
        list(blocks)
    assert service.bodies == []


def test_table_takes_ratios_within_a_turn():
    blocks = []
    for turn, http, process in ((1, 50.0, 100.0), (2, 90.0, 90.0), (3, 60.0, 40.0)):
        blocks += [LoadBlock(HTTP, 8, turn, 0.03, http), LoadBlock(PROCESS, 8, turn, 0.01 * turn, process)]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(blocks).grid())
    assert "1.000 (0.500 to 1.500)" in console.export_text(clear=False)
    assert "10.0 (0.0 to 20.0)" in console.export_text()
