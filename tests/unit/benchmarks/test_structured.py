from __future__ import annotations

import io
import json
import random

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.pair import BenchError
from benchmarks.structured import SCHEMAS, WAYS, Block, Plan, Way, mask_seconds, measure, prompt, table
from osd.cli.app import app
from osd.drafters.recall.drafter import Recall
from tests.tiny import make_tiny, tokenizer
from tests.unit.engine.harness import running


def test_every_block_is_answered_in_all_ways_and_only_held_answers_have_forced_tokens(tmp_path):
    with running(make_tiny(tmp_path), drafter=Recall(), prefix_cache=False, context=512) as client:
        found = list(measure(client.engine, "enum classifier", Plan(2, waves=4, streams=1, tokens=40, temperature=0.0)))
        counters = client.engine.counters()
    assert [block.number for block in found] == [1, 2]
    assert [(way.held, way.drafted) for way in found[0].ways] == [*WAYS[1:], WAYS[0]], "another way begins"
    assert counters.requests == 3 * len(WAYS) * 4
    for block in found:
        assert block.mask > 0
        for way in block.ways:
            assert way.seconds > 0
            assert 0 < way.rounds <= way.tokens <= 4 * 40
            assert (way.forced > 0) == (way.held and way.drafted)
            assert way.drafted or way.rounds == way.tokens, "plain decoding has a token a round"


def test_a_mask_is_timed_over_whole_answers_with_their_end(tmp_path):
    with running(make_tiny(tmp_path)) as client:
        grammar = client.engine.grammars.compile("json", json.dumps(SCHEMAS["enum classifier"]))
    text = '{"sentiment": "positive", "topic": "price", "language": "en", "urgent": true}'
    Draft202012Validator(SCHEMAS["enum classifier"]).validate(json.loads(text))
    answer = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert 0 < mask_seconds(grammar, [answer, [*answer, *grammar.ends], answer[:5]]) < 0.01


def test_prompts_differ_and_name_what_is_asked_for():
    chance = random.Random(0)  # noqa: S311 - no secret
    for schema, what in SCHEMAS.items():
        Draft202012Validator.check_schema(what)
        asked = [prompt(schema, chance) for _ in range(20)]
        assert len(set(asked)) > 15
        assert all(name in text for text in asked for name in what["required"])


def test_answers_of_one_round_cannot_be_timed(tmp_path):
    with (
        running(make_tiny(tmp_path), prefix_cache=False, context=512) as client,
        pytest.raises(BenchError, match="before all of a wave had begun"),
    ):
        list(measure(client.engine, "flat record", Plan(1, waves=1, streams=1, tokens=1, temperature=0.0)))


def test_ratios_are_taken_within_a_block():
    def block(number: int, free: float, held: float) -> Block:
        ways = [Way(h, d, held if h else free, 100, 50 if d and h else 100, 0, 0) for h, d in WAYS]
        return Block("flat record", number, ways, 5e-5)

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table([block(1, 1.0, 2.0), block(2, 10.0, 10.0), block(3, 3.0, 2.0)]))
    text = console.export_text()
    assert text.count("1.00 (0.50 to 1.50)") == 2
    assert "2.00 (2.00 to 2.00)" in text.split("tokens a round")[1].splitlines()[0]
    assert "50 (50 to 50)" in text


def test_more_streams_than_slots_are_refused():
    done = CliRunner().invoke(app, ["bench", "structured", "--streams", "17"])
    assert done.exit_code == 2
    assert "--streams must be at most engine.slots 16, not 17" in done.stderr
