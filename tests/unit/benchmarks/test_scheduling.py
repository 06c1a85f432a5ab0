from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.pair import BenchError
from benchmarks.scheduling import Plan, Turn, measure, table
from osd.cli.app import app
from osd.drafters.recall.drafter import Recall
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running


def test_streams_are_timed_with_a_prompt_and_without_and_a_second_turn_reads_little(tmp_path):
    texts = [tuple(prompt) for prompt in prompts([40] * 20)]
    with running(make_tiny(tmp_path), slots=3, context=512, chunk=8) as client:
        found = list(measure(client.engine, texts, Plan(streams=2, prompt=120, turn=8, turns=2)))
        counters = client.engine.counters()
    assert len(found) == 2
    for turn in found:
        assert turn.alone > 0
        assert turn.beside > 0
        assert 0 < turn.second < turn.first
        assert turn.read > 0
    assert counters.cached_tokens >= 3 * 120, "the second turns begin with what the first ones left"
    assert counters.failed == 0


def test_streams_that_end_too_soon_are_said(tmp_path):
    texts = [tuple(prompt) for prompt in prompts([40] * 20)]
    with (
        running(make_tiny(tmp_path), slots=3, context=128) as client,
        pytest.raises(BenchError, match=r"a stream ended while it was measured: a longer engine\.context"),
    ):
        list(measure(client.engine, texts, Plan(streams=2, prompt=60, turn=8, turns=1)))


def test_too_little_text_is_said(tmp_path):
    with (
        running(make_tiny(tmp_path), drafter=Recall(), slots=2) as client,
        pytest.raises(BenchError, match="the prompts have 5 tokens together and 256 are needed"),
    ):
        list(measure(client.engine, [(1, 2, 3, 4, 5)], Plan(1, 60, 8, 1)))


def test_ratios_are_taken_within_a_turn():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(
        table([Turn(0.01, 0.02, 1.0, 2.0, 0.2), Turn(0.04, 0.04, 1.0, 4.0, 0.4), Turn(0.01, 0.03, 1.0, 1.0, 0.1)])
    )
    text = console.export_text()
    assert "2.00 (1.00 to 3.00)" in text
    assert "0.10 (0.10 to 0.10)" in text
    assert "20.0" not in text.split("times alone")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--streams", "16"], "--streams must be below engine.slots 16, not 16"),
        (["--prompt", "2000"], "--prompt 2000 needs engine.context of at least 4000, not 2048"),
    ],
)
def test_what_does_not_fit_the_settings_is_refused(more, said):
    done = CliRunner().invoke(app, ["bench", "scheduling", *more])
    assert done.exit_code == 2
    assert said in done.stderr
