"""The versions of a domain as people and programs read them."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from osd.admin.rollouts import ListedVersion, Listing
from osd.cli.version_table import explained, version_records, version_table
from osd.registry.pointer import Rollout
from osd.registry.training import FundReport, Training, VersionEffect

GATE = {"acceptance": 0.1368, "baseline_acceptance": 0.1239, "expected_length": 1.412, "baseline_expected_length": 1.37}
COST = {"core_seconds": 14.5, "training_seconds": 59.0, "beside_seconds": 6.0, "certain_seconds": 0.0}
EFFECTS = (VersionEffect(2, 1, 0.08, 0.01, 60), VersionEffect(1003, 2, 0.011, 0.015, 31))
RESTS = "the trained drafter rests, and recall drafts alone"
ACCOUNT = FundReport(effects=EFFECTS, log=0.091, width=0.012, paid_back=1_795_577_751.0)


def listing() -> Listing:
    created = {"created": 1_795_577_751.0}
    versions = [
        ListedVersion(1, {"parent": None}, removed=1_795_577_751.0),
        ListedVersion(2, {**created, "parent": 1, "gate": GATE, "cost": COST}),
        ListedVersion(1003, {**created, "parent": 2, "gate": GATE, "cost": {"core_seconds": 1234.0}}),
        ListedVersion(1004, {}, problem="manifest.json is not JSON"),
    ]
    training = Training(
        cpu_seconds=59.0, beside_seconds=5.0, slowed_seconds=1.0, account=ACCOUNT, state="yielding", detail="a queue"
    )
    return Listing("d" * 90, Rollout(2, 1003, 0.25, 0.0), versions, training, 0.5)


def shown() -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(version_table(listing()))
    return text.getvalue().splitlines()


def test_version_is_a_line_of_at_most_80_columns():
    lines = shown()
    assert max(map(len, lines)) <= 80
    (second,) = (line.split() for line in lines if line.startswith("2 "))
    assert second[:2] == ["2", "yes"]
    assert second[-9:] == ["0.124", "→", "0.137", "1.37", "→", "1.41", "14", "s", "+8.3%"]
    (canary,) = (line for line in lines if line.startswith("1003"))
    assert canary.startswith("1003 of 2 canary, 25 %")
    assert canary.rstrip().endswith("1,234 s +1.1%")
    assert sum(line.startswith("1 ") and "removed" in line for line in lines) == 1
    assert any("version 1004: manifest.json is not JSON" in line for line in lines)


def test_records_have_the_whole_gate_and_seconds():
    records = [json.loads(json.dumps(record)) for record in version_records(listing())]
    assert [record["version"] for record in records] == [1, 2, 1003, 1004]
    assert records[1]["gate"] == GATE
    assert records[1]["cost"] == COST
    assert records[1]["speedup"]["estimate"] == pytest.approx(math.exp(0.08))
    assert records[0]["speedup"] is None
    assert records[2]["state"] == "canary, 25 %"
    assert records[0]["removed"] == 1_795_577_751.0


def test_training_of_a_domain_is_explained_in_five_lines():
    lines = shown()
    (trainer, cost, gain, paid, trial) = lines[-5:]
    assert trainer == " trainer       yielding: a queue"
    assert cost == " training cost 60 core seconds, 6 of them while requests ran"
    assert gain == " training gain +9.5% (+8.2% to +10.8%) since version 1"
    assert paid.startswith(" paid back     Nov ")
    assert trial == " on trial      version 1003 against 2: +1.1% (-0.4% to +2.6%), 31 trials"


@pytest.mark.parametrize(
    ("log", "resting", "gain"),
    [
        (0.04, 0, "+4.1% (+3.0% to +5.1%) over recall alone"),
        (-0.03, 2, f"-3.0% (-3.9% to -2.0%) over recall alone; {RESTS} (replicas: 2)"),
        (None, 1, f"no version is measured yet; {RESTS} (replicas: 1)"),
    ],
    ids=["gains", "loses", "new"],
)
def test_gain_of_a_mixed_drafter_is_over_recall_alone(log, resting, gain):
    effect = VersionEffect(2, 0, resting=resting)
    account = FundReport(over_recall=effect, log=log, width=None if log is None else 0.01)
    assert dict(explained(Training(account=account)))["training gain"] == gain


def test_training_without_a_measured_version_says_so():
    lines = dict(explained(Training(account=FundReport(effects=(VersionEffect(2, 1),)))))
    assert lines["training gain"] == "no version is measured yet"
    assert lines["paid back"] == "not yet"
    assert lines["on trial"] == "version 2 against 1: not measured yet, 0 trials"
    assert explained(None) == []


@pytest.mark.parametrize(
    ("silence", "state"),
    [(2.0, "waiting: 5 of 12 records to start with"), (75.2, "silent for 75 s"), (None, "none runs")],
)
def test_trainer_line_says_why_it_does_not_train(silence, state):
    report = Training(state="waiting", detail="5 of 12 records to start with")
    assert explained(report, silence)[0] == ("trainer", state)


def test_version_on_trial_comes_before_versions_in_service():
    account = FundReport(effects=EFFECTS, trial=VersionEffect(1004, 1003, 0.02, 0.03, 9))
    lines = dict(explained(Training(account=account)))
    assert lines["on trial"].startswith("version 1004 against 1003: +2.0% (")
    assert "on trial" not in dict(explained(Training(account=FundReport(effects=EFFECTS[:1]))))
