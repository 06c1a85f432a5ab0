"""Tests of the GPU measurements that run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import steps
from benchmarks.gpu.random_targets import SHAPES, make_drafter, make_target, make_tokenizer
from benchmarks.gpu.steps import GpuRun
from tests.waiting import wait_until


@pytest.mark.parametrize(("shape", "billions"), [("1b", 1.236), ("8b", 8.030)])
def test_random_targets_have_the_sizes_of_their_names(shape: str, billions: float) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_small_target_is_reproducible_and_not_constant() -> None:
    first, again = (make_target("small", torch.float32, torch.device("cpu"), 4.0) for _ in range(2))
    ids = torch.arange(40)[None] % 17
    with torch.no_grad():
        logits = first(input_ids=ids, osd_attention=_Nothing()).logits[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert len(make_tokenizer(512)) == 512
    assert make_drafter(first).needs.taps == (0, 1, 2)[: len(make_drafter(first).needs.taps)]


class _Nothing:
    def attend(self, layer: int, query: torch.Tensor, *_given: object, **_more: object) -> torch.Tensor:
        return query


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--small", *arguments])
    return command.main()


def test_step_with_figures_is_skipped(monkeypatch, tmp_path: Path, capsys):
    (tmp_path / "forward-1b.json").write_text("{}")
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "forward-1b") == 0
    assert capsys.readouterr().out == ""
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "backward") == 2
    assert "no step backward; the steps are tests, equality-dspark" in capsys.readouterr().err
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", "forward-1b,tests", "--seconds", "1") == 3
    assert capsys.readouterr().out == "no time was left for tests; run the same command to continue\n"


def test_figures_are_complete_and_name_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(run: GpuRun) -> dict[str, Any]:
        raise ValueError("no luck")

    monkeypatch.setitem(steps.STEPS, "forward-1b", lambda run: {"shape": run.shape("1b")})
    monkeypatch.setitem(steps.STEPS, "swap-1b", fails)
    assert run(monkeypatch, "--out", str(tmp_path), "--here", "--steps", "forward-1b,swap-1b,forward-8b") == 1
    figures = json.loads((tmp_path / "forward-1b.json").read_text())
    assert (figures["step"], figures["device"], figures["gpu"], figures["shape"]) == (
        "forward-1b",
        "cpu",
        None,
        "small",
    )
    assert "no luck" in (tmp_path / "swap-1b.failed.txt").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"forward-1b.json", "swap-1b.failed.txt"}


def test_failed_step_is_followed_by_a_new_process(monkeypatch, tmp_path: Path, capsys):
    """Of two small processes one fails and one waits with a child; the child is killed at the time limit."""
    script = """import subprocess, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, names = Path(given["--out"]), given["--steps"].split(",")
(out / f"{names[0]}.steps").write_text(given["--steps"])
if names[0] == "forward-1b":
    (out / "forward-1b.json").write_text("{}")
    (out / "forward-8b.failed.txt").write_text("no luck")
    sys.exit(1)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(out / "other").write_text(str(other.pid))
time.sleep(600)
"""
    start = subprocess.Popen

    def small(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", script, *command[command.index("--device") :]], **options)

    monkeypatch.setattr(command.subprocess, "Popen", small)
    monkeypatch.setattr(command, "LEAST", 0.0)
    names = "forward-1b,forward-8b,swap-1b,swap-8b"
    assert run(monkeypatch, "--out", str(tmp_path), "--steps", names, "--seconds", "3") == 1
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.steps")} == {
        "forward-1b": names,
        "swap-1b": "swap-1b,swap-8b",
    }
    assert (tmp_path / "forward-8b.failed.txt").read_text() == "no luck"
    assert (tmp_path / "swap-1b.failed.txt").read_text() == "time was over"
    output = capsys.readouterr().out
    assert "failed: forward-8b, swap-1b" in output
    assert "no time was left for swap-8b" in output
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "other").read_text()))
        wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)  # the kill takes a moment


@pytest.mark.soak
def test_recall_step_drafts_repeated_prompts(tmp_path: Path) -> None:
    figures = steps.STEPS["recall-1b"](GpuRun(torch.device("cpu"), True, tmp_path))
    assert figures["length_again"]["median"] > 1.5
