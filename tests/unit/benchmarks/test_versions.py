"""Versions are compared on the same requests, by the clock and by the ledger, with what was expected of them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import versions as bench
from benchmarks.ledger import Block, Plan
from benchmarks.pair import BenchError
from osd.cli.app import app
from osd.config import BestFirstSettings, ChainSettings, EngineSettings, Settings
from osd.learning.value import SECOND, Traffic
from osd.registry.versions import Registry, Version
from tests.tiny import make_tiny
from tests.unit.engine.harness import make_drafter, prompts, running
from tests.unit.learning.test_value import workload

GATE = {"kept_per_depth": [0.8, 0.5], "baseline_kept_per_depth": [0.4, 0.5], "weight": 1.0}


def versions_of(directory, *manifests):
    """Versions with the same weights that each came of the one before."""
    drafter = make_drafter("eagle", directory)
    return [
        Version(number, drafter.weights(), drafter.config(), {"parent": number - 1, **manifest})
        for number, manifest in enumerate(manifests, 1)
    ]


def measured(directory, versions, plan, **more):
    blocks = []
    asked = [tuple(prompt) for prompt in prompts([5] * plan.prompts)]
    with running(directory, "eagle", prefix_cache=False, **more) as client:
        gains = bench.measure(client.engine, versions, asked, 200.0, plan, answered=blocks.append)
        return gains, blocks, client.engine


def test_every_block_is_drafted_for_by_each_version_in_turn(tmp_path):
    directory, plan = make_tiny(tmp_path), Plan(blocks=3, requests=2, tokens=6)
    gains, blocks, engine = measured(directory, versions_of(directory, {}, {}, {"parent": 1}), plan)
    assert [(block.number, block.way) for block in blocks] == [
        *((1, "2"), (1, "3"), (1, "1")),
        *((2, "3"), (2, "1"), (2, "2")),
        *((3, "1"), (3, "2"), (3, "3")),
    ]
    assert [(gain.number, gain.before) for gain in gains] == [(2, 1), (3, 1)], "the second was taken back"
    drafted = {number: counts.drafted for (_, number), counts in engine.counters().by_version.items()}
    assert set(drafted) == {1, 2, 3}
    assert len(set(drafted.values())) == 1, "the same weights draft as much for the same requests"


def test_a_gain_is_what_the_same_tokens_took_less_and_what_the_ledger_saved_more():
    one, other = (Version(number, {}, {}, {"worth": {"saving_rate": 0.3}}) for number in (4, 5))
    blocks = [
        Block("4", 1, tokens=100, seconds=20.0, busy_seconds=10.0, saved_seconds=1.0),
        Block("5", 1, tokens=100, seconds=25.0, busy_seconds=8.0, saved_seconds=4.0),
        Block("5", 2, tokens=50, seconds=10.0, busy_seconds=4.0, saved_seconds=2.0),
        Block("4", 2, tokens=100, seconds=20.0, busy_seconds=10.0, saved_seconds=2.0),
    ]
    gain = bench._gain(one, other, blocks, [0.1, 0.2], threads=2)
    assert (gain.number, gain.before, gain.published) == (5, 4, 0.3)
    assert gain.expected == pytest.approx(0.15)
    # 8 tokens a second that each took 0.02 s less, and 10 that took as much less; on two cores.
    assert gain.clock.value == pytest.approx((2 * 4 * 0.02 + 2 * 5 * 0.02) / 2)
    assert gain.ledger.value == pytest.approx((2 * 4 * 0.03 + 2 * 5 * 0.02) / 2)
    assert gain.clock.error == pytest.approx(0.02)


@pytest.mark.parametrize("growth", [ChainSettings(depth=2), BestFirstSettings()])
def test_what_is_expected_is_reckoned_from_the_gate_at_the_traffic_that_is_measured(growth):
    work = workload(0.5, (1.0, 1.1, 1.2, 1.3))
    settings = Settings(engine=EngineSettings(threads=3)).model_copy(update={"growth": growth})
    engine = SimpleNamespace(settings=settings, workloads=lambda: {"general": work})
    saving = Traffic([work], 2, 1.6, SECOND if growth.kind == "best_first" else 0.0).saving_rate(1.6, 2.2)
    assert saving > 0.05
    assert bench._expected(engine, Version(2, {}, {}, {"gate": GATE})) == pytest.approx(3 * saving)


def test_what_is_expected_of_a_version_stands_beside_what_it_saves(tmp_path):
    directory, plan = make_tiny(tmp_path), Plan(blocks=1, requests=2, tokens=6)
    (gain,), _, _ = measured(directory, versions_of(directory, {}, {"gate": GATE}), plan)
    assert gain.expected is not None


@pytest.mark.parametrize("gate", [{}, {"acceptance": 0.5, "weight": 1.0}, {**GATE, "weight": 0.4}])
def test_nothing_is_expected_without_a_gate_or_by_one_that_judged_beside_recall(tmp_path, gate):
    directory, plan = make_tiny(tmp_path), Plan(blocks=1, requests=2, tokens=6)
    (gain,), _, _ = measured(directory, versions_of(directory, {}, {"gate": gate}), plan)
    assert gain.published is None
    assert gain.expected is None


def test_a_version_whose_weights_do_not_fit_is_named(tmp_path):
    directory = make_tiny(tmp_path)
    one, other = versions_of(directory, {}, {})
    with pytest.raises(BenchError, match="version 2 of general cannot draft"):
        measured(directory, [one, replace(other, weights={})], Plan(blocks=1, requests=2, tokens=6))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose domain has one version."""
    monkeypatch.setenv("OSD_HOME", str(tmp_path / "home"))
    directory = make_tiny(tmp_path / "target")
    (one,) = versions_of(directory, {})
    registry = Registry(tmp_path / "home" / "registry")
    registry.publish("general", one.weights, one.config, {})
    return directory, registry, one


def ran(tmp_path, directory, *options):
    lines = [{"id": str(n), "domain": "d", "messages": [{"role": "user", "content": "hello"}]} for n in range(4)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    fixed = ["--set", f"target.source={directory}", "--set", "target.dtype=float32", "--set", "engine.threads=1"]
    return CliRunner().invoke(app, ["bench", "versions", "--stream", str(tmp_path / "few.jsonl"), *options, *fixed])


def test_a_version_alone_and_too_few_prompts_are_refused(tmp_path, home):
    directory, registry, one = home
    done = ran(tmp_path, directory)
    assert done.exit_code == 2
    assert "none of the 1 drafter versions of domain general came of another that is still there" in done.stderr
    registry.publish("general", one.weights, one.config, {"parent": 1})
    done = ran(tmp_path, directory, "--blocks", "2", "--requests", "2")
    assert done.exit_code == 2
    assert "--blocks and --requests: " in done.stderr
    assert "has 4 prompts of at most" in done.stderr
    assert "not 6" in done.stderr


def test_the_versions_of_a_registry_are_compared(tmp_path, home):
    directory, registry, one = home
    registry.publish("general", one.weights, one.config, {"parent": 1, "gate": GATE, "worth": {"saving_rate": 0.25}})
    sizes = ["--blocks", "1", "--requests", "2", "--rate", "50", "--tokens", "8"]
    done = ran(tmp_path, directory, *sizes, "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.stderr
    *blocks, about = map(json.loads, done.stdout.splitlines())
    assert [block["way"] for block in blocks] == ["2", "1"]
    (version,) = about["versions"]
    assert (version["number"], version["before"], version["published"]) == (2, 1, 0.25)
    assert json.loads((tmp_path / "found.json").read_text()) == {**about, "blocks": blocks}
    assert "by the ledger" in done.stderr
