from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from deploy.demo import run as demo
from deploy.demo.measure import HeldOutResult, ModeResult
from deploy.demo.report import DemoRun, MetricsSample, chart, draw, next_steps
from osd.cli.app import app
from osd.config import Settings
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine

MACHINE = Machine("a CPU", 2, (), "PyTorch")


def column(text: str, place: int, height: int) -> str:
    return "".join(line.ljust(80)[5 + place] for line in text.splitlines()[:height])


def test_chart_column_has_the_height_of_its_value():
    text = chart([(0.5, 0.5), (1.5, 1.0), (2.5, 0.0)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["  ██", "████", "    ", "    "]


def test_chart_gap_repeats_the_previous_value():
    text = chart([(0, 0.25), (3.9, 0.5)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["   █", "   █", "   █", "  ██"]


def test_chart_marks_are_below_their_times():
    assert chart([], [0, 7.5, 99], 10, 10, 2).splitlines()[2][5:] == "^      ^ ^"


def test_demo_uses_a_new_domain_in_each_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[Settings] = []

    def note(settings: Settings, *arguments: Any) -> None:
        seen.append(settings)

    monkeypatch.setattr(demo, "_run", note)
    demo.run(Settings(), demo.DemoPlan("unittest", 1.0, 1.0), None)
    (settings,) = seen
    assert settings.domain.startswith("unittest-")
    assert settings.engine.domains == 1


def drawn(tmp_path: Path, speedups: dict[int, dict[str, float]]) -> tuple[ElementTree.Element, list[str]]:
    """Draw the plot of a demo of ten seconds with a swap, and return it with its texts; ``speedups`` are by second."""
    run = DemoRun("the target", 10, last=2)
    for second in range(11):
        counts = SpeculationCounts(second, 10 * second, 4 * second)
        sample = MetricsSample(second, counts, 0, 1 + (second > 5), 0, 0, 0, 0, second // 2, speedups.get(second, {}))
        run.samples.append(sample)
    mode = ModeResult([150.0, 180.0, 190.0])
    draw(tmp_path / "demo.svg", run, HeldOutResult(100.0, mode, mode, None, None, None, True), MACHINE)
    root = ElementTree.parse(tmp_path / "demo.svg").getroot()  # noqa: S314 - our own file
    return root, [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def points(root: ElementTree.Element, kind: str) -> list[int]:
    """Return the number of points of each element of a kind."""
    return [len(element.get("points", "").split()) for element in root.iter() if element.tag.endswith(kind)]


def test_demo_plot_has_lines_range_swaps_and_caption(tmp_path: Path):
    interval = {"estimate": 1.5, "low": 1.4, "high": 1.6}
    root, texts = drawn(tmp_path, {4: {"estimate": 1.2}, 8: interval, 10: interval})
    assert points(root, "polyline") == [6, 3, 2]  # acceptance at 0 to 5 requests, speed-up, and plain decoding
    assert points(root, "polygon") == [4], "a range at both samples with an interval"
    assert texts.count("v2") == 2
    assert texts.count("5 requests") == 2
    caption = " ".join(texts[-4:])
    assert caption.startswith("the target; 2 cores of a CPU; 20")
    assert "95 % interval" in caption
    assert "held-out prompts, greedy, median: version 2 1.80." in caption


def test_demo_plot_without_measurement_says_so(tmp_path: Path):
    _, texts = drawn(tmp_path, {})
    assert "speed-up over plain decoding: not measured in this time" in texts


def test_next_steps_are_commands_that_exist():
    lines = next_steps("http://127.0.0.1:8000")
    assert len(lines) == 3
    assert "http://127.0.0.1:8000/dashboard" in lines[0]
    group: Any = get_command(app)
    for line in lines:
        _, *words = shlex.split(line.split("  ")[0])
        with group.make_context("osd", list(words)) as context:
            name, command, rest = group.resolve_command(context, words)
            command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("configured", "used"), [(0.005, 0.05), (0.08, 0.08), (0.0, 0.0)])
def test_demo_measures_the_speedup_within_minutes(monkeypatch: pytest.MonkeyPatch, configured: float, used: float):
    seen: list[Settings] = []

    def start(settings: Settings, report: Any) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "Embedded", start)
    settings = Settings.model_validate({"economy": {"measure": configured}})
    with pytest.raises(KeyboardInterrupt):
        demo.run(settings, demo.DemoPlan("unittest", 1.0, 1.0), None)
    assert seen[0].economy.measure == used
