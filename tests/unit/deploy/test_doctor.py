"""Findings of ``osd doctor`` on this machine and in simulated faults."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from deploy.doctor import self_test as tested
from deploy.doctor.findings import findings
from osd.capture.server import free_port
from osd.cli.app import app
from osd.config import Settings, load_settings
from osd.running import announce, lock


def osd(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})


def states_of(settings: Settings) -> dict[str, tuple[str, str]]:
    return {finding.check: (finding.state, finding.says) for finding in findings(settings)}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.doctor.findings.self_test", lambda settings, directory: "skipped")


def home(tmp_path: Path, *more: str) -> Settings:
    return load_settings(None, [f"home={tmp_path}", f"serving.port={free_port()}", "redis_url=null", *more])


def test_doctor_on_this_machine_finds_no_failure(tmp_path: Path):
    port = home(tmp_path).serving.port
    shown = osd("--json", "--set", f"home={tmp_path}", "--set", f"serving.port={port}", "--set", "redis_url=null")
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [record["check"] for record in records][-1] == "self-test"
    assert {record["state"] for record in records} <= {"ok", "warning"}, records
    assert shown.exit_code == 0
    assert "are those of transformers" in records[-1]["says"]


def test_doctor_names_obstacles_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = [f"home={tmp_path}", f"serving.port={port}", "redis_url=redis://127.0.0.1:1/0", "engine.max_draft=1"]
        shown = osd(*(part for setting in options for part in ("--set", setting)))
    assert shown.exit_code == 1
    words = " ".join(shown.stdout.split())
    assert f"serving.port {port} is in use" in words
    assert "redis_url redis://127.0.0.1:1/0: cannot connect" in words
    assert "check its name and its port" in words
    assert "engine.max_draft is 1" in words
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_doctor_reports_a_public_service_and_ray_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick(monkeypatch)
    state, says = states_of(home(tmp_path, "serving.host=0.0.0.0"))["settings"]
    assert (state, "open to other machines" in says) == ("failure", True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    state, says = states_of(home(tmp_path))["settings"]
    assert (state, "RAY_AUTH_MODE" in says) == ("failure", True)


def test_doctor_reports_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state, says = states_of(home(tmp_path, "target.device=cuda"))["GPU"]
    assert state == "failure"
    assert "target.device is cuda" in says


def test_doctor_names_a_package_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick(monkeypatch)
    requirements = [
        "torch>=99; extra == 'serve'",
        "no-such-package; extra == 'serve'",
        "never-wanted; extra == 'wandb'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    state, says = states_of(home(tmp_path))["packages"]
    assert state == "failure"
    assert f"torch {torch.__version__} is not >=99, no-such-package is not installed" in says
    assert "never-wanted" not in says


def test_doctor_checks_a_running_service_instead_of_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick(monkeypatch)
    settings = home(tmp_path)
    with lock(tmp_path):
        announce(tmp_path, "http://127.0.0.1:9", "redis://127.0.0.1:1/0")
        seen = states_of(settings)
    assert seen["port"] == ("ok", f"osd runs in {tmp_path} and answers at http://127.0.0.1:9")
    assert seen["Redis"][0] == "failure"


def test_self_test_with_a_wrong_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = tested.by_transformers

    def wrong(directory: Path, device: torch.device) -> Sequence[int]:
        return [*real(directory, device)[:7], -1]

    monkeypatch.setattr(tested, "by_transformers", wrong)
    with pytest.raises(tested.SelfTestError, match=r"without drafts differs .* after 7 tokens"):
        tested.self_test(home(tmp_path), tmp_path)
