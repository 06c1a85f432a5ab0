from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.demo import measure as measuring
from deploy.demo.measure import DecodingMode, HeldOutResult, ServedState, measure
from deploy.demo.report import DemoRun, MetricsSample, write
from osd import drafting
from osd.config import Settings, load_settings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.snapshot import Snapshots
from osd.engine.engine import Engine
from osd.metrics import SpeculationCounts
from osd.registry.versions import Registry
from osd.target.identity import identify
from osd.traffic.prompt import Prompt

PROMPTS = [Prompt(str(number), "test", (f"def f{number}():",)) for number in range(20)]


@pytest.fixture(scope="module")
def settings(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("home")
    options = {"home": home, "target.source": tiny_target, "target.dtype": "float32", "engine.context": 128}
    options |= {
        "drafter.trained.kind": "language_model",
        "drafter.trained.layers": 2,
        "engine.slots": 2,
        "engine.threads": 1,
    }
    settings = load_settings(None, [f"{key}={value}" for key, value in options.items()], {})
    first = drafting.initial(settings.drafter, tiny_target, home)
    registry = Registry(settings.registry_dir)
    for _ in range(2):
        registry.publish(settings.domain, first.weights(), first.config(), {})
    return settings


@pytest.fixture(scope="module")
def state(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> ServedState:
    """State that a service leaves, with empty recall tables."""
    snapshots, early = Snapshots(settings.registry_dir), Snapshots(tmp_path_factory.mktemp("early"))
    target = identify(settings.target.source, Path(settings.target.source))
    for store in (snapshots, early):
        store.write(settings.domain, Memories(settings.recall).of(""), target)
    return ServedState(1, 2, snapshots, early)


@pytest.fixture(scope="module")
def measured(settings, state) -> tuple[HeldOutResult, list[tuple[measuring.Ids, DecodingMode]], list[str]]:
    """The result of a measurement, the prompts that it decoded with their modes, and its reported steps."""
    decoded, steps, decode = [], [], measuring.decode

    def record(engine: Engine, prompt, max_tokens, mode):
        decoded.append((prompt, mode))
        return decode(engine, prompt, max_tokens, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "decode", record)
        return measure(settings, PROMPTS, state, 8, steps.append), decoded, steps


def test_demo_measures_every_mode_on_the_same_prompts(measured):
    held_out, decoded, steps = measured
    assert held_out.greedy_identical
    assert held_out.plain > 0
    for run in (held_out.first, held_out.last, held_out.recall, held_out.mixed, held_out.first_minute):
        assert len(run.speeds) == measuring.PROMPTS
        assert run.counts.mean_acceptance_length == 1 + run.counts.accepted / max(run.counts.rounds, 1)
    assert held_out.first.counts.drafted > 0
    assert held_out.last.counts.drafted > 0
    modes = {mode.domain if mode.speculate else "plain" for _, mode in decoded}
    assert modes == {"plain", "first", "last", "recall", "first_minute", "general"}
    measured = decoded[: 6 * (measuring.PROMPTS + 1)]
    by_mode = [[prompt for prompt, mode in measured if mode == each] for each in {mode for _, mode in measured}]
    assert all(prompts == by_mode[0] for prompts in by_mode)
    assert len(by_mode[0]) == measuring.PROMPTS + 1
    assert len({mode for _, mode in decoded[0:36:6]}) == 6  # each mode is the first in turn
    assert steps


def test_demo_without_recall_measures_trained_drafters_only(settings, state):
    settings = settings.model_copy(update={"drafter": settings.drafter.trained})
    held_out = measure(settings, PROMPTS, state, 8, lambda step: None)
    assert held_out.recall is held_out.mixed is held_out.first_minute is None
    assert held_out.greedy_identical
    assert held_out.last.counts.drafted > 0


def test_demo_detects_a_changed_output(settings, state, monkeypatch):
    decode = measuring.decode

    def wrong(engine: Engine, prompt, max_tokens, mode):
        answer = decode(engine, prompt, max_tokens, mode)
        return replace(answer, ids=answer.ids[:-1]) if mode.speculate else answer

    monkeypatch.setattr(measuring, "decode", wrong)
    assert not measure(settings, PROMPTS, state, 8, lambda step: None).greedy_identical


def test_demo_report_has_the_documented_keys(measured, tmp_path):
    demo = DemoRun(
        "the target", 60, first=1, last=2, trained="language_model",
        trainer={"published": 1, "rejected": 2, "trained": 3},
    )  # fmt: skip
    demo.samples.append(MetricsSample(1, SpeculationCounts(2, 3, 4), 5, 6, 7, 0.008, 9, 10))
    write(tmp_path / "report.json", demo, measured[0])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report | {"held_out": None} == {
        "target": "the target", "requests": 0, "failed": 0, "tokens": 0, "versions_published": 1,
        "versions_rejected": 2, "swaps": 7, "swap_stall_ms_max": 8.0,
        "traces": {"written": 9, "trained": 3, "dropped": 10}, "held_out": None, "first_minute": report["first_minute"],
    }  # fmt: skip
    modes = {"plain", "first", "last", "recall", "language_model", "mixed", "greedy_identical"}
    assert set(report["held_out"]) == modes
    for figures in (report["first_minute"], *(report["held_out"][name] for name in ("recall", "mixed"))):
        assert set(figures) == {"tokens_per_second", "acceptance_rate", "mean_acceptance_length"}
    assert set(report["held_out"]["plain"]) == {"tokens_per_second"}
    for name, version in (("first", 1), ("last", 2)):
        figures = report["held_out"][name]
        assert figures.pop("version") == version
        assert set(figures) == {"tokens_per_second", "acceptance_rate", "mean_acceptance_length"}


def test_demo_acceptance_covers_the_last_seconds():
    demo = DemoRun("t", 60)
    demo.samples += [
        MetricsSample(time, SpeculationCounts(0, 10 * time, max(0, 10 * (time - 20))), 0, 1, 0, 0, 0, 0)
        for time in range(0, 41, 2)
    ]
    points = dict(demo.acceptance(10))
    assert points[18] == 0
    assert points[40] == 1
    assert points[24] == pytest.approx(0.4)
