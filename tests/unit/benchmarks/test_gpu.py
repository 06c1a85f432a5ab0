"""The list for a GPU, as far as it runs without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import steps
from benchmarks.gpu.random_targets import SHAPES, make_drafter, make_target, make_tokenizer
from benchmarks.gpu.steps import Run


@pytest.mark.parametrize(("shape", "billions"), [("1b", 1.236), ("8b", 8.030)])
def test_the_random_targets_have_the_sizes_that_they_are_named_for(shape: str, billions: float) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_a_small_target_is_the_same_every_time_and_says_different_things() -> None:
    first, again = (make_target("small", torch.float32, torch.device("cpu"), 4.0) for _ in range(2))
    ids = torch.arange(40)[None] % 17
    with torch.no_grad():
        logits = first(input_ids=ids, osd_attention=_Nothing()).logits[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert len(make_tokenizer(512)) == 512
    assert make_drafter(first).needs.taps == (0, 2, 2)[: len(make_drafter(first).needs.taps)]


class _Nothing:
    def attend(self, layer: int, query: torch.Tensor, *_given: object, **_more: object) -> torch.Tensor:
        return query


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--small", *arguments])
    return command.main()


def test_a_step_that_has_its_figures_is_left_out_and_an_unknown_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forward-1b.json").write_text("{}")
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "forward-1b") == 0
    assert capsys.readouterr().out == "forward-1b: is there\n"
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "backward") == 2
    assert "no step backward; there are tests, equality, forward-1b" in capsys.readouterr().err
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "tests", "--seconds", "1") == 3
    assert "no time was left for tests" in capsys.readouterr().out


def test_figures_are_written_whole_with_the_machine_that_they_are_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(steps.STEPS, "forward-1b", lambda run: {"shape": run.shape("1b")})
    assert run(monkeypatch, "--out", str(tmp_path), "--one", "forward-1b") == 0
    found = json.loads((tmp_path / "forward-1b.json").read_text())
    assert (found["step"], found["device"], found["gpu"], found["shape"]) == ("forward-1b", "cpu", None, "small")
    assert [path.name for path in tmp_path.iterdir()] == ["forward-1b.json"]


@pytest.mark.soak
def test_recall_says_again_what_it_heard(tmp_path: Path) -> None:
    found = steps.STEPS["recall-1b"](Run(torch.device("cpu"), True, tmp_path))
    assert found["length_again"]["median"] > 1.5
