"""What selected tokens save and lose, on a tiny target: every figure means what its table says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.engine import context as drafting
from benchmarks.engine.context import Drafting, reaching
from osd.config import ChainSettings, TokenSelectSettings
from osd.drafting import initial
from osd.target.model import load_config
from tests.unit.benchmarks.recorded import osd
from tests.unit.engine.harness import prompts, running


def test_drafts_over_few_tokens_and_over_all_give_one_text_and_their_own_acceptance(tiny_target: Path) -> None:
    (text,) = prompts([60], seed=2)
    drafter = initial(TokenSelectSettings(initial=2, top=8, local=4), tiny_target, tiny_target)
    with running(tiny_target, drafter=drafter, growth=ChainSettings(depth=3, governed=False), slots=1) as client:
        found = list(drafting.measure(client.engine, text, [8, 50], [0.9, 0.0], 24))
    assert [(one.length, one.threshold) for one in found] == [(8, 0.9), (8, 0.0), (50, 0.9), (50, 0.0)]
    assert all(one.same and one.plain > 0 and one.drafted > 0 for one in found)
    assert all(one.full_acceptance > 0.8 for one in found)
    strict, loose = found[2:]
    assert strict.acceptance < strict.full_acceptance
    assert loose.made < strict.made <= 1


def test_it_pays_from_the_first_length_behind_all_that_are_slower() -> None:
    def at(length: int, drafted: float) -> Drafting:
        return Drafting(length, 0.9, 10.0, drafted, 0.9, 1.0, 0.5, True)

    slower, faster = at(1, 9.0), at(3, 11.0)
    assert drafting.pays([slower, at(2, 12.0), at(2, 5.0), faster]) == "drafting pays from 2 tokens on"
    assert drafting.pays([faster, at(4, 8.0)]) == "drafting pays at no length that was measured"


def test_a_target_reaches_farther_with_yarn_and_stays_as_it_is_where_it_need_not(tiny_target: Path) -> None:
    with reaching(tiny_target, 1024) as same:
        assert same == tiny_target
    with reaching(tiny_target, 4096) as longer:
        rope = load_config(longer).rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 1024)
    assert load_config(tiny_target).rope_parameters["rope_type"] == "default"


def test_all_figures_are_written(tiny_target: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "found.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--length", 600, "--tokens", 8, "--text", text, "--json", file]
    settings = ["drafter.kind=token_select", "drafter.top=32", "drafter.initial=4", "drafter.local=16"]
    result = osd(tiny_target, tmp_path, "bench", "context", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    (one,) = json.loads(file.read_text())["drafting"]
    assert (one["length"], one["same"]) == (600, True)
    assert "drafting pays" in result.output
