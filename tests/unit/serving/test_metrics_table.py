"""Table of metrics, its use by the documentation, the dashboard and osd top, and the contract of published metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from osd.cli import top
from serving.dashboard.charts import PAGES, display
from serving.metrics.report import is_versioned
from serving.metrics.table import REMEMBERED, REPLICA, TABLE
from tests.unit.serving.exposition import everything

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/metrics.md").read_text()
CONTRACT = Path(__file__).with_name("published_metrics.txt").read_text().splitlines()
"""Types, names without the suffix of counters, and labels except bounds of buckets, which dashboards of users read."""
ROW = re.compile(r"^\| `([\w:]+?)(?:_total)?` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)
LABEL = re.compile(r"\w+")


def test_metric_names_are_unique_and_have_a_sentence():
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    assert all(row.help.endswith(".") for row in TABLE)


def test_rows_of_one_key_read_the_same_values():
    for row in REPLICA:
        for other in REPLICA:
            assert row.key != other.key or row.kind == other.kind, (row.name, other.name)
    histograms = [row for row in REPLICA if row.kind == "histogram"]
    assert all(row.bounds == tuple(sorted(set(row.bounds))) for row in histograms)


def test_counters_by_version_have_a_key_for_merging():
    for row in REPLICA:
        if "version" in row.by:
            assert row.by == ("domain", "version")
            assert is_versioned((row.key, "general", 1))


@pytest.mark.parametrize("page", PAGES)
def test_charts_use_metrics_with_a_history(page: str):
    shown, charts = PAGES[page], PAGES[page].charts
    breakdowns = [each for each in (*shown.breakdowns, shown.positions, shown.phases) if each]
    expressions = [text for chart in charts for line in chart.lines for text in (line.part, line.of) if text]
    expressions += [chart.counts[0] for chart in charts if chart.counts]
    expressions += [text for each in breakdowns for text in (each.part, each.of, each.steps) if text]
    keys = {key for expression in expressions for key in re.split(" [+-] ", expression)}
    keys |= {f"{chart.of}_bucket" for chart in charts if chart.of}
    assert keys
    assert keys <= REMEMBERED.keys()


def test_tiles_use_counters_and_gauges_of_replicas():
    scalars = {row.key for row in REPLICA if not row.by}
    for page in PAGES.values():
        for tile in page.tiles:
            noted = set(re.findall(r"\{(?:window|total):(\w+)\}", tile.note))
            assert {tile.total, tile.alarm, *tile.gauges, *noted} - {""} <= scalars


def test_display_contains_the_listed_metrics():
    listed = {entry["key"]: entry for entry in display()["listed"]}
    assert listed["preemptions"]["title"] == "Preempted"
    assert (listed["busy_seconds"]["unit"], listed["traces_dropped"]["alarm"]) == ("seconds", True)


def test_osd_top_reads_only_published_metrics():
    published = {row.name + "_total" * (row.kind == "counter") for row in TABLE}
    read = set(re.findall(r"['\"]((?:vllm:|osd_)\w+)['\"]", Path(top.__file__).read_text()))
    assert len(read) > 15
    assert read <= published


def test_published_metrics_match_the_contract_and_the_page():
    page = {f"{kind} {name} {','.join(sorted(LABEL.findall(labels)))}" for name, kind, labels in ROW.findall(PAGE)}
    published = set()
    for family in text_string_to_metric_families(everything()):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        assert all(labels == sample.labels.keys() - {"le"} for sample in family.samples), family.name
        published.add(f"{family.type} {family.name} {','.join(sorted(labels))}")
    assert published == page
    assert published >= set(CONTRACT)
