"""Contract of published metrics: published_metrics.txt lists names, types and labels that users' dashboards read."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serving.exposition import everything

CONTRACT = Path(__file__).with_name("published_metrics.txt").read_text().splitlines()
"""Lines with the type, the name without the suffix of a counter, and the labels except the bound of a bucket."""
PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+?)(?:_total)?` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)
LABEL = re.compile(r"\w+")


def test_published_metrics_match_the_contract_and_the_page():
    page = {f"{kind} {name} {','.join(sorted(LABEL.findall(labels)))}" for name, kind, labels in ROW.findall(PAGE)}
    published = set()
    for family in text_string_to_metric_families(everything()):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        assert all(labels == sample.labels.keys() - {"le"} for sample in family.samples), family.name
        published.add(f"{family.type} {family.name} {','.join(sorted(labels))}")
    assert published == page
    assert published >= set(CONTRACT)
