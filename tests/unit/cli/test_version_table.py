"""The versions of a domain as people and programs read them."""

from __future__ import annotations

import io
import json

from rich.console import Console

from osd.admin.rollouts import Listed, Listing
from osd.cli.version_table import version_records, version_table
from osd.registry.pointer import Rollout

GATE = {"acceptance": 0.1368, "baseline_acceptance": 0.1239, "expected_length": 1.412, "baseline_expected_length": 1.37}
WORTH = {"payback_seconds": 570_894.4, "payback_of_all": None}


def listing() -> Listing:
    made = {"created": 1_795_577_751.0}
    versions = [
        Listed(1, {"parent": None}, removed=1_795_577_751.0),
        Listed(2, {**made, "parent": 1, "gate": GATE, "worth": WORTH}),
        Listed(1003, {**made, "parent": 2, "gate": GATE, "worth": {"payback_seconds": 59.0, "payback_of_all": 4e8}}),
        Listed(1004, {}, problem="manifest.json is not JSON"),
    ]
    return Listing("d" * 90, Rollout(2, 1003, 0.25, 0.0), versions)


def shown() -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(version_table(listing()))
    return text.getvalue().splitlines()


def test_a_version_is_one_line_of_at_most_80_columns():
    lines = shown()
    assert max(map(len, lines)) <= 80
    (second,) = (line.split() for line in lines if line.startswith("2 "))
    assert second[:2] == ["2", "yes"]
    assert second[-9:] == ["0.124", "→", "0.137", "1.37", "→", "1.41", "6.6", "d", "never"]
    (canary,) = (line for line in lines if line.startswith("1003"))
    assert canary.startswith("1003 of 2 canary, 25 %")
    assert canary.rstrip().endswith("59 s    13 y")
    assert sum(line.startswith("1 ") and "removed" in line for line in lines) == 1
    assert any("version 1004: manifest.json is not JSON" in line for line in lines)


def test_programs_get_all_of_the_gate_and_seconds():
    records = [json.loads(json.dumps(record)) for record in version_records(listing())]
    assert [record["version"] for record in records] == [1, 2, 1003, 1004]
    assert records[1]["gate"] == GATE
    assert records[1]["payback_seconds"] == 570_894.4
    assert records[1]["payback_of_all"] is None
    assert records[2]["state"] == "canary, 25 %"
    assert records[0]["removed"] == 1_795_577_751.0
