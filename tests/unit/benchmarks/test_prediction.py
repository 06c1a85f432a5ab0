"""``osd bench prediction``: the prediction that it makes, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.prediction import changed
from tests.unit.benchmarks.recorded import osd, stream_file


def test_one_line_in_twenty_is_changed():
    tokens = list(range(1000, 1000 + 12 * 40))
    lines = [list(changed(tokens))[start : start + 12] for start in range(0, len(tokens), 12)]
    whole = [tokens[start : start + 12] for start in range(0, len(tokens), 12)]
    assert [number for number, line in enumerate(lines) if line != whole[number]] == [10, 30]
    assert sorted(changed(tokens)) == tokens


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_prediction_command_gives_the_plain_answers(tiny_target: Path, tmp_path: Path, temperature: float):
    arguments = ["--stream", stream_file(tmp_path), "--prompts", 2, "--tokens", 48, "--turns", 1]
    arguments += ["--temperature", temperature, "--report", tmp_path / "all.json"]
    settings = ["engine.context=256", "growth.governed=false"]
    result = osd(tiny_target, tmp_path, "bench", "prediction", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures == json.loads((tmp_path / "all.json").read_text())
    assert len(figures["prompts"]) == 2
    for prompt in figures["prompts"]:
        assert prompt["different"] == 0
        assert prompt["drafted"] >= prompt["accepted"] > 0
        assert prompt["prediction"]["least"] > 0
