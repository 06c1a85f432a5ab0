"""What selected tokens save and lose, on a tiny target: every figure means what its table says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.context import attention_time, drafting, extrapolation
from benchmarks.context.attention_time import AttentionTime, Shape
from benchmarks.context.drafting import Drafting
from benchmarks.context.scaled import reaching
from osd.cli.app import app
from osd.config import ChainSettings, TokenSelectSettings
from osd.drafters import initial
from osd.runtime.attention.selection import SelectionSizes
from osd.target.model import load_config
from tests.tiny import make_tiny, tokenizer
from tests.unit.engine.harness import prompts, running

FEW = SelectionSizes(initial=2, top=8, local=4, threshold=0.9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"))


def test_attention_is_timed_for_each_length_and_shares_follow_from_the_times() -> None:
    shape = Shape("tiny", 2, 4, 2, 16)
    found = attention_time.measure(shape, [64, 256], FEW, 2, lambda step: None)
    assert [one.length for one in found] == [64, 256]
    assert all(min(one.full, one.made, one.kept) > 0 for one in found)
    one = AttentionTime("tiny", 64, full=8.0, made=6.0, kept=1.0)
    assert (one.share(0.0), one.share(1.0), one.share(0.2)) == (0.125, 0.75, 0.25)


def test_drafts_over_few_tokens_and_over_all_give_one_text_and_their_own_acceptance(tiny: Path) -> None:
    (text,) = prompts([60], seed=2)
    drafter = initial(TokenSelectSettings(initial=2, top=8, local=4), tiny, tiny)
    with running(tiny, drafter=drafter, growth=ChainSettings(depth=3, governed=False), slots=1) as client:
        found = list(
            drafting.measure(
                client.engine, client.engine.target.model, text, [8, 50], [0.9, 0.0], 24, lambda step: None
            )
        )
    assert [(one.length, one.threshold) for one in found] == [(8, 0.9), (8, 0.0), (50, 0.9), (50, 0.0)]
    assert all(one.same and one.plain > 0 and one.drafted > 0 for one in found)
    assert all(one.full_acceptance > 0.8 for one in found)
    assert found[0].mass == pytest.approx(1)
    strict, loose = found[2:]
    assert 0.1 < strict.mass < 1
    assert strict.acceptance < strict.full_acceptance
    assert loose.made < strict.made <= 1


def test_it_pays_from_the_first_length_behind_all_that_are_slower() -> None:
    def at(length: int, drafted: float) -> Drafting:
        return Drafting(length, 0.9, 10.0, drafted, 0.9, 1.0, 0.5, 0.8, True)

    slower, faster = at(1, 9.0), at(3, 11.0)
    assert drafting.pays([slower, at(2, 12.0), at(2, 5.0), faster]) == "drafting pays from 2 tokens on"
    assert drafting.pays([faster, at(4, 8.0)]) == "drafting pays at no length that was measured"


def test_every_figure_stands_below_its_name() -> None:
    columns = drafting.table([Drafting(600, 0.9, 10.0, 9.0, 0.9, 1.0, 0.5, 0.8, True)]).columns
    told = {str(one.header): next(iter(one.cells)) for one in columns}
    assert len(told) == len(columns)
    assert (told["tokens"], told["threshold"], told["plain, tokens/s"]) == ("600", "0.9", "10.0")
    assert told["same text"] == "yes"


def test_perplexity_is_that_of_transformers_where_everything_is_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extrapolation, "CHUNK", 16)
    (text,) = prompts([64], seed=5)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0].log_softmax(-1)
    told = [-float(logits[place, text[place + 1]]) for place in range(63)]
    for way, sizes in (("everything", FEW), ("selected", SelectionSizes(2, 100, 4, 0.9))):
        reader = extrapolation.Reader(way, tiny, "float32", 64, sizes)
        one, two = extrapolation.perplexities(reader, way, text, [32, 64], lambda step: None)
        for found, starts in ((one, (0, 16)), (two, (32, 48))):
            goal = sum(sum(told[start : start + 15]) for start in starts) / 30
            assert found.perplexity == pytest.approx(math.exp(goal), rel=1e-4)
    few = extrapolation.Reader("selected", tiny, "float32", 64, FEW)
    (last,) = extrapolation.perplexities(few, "selected", text, [64], lambda step: None)
    assert last.perplexity != pytest.approx(math.exp(goal), rel=1e-3)


def test_a_needle_is_found_where_the_answer_is_the_most_probable(tiny: Path) -> None:
    (text,) = prompts([300], seed=5)
    reader = extrapolation.Reader("selected", tiny, "float32", 600, FEW)
    (one,) = extrapolation.needles(reader, "selected", tokenizer(), text * 2, [400], lambda step: None)
    assert (one.found, one.hidden) == (0, 3)  # an untrained model finds nothing


def test_a_target_reaches_farther_with_yarn_and_stays_as_it_is_where_it_need_not(tiny: Path) -> None:
    with reaching(tiny, 1024) as same:
        assert same == tiny
    with reaching(tiny, 4096) as longer:
        rope = load_config(longer).rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 1024)
    assert load_config(tiny).rope_parameters["rope_type"] == "default"


WRONG = [
    (["--part", "x"], "--part must be one of attention, drafting, reading, not x"),
    (["--part", "reading", "--way", "x"], "--way must be one of everything, yarn, selected, not x"),
    (["--part", "reading", "--length", "600"], "--length must be a multiple of 512 where a text is read"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "context", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_all_figures_are_written(tiny: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "found.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--part", "drafting", "--length", "600", "--tokens", "8", "--text", str(text), "--json", str(file)]
    sets = ["--set", f"target.source={tiny}", "--set", f"home={tmp_path}", "--set", "drafter.kind=token_select"]
    sets += ["--set", "drafter.top=32", "--set", "drafter.initial=4", "--set", "drafter.local=16"]
    result = CliRunner().invoke(app, ["bench", "context", *arguments, *sets])
    assert result.exit_code == 0, result.output
    (one,) = json.loads(file.read_text())["drafting"]
    assert (one["length"], one["same"]) == (600, True)
    assert "drafting pays" in result.output
