"""Names, types and labels of metrics that users' dashboards and alerts read: published_metrics.txt is the contract."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serving.exposition import everything

CONTRACT = Path(__file__).with_name("published_metrics.txt").read_text().splitlines()
"""Type, name without the ending of a counter, and labels except the bound of a bucket."""
PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+?)(?:_total)?` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)
LABEL = re.compile(r"\w+")


def test_published_metrics_keep_their_names_types_and_labels_and_are_those_of_the_page():
    page = {f"{kind} {name} {','.join(sorted(LABEL.findall(labels)))}" for name, kind, labels in ROW.findall(PAGE)}
    published = set()
    for family in text_string_to_metric_families(everything()):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        assert all(labels == sample.labels.keys() - {"le"} for sample in family.samples), family.name
        published.add(f"{family.type} {family.name} {','.join(sorted(labels))}")
    assert published == page
    assert published >= set(CONTRACT)
