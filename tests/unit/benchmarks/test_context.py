"""Drafts over selected tokens of a tiny target: every figure has the meaning of its column."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.engine import context as drafting
from benchmarks.engine.context import ContextSpeed, extend_context
from osd.config import ChainSettings, TokenSelectSettings
from osd.drafting import initial
from osd.target.model import load_config
from tests.unit.benchmarks.recorded import osd
from tests.unit.engine.harness import prompts, running


def test_drafts_over_few_or_all_tokens_agree(tiny_target: Path) -> None:
    (text,) = prompts([60], seed=2)
    drafter = initial(TokenSelectSettings(initial=2, top=8, local=4), tiny_target, tiny_target)
    with running(tiny_target, drafter=drafter, growth=ChainSettings(depth=3, governed=False), slots=1) as client:
        speeds = list(drafting.measure(client.engine, text, [8, 50], [0.9, 0.0], 24))
    assert [(speed.length, speed.threshold) for speed in speeds] == [(8, 0.9), (8, 0.0), (50, 0.9), (50, 0.0)]
    assert all(speed.same and speed.plain > 0 and speed.drafted > 0 for speed in speeds)
    assert all(speed.full_acceptance > 0.8 for speed in speeds)
    strict, loose = speeds[2:]
    assert strict.acceptance < strict.full_acceptance
    assert loose.made < strict.made <= 1


def test_break_even_note_names_first_length_after_slower() -> None:
    def at(length: int, drafted: float) -> ContextSpeed:
        return ContextSpeed(length, 0.9, 10.0, drafted, 0.9, 1.0, 0.5, True)

    slower, faster = at(1, 9.0), at(3, 11.0)
    assert drafting.break_even_note([slower, at(2, 12.0), at(2, 5.0), faster]) == "drafting is faster from 2 tokens on"
    assert drafting.break_even_note([faster, at(4, 8.0)]) == "drafting is faster at no measured length"


def test_extend_context_adds_yarn_only_if_needed(tiny_target: Path) -> None:
    with extend_context(tiny_target, 1024) as same:
        assert same == tiny_target
    with extend_context(tiny_target, 4096) as longer:
        rope = load_config(longer).rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 1024)
    assert load_config(tiny_target).rope_parameters["rope_type"] == "default"


def test_context_command_writes_all_figures(tiny_target: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "found.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--length", 600, "--tokens", 8, "--text", text, "--report", file]
    settings = ["drafter.kind=token_select", "drafter.top=32", "drafter.initial=4", "drafter.local=16"]
    result = osd(tiny_target, tmp_path, "bench", "context", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    (speed,) = json.loads(file.read_text())["drafting"]
    assert (speed["length"], speed["same"]) == (600, True)
    assert "drafting is faster" in result.output
