"""``osd bench host``: CPU time of the host between two forwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osd.cli.app import app
from tests.device import skip_unless_cpu

pytestmark = skip_unless_cpu("the command runs on a CPU")


@pytest.mark.parametrize("draft", ["none", "recall", "eagle"])
def test_host_command_measures_each_number_of_streams(tmp_path: Path, draft: str) -> None:
    size = ["--streams", "1", "--streams", "3", "--steps", "20", "--draft", draft]
    result = CliRunner().invoke(app, ["bench", "host", *size, "--report", str(tmp_path / "host.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "host.json").read_text())["figures"]
    assert [row["streams"] for row in rows] == [1, 3]
    assert all(0 < row["exposed"]["median"] < row["total"]["median"] for row in rows)
    assert all((row["tokens_per_step"] > 1) == (draft == "recall") for row in rows if draft != "eagle")


def test_host_command_refuses_an_unknown_drafter() -> None:
    result = CliRunner().invoke(app, ["bench", "host", "--draft", "telepathy"])
    assert result.exit_code == 2
    assert "--draft telepathy is unknown: use none, recall, eagle" in result.stderr
