"""``osd analyze refusals --url`` against the running service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from osd.cli.app import app
from tests import harmless


def analyze(service: Any, folder: Path, *more: str) -> Result:
    file = folder / "harmless.json"
    file.write_text(json.dumps(harmless.prompts(6)), encoding="utf-8")
    chosen = ["--url", f"{service.url}/v1", "--tokens", "6", "--rounds", "1", "--report", str(folder / "report.json")]
    settings = ["--set", "target.dtype=float32", "--set", f"home={folder}"]
    return CliRunner().invoke(app, ["analyze", "refusals", str(file), *chosen, *settings, *more])


def test_refusals_are_the_same_with_speculation(service: Any, tmp_path: Path):
    result = analyze(service, tmp_path, "--domain", "code")
    assert result.exit_code == 0, result.output
    plain, repeated, served, domain = json.loads((tmp_path / "report.json").read_text())["ways"]
    assert [result["way"] for result in (plain, repeated, served, domain)] == [
        "plain", "plain again", "as served", "domain code",
    ]  # fmt: skip
    assert plain["drafted"] == repeated["drafted"] == 0
    assert served["drafted"] > 0
    assert domain["drafted"] > 0
    assert all(result["differences"] == [] for result in (repeated, served, domain))
    assert served["pairs"]["pairs"] == 6


def test_request_error_is_one_sentence(service: Any, tmp_path: Path):
    result = analyze(service, tmp_path, "--tokens", "4096")
    assert result.exit_code == 1
    assert f"osd: the service at {service.url} does not answer: HTTP 400: " in result.stderr.splitlines()[-1]
    assert "'max_tokens' is 4096 and this server's limit is 2048" in result.stderr
    assert not (tmp_path / "report.json").exists()
