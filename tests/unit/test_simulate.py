"""``osd simulate`` as a command."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from osd.config import ConfigError, load_scenario
from tests.command import here, refusal

SMALL = [
    *("--assume", "seconds=60", "--assume", "replicas=1", "--assume", "domains.count=2"),
    *("--set", "serving.replicas=10", "--set", "engine.slots=4"),
]


def test_a_deployment_is_printed_plotted_and_written(tmp_path):
    figures, plot, tables = tmp_path / "a.json", tmp_path / "a.svg", tmp_path / "a.md"
    files = ["--json", str(figures), "--plot", str(plot), "--markdown", str(tables)]
    result = here("simulate", *SMALL, *files, "--assume", "domains.tokens=1000000")
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
    found = json.loads(figures.read_text())
    run = found["runs"]["trained"]
    assert run["work"]["answered"] == found["runs"]["plain"]["work"]["answered"] > 0
    assert run["replicas"] == 10
    assert found["bill"]["net"] == pytest.approx(found["bill"]["saved_by_training"] - found["bill"]["paid"])
    assert len(ElementTree.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}g")) == 3  # noqa: S314


def test_the_best_trainers_and_budget_are_searched_for(tmp_path):
    figures = tmp_path / "a.json"
    # What trainers and bytes cost is more than training can earn here: none is best.
    dear = ["--assume", "prices.trainer_hour=1000", "--search", "--json", str(figures)]
    result = here("simulate", *SMALL, *dear)
    assert result.exit_code == 0, result.stderr
    found = json.loads(figures.read_text())
    assert found["search"]["best"][0] == 0
    assert found["search"]["net"] == max(net for *_, net in found["search"]["tried"])
    assert found["scenario"]["trainers"]["count"] == 0
    assert found["bill"]["net"] == found["search"]["net"]
    told = [line for line in result.stderr.splitlines() if line.startswith("simulating")]
    assert len(told) == len(set(told)) == 2 + len(found["search"]["tried"])


def test_a_scenario_is_read_from_a_file_and_what_is_assumed_on_the_command_line_comes_before(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text("seconds: 60\ndomains: {count: 3}\ncosts: {gpu: l4}\n")
    found = load_scenario(file, ["domains.count=5"])
    assert (found.seconds, found.domains.count, found.costs.gpu) == (60, 5, "l4")


@pytest.mark.parametrize(
    ("assumed", "words"),
    [
        ("domains.cont=3", "did you mean domains.count?"),
        ("domains.count=0", "domains.count (--assume) must be at least 1, not 0"),
        ("costs.gpu=h900", "'h100', 'h200', 'a100' or 'l4', not h900"),
        ("costs.file=a.json", "is not read by kind published"),
        ("arrivals.kind=trace", "arrivals.file"),
        ("prices.gigabyte=inf", "finite"),
        ("seconds=nan", "finite"),
        ("domains.gain=9", "a draft of 5 gives 6 at most"),
        ("domains", "--assume needs key=value, as in domains.count=20"),
    ],
)
def test_what_cannot_be_assumed_is_refused_in_one_line(assumed, words):
    assert words in refusal(here("simulate", "--assume", assumed))


def test_a_scenario_file_that_is_none_is_refused_by_its_name(tmp_path):
    file = tmp_path / "scenario.yaml"
    with pytest.raises(ConfigError, match=r"cannot read .*scenario\.yaml"):
        load_scenario(file)
    file.write_text("domains: {count: -1}")
    assert "domains.count" in refusal(here("simulate", "--scenario", str(file)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "trainer.enabled=false"], "training is off: set trainer.enabled"),
        (["--set", "serving.max_queue=2"], "serving.max_queue"),
        (["--plot", "a.png"], ".svg"),
        (["--assume", "costs.kind=measured", "--assume", "costs.file=nowhere.json"], "nowhere.json"),
        (["--assume", "arrivals.kind=trace", "--assume", "arrivals.file=nowhere.csv"], "nowhere.csv"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(arguments, words):
    result = here("simulate", *SMALL, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr.splitlines()[-1]
    assert result.stdout == ""
