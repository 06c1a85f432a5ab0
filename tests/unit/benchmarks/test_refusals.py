"""Invalid options end each benchmark command with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.benchmarks.recorded import osd, stream_file

REFUSALS = [
    ("bench decode --draft oracle", "--draft must be one of"),
    ("bench decode --streams 99", "--streams must be at most engine.slots"),
    ("bench decode --growth dynamic_tree --rule chain", "would bias the output"),
    ("bench decode --rule synthetic", "verification"),
    ("bench decode --growth chain --set engine.max_draft=2", "engine.max_draft is 2"),
    ("bench peers --peer unknown", "--peer must be one of transformers, "),
    ("bench recall --stream {} --streams 4 --prompts 2", "--prompts must be at least --streams 4"),
    ("bench recall --stream {} --after 20 --prompts 20", "has 32 prompts of at most 160 tokens, not 40"),
    ("bench rules --draft registry", "no drafter version"),
    ("bench rules --plot rules.png", "--plot: the file name must end with .svg, not rules.png"),
    ("bench rules --report /nowhere/rules.json", "cannot write"),
    (
        "bench rules --draft language_model --prompts {} --set drafter.kind=language_model --set drafter.layers=9",
        "drafter.layers is 9",
    ),
    ("analyze drafts", "osd up"),
    ("bench rules --set engine.slotz=1", "engine.slotz"),
    ("bench serve --url http://127.0.0.1:1", "--rate, --arrivals or both"),
    ("bench serve --url http://127.0.0.1:1 --arrivals nowhere.csv", "cannot read"),
    ("bench serve --url http://127.0.0.1:1 --rate 1 --prompts nowhere", "neither a file"),
]


@pytest.mark.parametrize(("command", "words"), REFUSALS)
def test_command_refuses_invalid_options_in_one_line(command: str, words: str, tiny_target: Path, tmp_path: Path):
    arguments = command.format(stream_file(tmp_path)).split()
    result = osd(tiny_target, tmp_path, *arguments, settings=["engine.context=256"])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
