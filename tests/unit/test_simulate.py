"""``osd simulate`` as a command."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from osd.config import ConfigError, load_scenario
from tests.command import refusal, run_cli

SMALL = [
    *("--assume", "seconds=60", "--assume", "replicas=1", "--assume", "domains.count=2"),
    *("--set", "serving.replicas=10", "--set", "engine.slots=4"),
]


def test_simulate_prints_plots_and_writes_results(tmp_path):
    figures, plot, tables = tmp_path / "a.json", tmp_path / "a.svg", tmp_path / "a.md"
    files = ["--report", str(figures), "--plot", str(plot), "--markdown", str(tables)]
    result = run_cli("simulate", *SMALL, *files, "--assume", "domains.tokens=1000000")
    assert result.exit_code == 0, result.stderr
    for words in (
        "replicas needed, trained",
        "written to streams",
        "net of training",
        "data sheet",
        "Assumed efficiency",
    ):
        assert words in result.stdout
        assert words in tables.read_text() or words in ("data sheet", "Assumed efficiency")
    results = json.loads(figures.read_text())
    run = results["runs"]["trained"]
    assert run["work"]["answered"] == results["runs"]["plain"]["work"]["answered"] > 0
    assert run["replicas"] == 10
    assert results["bill"]["net"] == pytest.approx(results["bill"]["saved_by_training"] - results["bill"]["paid"])
    assert len(ElementTree.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}g")) == 3  # noqa: S314


def test_simulate_search_chooses_the_largest_net(tmp_path):
    figures = tmp_path / "a.json"
    # Trainers cost more than training can save here, so no training is best.
    costly = ["--assume", "prices.trainer_hour=1000", "--search", "--report", str(figures)]
    result = run_cli("simulate", *SMALL, *costly)
    assert result.exit_code == 0, result.stderr
    results = json.loads(figures.read_text())
    assert results["search"]["best"][0] == 0
    assert results["search"]["net"] == max(net for *_, net in results["search"]["tried"])
    assert results["scenario"]["trainers"]["count"] == 0
    assert results["bill"]["net"] == results["search"]["net"]
    reports = [line for line in result.stderr.splitlines() if line.startswith("simulating")]
    assert len(reports) == len(set(reports)) == 2 + len(results["search"]["tried"])


def test_assumptions_override_the_scenario_file(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text("seconds: 60\ndomains: {count: 3}\ncosts: {gpu: l4}\n")
    scenario = load_scenario(file, ["domains.count=5"])
    assert (scenario.seconds, scenario.domains.count, scenario.costs.gpu) == (60, 5, "l4")


@pytest.mark.parametrize(("assumed", "words"), [
    ("domains.cont=3", "did you mean domains.count?"),
    ("domains.count=0", "domains.count (--assume) must be at least 1, not 0"),
    ("costs.gpu=h900", "'h100', 'h200', 'a100' or 'l4', not h900"),
    ("costs.file=a.json", "is not read by kind published"),
    ("arrivals.kind=trace", "arrivals.file"),
    ("prices.gigabyte=inf", "finite"),
    ("seconds=nan", "finite"),
    ("domains.gain=9", "a draft of 5 gives 6 at most"),
    ("domains", "--assume needs key=value, as in domains.count=20"),
])  # fmt: skip
def test_invalid_assumption_is_refused_in_one_line(assumed, words):
    assert words in refusal(run_cli("simulate", "--assume", assumed))


def test_invalid_scenario_file_is_refused_by_its_name(tmp_path):
    file = tmp_path / "scenario.yaml"
    with pytest.raises(ConfigError, match=r"cannot read .*scenario\.yaml"):
        load_scenario(file)
    file.write_text("domains: {count: -1}")
    assert "domains.count" in refusal(run_cli("simulate", "--scenario", str(file)))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--set", "trainer.enabled=false"], "training is off: set trainer.enabled"),
    (["--set", "serving.max_queue=2"], "serving.max_queue"),
    (["--plot", "a.png"], ".svg"),
    (["--assume", "costs.kind=measured", "--assume", "costs.file=nowhere.json"], "nowhere.json"),
    (["--assume", "arrivals.kind=trace", "--assume", "arrivals.file=nowhere.csv"], "nowhere.csv"),
])  # fmt: skip
def test_invalid_simulation_is_refused_in_one_line(arguments, words):
    result = run_cli("simulate", *SMALL, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr.splitlines()[-1]
    assert result.stdout == ""
