"""``osd demo`` as a user runs it, on a tiny target."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tests.command import osd
from tests.redis_servers import free_port


@pytest.mark.soak
def test_demo_learns_measures_and_writes_a_plot(tiny_target, tmp_path):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "demo.json"
    lines = (
        {"id": str(number), "domain": "toy", "messages": [{"role": "user", "content": f"{number} and {number % 5}"}]}
        for number in range(200)
    )
    prompts.write_text("\n".join(map(json.dumps, lines)))
    settings = {
        "target.source": tiny_target, "target.dtype": "float32", "engine.slots": 2, "engine.context": 256,
        "engine.threads": 1, "drafter.trained.vocabulary": 64, "serving.port": free_port(), "trainer.min_records": 8,
    }  # fmt: skip
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    plan = ["--minutes", "0.5", "--rate", "4", "--source", str(prompts), "--report", str(report)]
    with osd(tmp_path / "home", "demo", *plan, *arguments) as process:
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "Next steps" in output
    figures = json.loads(report.read_text())
    assert figures["requests"] > 50
    assert figures["failed"] == 0
    assert figures["held_out"]["greedy_identical"]
    assert ElementTree.parse(report.with_suffix(".svg"))  # noqa: S314 - our own file
