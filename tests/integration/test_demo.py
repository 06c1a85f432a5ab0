from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.demo import measure as measuring
from deploy.demo.measure import Served, Way, measure
from deploy.demo.report import Sample, Story, write
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


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> Settings:
    given = {"home": tmp_path, "target.source": tiny_target, "target.dtype": "float32", "engine.context": 128}
    given |= {
        "drafter.trained.kind": "language_model",
        "drafter.trained.layers": 2,
        "engine.slots": 2,
        "engine.threads": 1,
    }
    settings = load_settings(None, [f"{key}={value}" for key, value in given.items()], {})
    first = drafting.initial(settings.drafter, tiny_target, tmp_path)
    registry = Registry(settings.registry_dir)
    for _ in range(2):
        registry.publish(settings.domain, first.weights(), first.config(), {})
    return settings


def recalled(settings: Settings, tmp_path: Path) -> Served:
    """What a service would have left, with tables that know nothing."""
    snapshots, early = Snapshots(settings.registry_dir), Snapshots(tmp_path / "early")
    target = identify(settings.target.source, Path(settings.target.source))
    for one in (snapshots, early):
        one.write(settings.domain, Memories(settings.recall).of(""), target)
    return Served(1, 2, snapshots, early)


def test_every_way_of_decoding_is_measured_on_the_same_prompts(settings, monkeypatch, tmp_path):
    asked: list[tuple[measuring.Ids, Way]] = []
    decode = measuring.decode

    def recorded(engine: Engine, prompt, max_tokens, way):
        asked.append((prompt, way))
        return decode(engine, prompt, max_tokens, way)

    monkeypatch.setattr(measuring, "decode", recorded)
    steps: list[str] = []
    held_out = measure(settings, PROMPTS, recalled(settings, tmp_path), 8, steps.append)
    assert held_out.greedy_identical
    assert held_out.plain > 0
    for run in (held_out.first, held_out.last, held_out.recall, held_out.mixed, held_out.first_minute):
        assert run is not None
        assert len(run.speeds) == measuring.PROMPTS
        assert run.counts.mean_acceptance_length == 1 + run.counts.accepted / max(run.counts.rounds, 1)
    assert held_out.first.counts.drafted > 0
    assert held_out.last.counts.drafted > 0
    ways = {way.domain if way.speculate else "plain" for _, way in asked}
    assert ways == {"plain", "first", "last", "recall", "first_minute", "general"}
    measured = asked[: 6 * (measuring.PROMPTS + 1)]
    by_way = [[prompt for prompt, asked_way in measured if asked_way == way] for way in {way for _, way in measured}]
    assert all(prompts == by_way[0] for prompts in by_way)
    assert len(by_way[0]) == measuring.PROMPTS + 1
    assert len({way for _, way in asked[0:36:6]}) == 6  # each way begins in its turn
    assert steps


def test_without_recall_the_trained_drafters_are_measured_alone(settings, tmp_path):
    settings = settings.model_copy(update={"drafter": settings.drafter.trained})
    held_out = measure(settings, PROMPTS, recalled(settings, tmp_path), 8, lambda step: None)
    assert held_out.recall is held_out.mixed is held_out.first_minute is None
    assert held_out.greedy_identical
    assert held_out.last.counts.drafted > 0


def test_an_output_that_speculation_changes_is_seen(settings, monkeypatch, tmp_path):
    decode = measuring.decode

    def wrong(engine: Engine, prompt, max_tokens, way):
        answer = decode(engine, prompt, max_tokens, way)
        return replace(answer, ids=answer.ids[:-1]) if way.speculate else answer

    monkeypatch.setattr(measuring, "decode", wrong)
    assert not measure(settings, PROMPTS, recalled(settings, tmp_path), 8, lambda step: None).greedy_identical


def test_the_report_has_the_keys_that_are_promised(settings, tmp_path):
    held_out = measure(settings, PROMPTS, recalled(settings, tmp_path), 8, lambda step: None)
    story = Story(
        "the target",
        60,
        first=1,
        last=2,
        trained="language_model",
        trainer={"published": 1, "rejected": 2, "trained": 3},
    )
    story.samples.append(Sample(1, SpeculationCounts(2, 3, 4), 5, 6, 7, 0.008, 9, 10))
    write(tmp_path / "report.json", story, held_out)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report | {"held_out": None} == {
        "target": "the target",
        "requests": 0,
        "failed": 0,
        "tokens": 0,
        "versions_published": 1,
        "versions_rejected": 2,
        "swaps": 7,
        "swap_stall_ms_max": 8.0,
        "traces": {"written": 9, "trained": 3, "dropped": 10},
        "held_out": None,
        "first_minute": report["first_minute"],
    }
    ways = {"plain", "first", "last", "recall", "language_model", "mixed", "greedy_identical"}
    assert set(report["held_out"]) == ways
    for figures in (report["first_minute"], *(report["held_out"][name] for name in ("recall", "mixed"))):
        assert set(figures) == {"tokens_per_second", "acceptance_rate", "mean_acceptance_length"}
    assert set(report["held_out"]["plain"]) == {"tokens_per_second"}
    for name, version in (("first", 1), ("last", 2)):
        figures = report["held_out"][name]
        assert figures.pop("version") == version
        assert set(figures) == {"tokens_per_second", "acceptance_rate", "mean_acceptance_length"}


def test_acceptance_is_that_of_the_last_seconds():
    story = Story("t", 60)
    story.samples += [
        Sample(time, SpeculationCounts(0, 10 * time, max(0, 10 * (time - 20))), 0, 1, 0, 0, 0, 0)
        for time in range(0, 41, 2)
    ]
    points = dict(story.acceptance(10))
    assert points[18] == 0
    assert points[40] == 1
    assert points[24] == pytest.approx(0.4)
