from __future__ import annotations

import io
from contextlib import contextmanager

import pytest
from rich.console import Console

from benchmarks import replicas
from benchmarks.pair import BenchError
from benchmarks.replicas import Block, Plan, measure, table
from osd.config import Settings
from osd.traffic.prompt import Prompt
from tests.unit.benchmarks.conftest import PIECE

TOKENS = 6  # of the service's answers
PROMPTS = [Prompt(str(number), "d", (f"say {number}",)) for number in range(3)]


@pytest.fixture
def started(service, monkeypatch):
    """The services that were started, which are all the same one."""
    started = []

    @contextmanager
    def up(settings):
        started.append(settings.serving)
        yield None, f"http://127.0.0.1:{service.server_port}", None

    monkeypatch.setattr(replicas, "up", up)
    return started


def test_services_of_one_and_of_two_replicas_take_turns_and_are_asked_the_same(started, service):
    settings = Settings(serving={"max_replicas": 3})
    blocks = list(measure(settings, PROMPTS, Plan(users=2, requests=2, tokens=TOKENS, turns=2)))
    assert [(block.turn, block.replicas) for block in blocks] == [(0, 2), (0, 1), (1, 1), (1, 2)]
    assert [(serving.replicas, serving.max_replicas) for serving in started] == [(n, None) for n in (2, 1, 1, 2)]
    asked = [body["messages"][0]["content"] for body in service.bodies]
    of_each = len(asked) // 4
    assert of_each == 2 + 4, "every user asks once beforehand"
    for at in range(4):
        mine = asked[at * of_each : (at + 1) * of_each]
        assert sorted(mine[2:]) == ["say 0", "say 0", "say 1", "say 2"]
    for block in blocks:
        assert block.rate < 2 * TOKENS / (3 * PIECE)
        assert block.first_token >= PIECE


def test_a_request_that_fails_ends_the_measurement(started):
    with pytest.raises(BenchError, match="HTTP 503"):
        list(measure(Settings(), [Prompt("0", "d", ("refuse",))], Plan(1, 1, TOKENS, 1)))


def test_the_table_has_what_two_do_in_place_of_one():
    blocks = [Block(1, 0, 100.0, 0.5), Block(2, 0, 190.0, 0.25), Block(1, 1, 110.0, 0.5), Block(2, 1, 198.0, 0.25)]
    out = io.StringIO()
    Console(file=out, width=120).print(table(blocks))
    assert "1.850" in out.getvalue()
    assert "194.0" in out.getvalue()
